"""SIGINT, SIGTERM and SIGHUP as one wish: to stop."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from mlx_mesh.mesh.errors import ExitCode, MeshError

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(MeshError):
    """Somebody asked to stop before the mesh was ready."""

    exit_code = ExitCode.INTERRUPTED


class StopSignals:
    """While active, a stop signal raises Interrupted in the main thread or, once `hand_to` was called, is
    told to that function, which must be safe in a signal handler."""

    def __init__(self) -> None:
        self._told: Callable[[str], None] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopSignals:
        for number in STOP_SIGNALS:
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # started by nohup
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def hand_to(self, told: Callable[[str], None]) -> None:
        self._told = told

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if self._told is None:
            raise Interrupted(f"Stopped by {name} before the mesh was ready.")
        self._told(name)
