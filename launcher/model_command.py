"""`mlx-mesh model unload` and `model load [MODEL]`: ask the leader, then wait until it is so."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from mlx_mesh.launcher.api import Api, ApiError
from mlx_mesh.launcher.node_command import CHANGE_S, PASSING_STATUS, POLL_S
from mlx_mesh.mesh.errors import MeshError

UNLOADED = "model_unloaded"


def change_model(api: Api, action: str, model: str, say: Callable[[str], None]) -> None:
    """`model` '' = the one that is or was served. Raises ApiError for a refusal, and MeshError when it is not
    done after CHANGE_S."""
    reply = api.post(f"/v1/models/{action}", {"model": model} if model else {})
    say(str(reply["message"]))
    if not reply["changing"]:
        return
    until = time.monotonic() + CHANGE_S
    while True:
        try:
            status = api.get("/v1/cluster/status")
        except ApiError as error:  # the front end of another model begins
            if error.status not in PASSING_STATUS:
                raise
            reason = str(error)
        else:
            if done := _done(action, status, reply["epoch"]):
                say(done)
                return
            reason = status.get("reason") or "no reason given"
        if time.monotonic() > until:
            raise MeshError(f"That is not done after {CHANGE_S:g} s: {reason.rstrip('.')}.")
        time.sleep(POLL_S)


def _done(action: str, status: dict[str, Any], epoch: int) -> str:
    """In words; '' while it is not."""
    if action == "unload":
        return "Unloaded." if not status["ready"] and status.get("code") == UNLOADED else ""
    if not status["ready"] or status["epoch"] <= epoch:
        return ""
    told = f" ({status['switch']})" if status.get("switch") else ""
    return f"{status['model']} serves{told}."
