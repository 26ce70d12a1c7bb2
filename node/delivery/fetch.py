"""`python -m mlx_mesh.node.delivery.fetch`: get a hub model as a whole into the hub's own cache. FetchOrder
in, Fetched out. What came before it was ended is not fetched again."""

from __future__ import annotations

import os
import sys

from mlx_mesh.mesh.delivery_orders import Fetched, FetchOrder, Reading
from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.node.delivery.program import Speaker, end_now, on_end_of_stdin, run_program
from mlx_mesh.node.hub import fetch_all, locate, parse_hub_id


def _work(order: FetchOrder, speaker: Speaker) -> None:
    on_end_of_stdin(end_now)
    if order.offline:
        os.environ["HF_HUB_OFFLINE"] = "1"
    hub_id = parse_hub_id(order.model)
    if hub_id is None:
        raise PreflightError(f"{order.model} is no hub id")
    folder = locate(*hub_id)
    fetch_all(folder, lambda done, total: speaker.say(Reading(done=done, total=total)))
    speaker.say(Fetched(folder=str(folder)))


if __name__ == "__main__":
    sys.exit(run_program(FetchOrder, _work))
