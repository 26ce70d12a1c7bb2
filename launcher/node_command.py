"""`mlx-mesh node drain HOST` and `node add HOST`: ask the leader, then wait until the mesh serves again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from mlx_mesh.launcher.api import Api, ApiError
from mlx_mesh.mesh.errors import MeshError, PlacementError

POLL_S = 0.5
CHANGE_S = 900.0
"""A large model is read anew on every host meanwhile."""

PASSING_STATUS = (0, 503)
"""No answer, or one that the front end cannot give at the moment: while the mesh changes neither is final."""


def change_node(api: Api, action: str, host: str, say: Callable[[str], None]) -> None:
    """Raises PlacementError when the model would not fit, ApiError for any other refusal, and MeshError when
    the changed mesh is not ready after CHANGE_S. A leader that cannot answer for a moment is asked again."""
    try:
        reply = api.post(f"/v1/cluster/nodes/{quote(host, safe='')}/{action}")
    except ApiError as error:
        if error.code == "does_not_fit":
            raise PlacementError(str(error)) from error
        raise
    follow_change(api, reply, lambda status: _done(status, reply["epoch"]), say)


def follow_change(
    api: Api, reply: dict[str, Any], done: Callable[[dict[str, Any]], str], say: Callable[[str], None]
) -> None:
    """Say what the leader answered and, if the mesh changes now, wait until `done` finds words for a status.
    A front end that does not answer for a moment is asked again. Raises ApiError, and MeshError after
    CHANGE_S."""
    say(str(reply["message"]))
    if not reply["changing"]:
        return
    until = time.monotonic() + CHANGE_S
    while True:
        try:
            status = api.get("/v1/cluster/status")
        except ApiError as error:
            if error.status not in PASSING_STATUS:
                raise
            reason = str(error)
        else:
            if words := done(status):
                say(words)
                return
            reason = status.get("reason") or "no reason given"
        if time.monotonic() > until:
            raise MeshError(f"The mesh is not ready again after {CHANGE_S:g} s: {reason.rstrip('.')}.")
        time.sleep(POLL_S)


def _done(status: dict[str, Any], epoch: int) -> str:
    return _in_words(status) if status["ready"] and status["epoch"] > epoch else ""


def _in_words(status: dict[str, Any]) -> str:
    size = status["world_size"]
    lineup = f"; {status['lineup']}" if status.get("lineup") else ""
    return (
        f"Ready again: {size} rank{'s' if size > 1 else ''}, sharding {status['sharding']}, epoch "
        f"{status['epoch']}{lineup}."
    )
