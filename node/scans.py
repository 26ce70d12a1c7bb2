"""Scans of the leader's network that clients ask for over HTTP. They look, and change nothing."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from mlx_mesh.mesh.discovery import Scan, ScanReport, ScanWish, report
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.messages import ProxyEvent, ScanNetwork, ScanReply

Scanner = Callable[[ScanWish, threading.Event], Scan]


def _scan(wish: ScanWish, stop: threading.Event) -> Scan:
    from mlx_mesh.node.scan import scan  # zeroconf is not loaded before somebody asks

    return scan(wish, stop)


class Scans:
    """One scan at a time: who asks meanwhile is given the one that runs. `stop` before the loop ends."""

    def __init__(self, send: Callable[[ProxyEvent], None], scanner: Scanner = _scan) -> None:
        self._send = send
        self._scanner = scanner
        self._running: asyncio.Task[None] | None = None
        self._waiting: list[str] = []  # ids
        self._last: ScanReport | None = None
        self._stop = threading.Event()

    def hear(self, request: ScanNetwork) -> None:
        if request.timeout_s == 0:
            self._send(ScanReply(id=request.id, report=self._last))
            return
        self._waiting.append(request.id)
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run(request.timeout_s), name="network scan")

    async def _run(self, timeout_s: float) -> None:
        error = ""
        try:
            found = await asyncio.to_thread(self._scanner, ScanWish(timeout_s=timeout_s), self._stop)
        except (MeshError, OSError) as problem:
            error = str(problem)
        else:
            self._last = report(
                found.own,
                found.interfaces,
                found.sightings,
                at=round(time.time(), 3),
                timeout_s=timeout_s,
                is_mac=found.is_mac,
            )
        waiting, self._waiting = self._waiting, []
        for query_id in waiting:
            self._send(ScanReply(id=query_id, report=None if error else self._last, error=error))

    async def stop(self) -> None:
        """End a scan that runs; nobody is told of it any more."""
        self._stop.set()
        if self._running is not None:
            await asyncio.gather(self._running, return_exceptions=True)
