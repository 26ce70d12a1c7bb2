"""Why an engine ends by itself: the kind, by which another try makes sense or not, and the exit status."""

from __future__ import annotations

from typing import Literal

from mlx_mesh.mesh.errors import (
    BringUpError,
    MeshError,
    PlacementError,
    PreflightError,
    ProtocolError,
    SettingsError,
)

FailureKind = Literal["config", "memory", "peer_lost", "stray_peer", "bind", "version", "internal"]

EXIT_STATUS: dict[FailureKind, int] = {
    "internal": 1,
    "config": 2,
    "memory": 3,
    "peer_lost": 4,
    "stray_peer": 5,
    "bind": 6,
    "version": 7,
}
"""Exit status of an engine by the kind of its EngineFailed report; 0 = it left by the stop plan. 1 also when
the watchdog over `mx.distributed.init` ended it, which can report nothing."""

EXIT_AGENT_GONE = 9
"""The agent closed its end of the pipe, so nobody is left to report to."""


class EngineError(MeshError):
    """An engine cannot go on; `kind` and `lost_ranks` go into its EngineFailed report."""

    def __init__(self, kind: FailureKind, message: str, lost_ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.kind: FailureKind = kind
        self.lost_ranks = lost_ranks


_PEER_LOST = ("connection to a peer was lost", "closed by the peer", "[ring] connection")
_NO_MEMORY = (
    "unable to allocate",
    "insufficient memory",
    "out of memory",
    "bad_alloc",
    "maximum allowed buffer size",
    "cannot allocate memory",
)


def describe(error: BaseException) -> EngineError:
    """Whatever ended an engine, with its kind. MLX raises plain RuntimeErrors, told apart by text."""
    return error if isinstance(error, EngineError) else EngineError(*_kind_and_words(error))


def _kind_and_words(error: BaseException) -> tuple[FailureKind, str]:
    text = str(error) or type(error).__name__
    if isinstance(error, (PlacementError, PreflightError, SettingsError)):
        return "config", text
    if isinstance(error, BringUpError):  # a checked exchange went wrong
        return "stray_peer", text
    if isinstance(error, ProtocolError):
        return "internal", text
    lowered = text.lower()
    if any(sign in lowered for sign in _PEER_LOST):
        return "peer_lost", (
            f"The connection to another rank was lost during a collective ({text}). "
            "Its engine or host is gone: see that rank's log."
        )
    if isinstance(error, MemoryError) or any(sign in lowered for sign in _NO_MEMORY):
        return "memory", (
            f"MLX could not get memory ({text}). Give this rank fewer layers, shorten the context, "
            "or add a host."
        )
    if isinstance(error, (ModuleNotFoundError, FileNotFoundError, PermissionError)):
        return "config", f"{type(error).__name__}: {text}"
    return "internal", f"{type(error).__name__}: {text}"
