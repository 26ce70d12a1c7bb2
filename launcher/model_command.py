"""`mlx-mesh model unload` and `model load [MODEL]`: ask the leader, then wait until it is so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mlx_mesh.launcher.api import Api
from mlx_mesh.launcher.node_command import follow_change

UNLOADED = "model_unloaded"


def change_model(api: Api, action: str, model: str, say: Callable[[str], None]) -> None:
    """`model` '' = the one that is or was served. Raises ApiError for a refusal, and MeshError when it is not
    done after CHANGE_S."""
    reply = api.post(f"/v1/models/{action}", {"model": model} if model else {})
    follow_change(api, reply, lambda status: _done(action, status, reply["epoch"]), say)


def _done(action: str, status: dict[str, Any], epoch: int) -> str:
    """In words; '' while it is not."""
    if action == "unload":
        return "Unloaded." if not status["ready"] and status.get("code") == UNLOADED else ""
    if not status["ready"] or status["epoch"] <= epoch:
        return ""
    told = f" ({status['switch']})" if status.get("switch") else ""
    return f"{status['model']} serves{told}."
