"""The embedder child on the leader: a second model, whose failures touch nothing else.

It is started with the mesh and started again, after a pause that grows, when it ends or is stuck. Requests
that it had are refused as worth another try; while there is none, so are new ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.messages import (
    Cancel,
    Embed,
    Embedded,
    EmbedderConfig,
    EmbedderReady,
    EmbedderReport,
    EmbeddingStatus,
    EmbedRefused,
    Failed,
    Metric,
    ProxyEvent,
)
from mlx_mesh.node.children import Child
from mlx_mesh.node.pipe import AsyncPipe
from mlx_mesh.node.processes import ProcessId, describe_exit, is_stopped

LOAD_S = 120.0
"""From the start of the process until its model is loaded."""

STALL_S = 60.0
"""A batch is small: an embedder that says nothing for so long, and has work, is stuck."""

REQUEST_S = 300.0
"""One request, waiting included."""

MAX_OPEN = 256
MAX_OPEN_ITEMS = 64_000_000
"""Characters and token ids of all open requests, unless there is only one: the embedder holds them all."""

MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
RETRY_AFTER_S = 5
_TICK_S = 0.25
_EXIT_S = 10.0
_NUM_LINES = 15
_CANNOT_LOAD = 2  # failure.EXIT_STATUS["config"]: another start would meet the same files


@dataclass(frozen=True, slots=True)
class _Open:
    until: float  # then it is too late
    num_items: int


class Embedder:
    """Keeps one embedder running. `run` until `stop`; the other methods from the same loop."""

    def __init__(
        self,
        *,
        program: Sequence[str],
        model: Path,
        environment: Mapping[str, str],
        note: Callable[[str], None],
        on_change: Callable[[ProcessId], None],
        load_s: float = LOAD_S,
        stall_s: float = STALL_S,
        request_s: float = REQUEST_S,
    ) -> None:
        """`note`: a line for people; `on_change`: another process is the embedder now."""
        self._program = tuple(program)
        self._model = model
        self._environment = environment
        self._note = note
        self._on_change = on_change
        self._load_s, self._stall_s, self._request_s = load_s, stall_s, request_s
        self._send: Callable[[ProxyEvent], None] = lambda event: None
        self._on_line: Callable[[str], None] = lambda line: None
        self._decoder = msgspec.msgpack.Decoder(EmbedderReport)
        self._child: Child | None = None
        self._pipe: AsyncPipe[EmbedderReport] | None = None
        self._ready: EmbedderReady | None = None
        self._open: dict[str, _Open] = {}
        self._heard_at = 0.0
        self._reason = "the embedding model is loading"
        self._is_stopping = False
        self.num_restarts = self.num_served = 0

    def attach(self, send: Callable[[ProxyEvent], None], on_line: Callable[[str], None]) -> None:
        """Where answers go, and what the child prints."""
        self._send, self._on_line = send, on_line

    # ------------------------------------------------------------ the proxy's side

    def submit(self, request: Embed) -> None:
        num_items = sum(map(len, request.inputs))
        num_open_items = sum(one.num_items for one in self._open.values())
        if self._pipe is None or self._ready is None:
            self._fail(request.id, "not_ready", f"No embeddings now: {self._reason}.", RETRY_AFTER_S)
        elif len(self._open) >= MAX_OPEN or (self._open and num_open_items + num_items > MAX_OPEN_ITEMS):
            message = f"{len(self._open)} requests for embeddings are open; try again later."
            self._fail(request.id, "queue_full", message, RETRY_AFTER_S)
        else:
            if not self._open:
                self._heard_at = self._now()
            self._open[request.id] = _Open(self._now() + self._request_s, num_items)
            self._pipe.send(request)

    def cancel(self, request_id: str) -> None:
        """Its client is gone."""
        if self._open.pop(request_id, None) is not None and self._pipe is not None:
            self._pipe.send(Cancel(id=request_id))

    def forget_clients(self) -> None:
        """The proxy is gone, and its clients with it."""
        for request_id in list(self._open):
            self.cancel(request_id)

    def status(self) -> EmbeddingStatus:
        ready = self._ready
        return EmbeddingStatus(
            model=str(self._model),
            ready=ready is not None,
            reason="" if ready is not None else self._reason,
            pid=self._child.pid if self._child is not None else 0,
            restarts=self.num_restarts,
            weights_bytes=ready.weights_bytes if ready else 0,
            num_dimensions=ready.num_dimensions if ready else 0,
            max_tokens=ready.max_tokens if ready else 0,
            num_open=len(self._open),
        )

    def metrics(self) -> tuple[Metric, ...]:
        return (
            Metric(
                name="mlx_mesh_embedding_requests_total",
                kind="counter",
                help="Requests for embeddings that were answered",
                value=self.num_served,
            ),
            Metric(
                name="mlx_mesh_embedding_restarts_total",
                kind="counter",
                help="Embedders that ended and were started again",
                value=self.num_restarts,
            ),
            Metric(
                name="mlx_mesh_embedding_ready",
                kind="gauge",
                help="1 while the embedding model is loaded",
                value=float(self._ready is not None),
            ),
        )

    def _fail(self, request_id: str, code: str, message: str, retry_after_s: int = 0) -> None:
        self._send(Failed(id=request_id, code=code, message=message, retry_after_s=retry_after_s))

    # ------------------------------------------------------------ the child's life

    async def run(self) -> None:
        """Until `stop`. Raises PreflightError when the model cannot be used at all."""
        pause_s, was_ever_ready = MIN_PAUSE_S, False
        while not self._is_stopping:
            served_before = self.num_served
            how = await self._live_once(was_ever_ready)
            was_ever_ready = was_ever_ready or self._ready is not None
            self._ready = None
            if self._is_stopping:
                return
            if self.num_served > served_before:
                pause_s = MIN_PAUSE_S  # it worked for a while
            self.num_restarts += 1
            self._reason = f"the embedder {how}, and is started again"
            self._note(f"the embedder {how}; {len(self._open)} of its requests end; a new one starts")
            for request_id in list(self._open):
                self._fail(request_id, "not_ready", f"The embedder {how}; try again.", RETRY_AFTER_S)
            self._open.clear()
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, MAX_PAUSE_S)

    async def _live_once(self, was_ever_ready: bool) -> str:
        """One embedder's life; returns how it ended, in words."""
        try:
            child, sock = await Child.start(self._program, self._on_line, environment=self._environment)
        except OSError as error:
            return f"cannot be started: {error}"
        self._child = child
        pipe = await AsyncPipe.open(sock, self._decoder)
        self._on_change(child.identity)
        pipe.send(EmbedderConfig(model=str(self._model)))
        self._pipe = pipe
        self._heard_at = self._now()
        born_at = self._now()
        hearing = asyncio.create_task(self._hear(pipe), name="embedder reports")
        problem = ""
        try:
            while not hearing.done() and not problem:
                await asyncio.wait({hearing}, timeout=_TICK_S)
                problem = self._judge(born_at)
            if hearing.done() and (nonsense := hearing.exception()) is not None:
                problem = f"sent nonsense ({nonsense})"
        finally:
            hearing.cancel()
            self._pipe = None
            await pipe.close()
        if problem:
            await child.kill()
            return problem
        await child.has_ended(_EXIT_S)
        code = await child.kill()
        if code == _CANNOT_LOAD and not was_ever_ready and self._ready is None:
            lines = "\n  ".join(["Its last lines:", *list(child.last_lines)[-_NUM_LINES:]])
            raise PreflightError(f"the embedding model in {self._model} cannot be used. {lines}")
        return describe_exit(code)

    async def _hear(self, pipe: AsyncPipe[EmbedderReport]) -> None:
        """Until the child's end. Raises ProtocolError."""
        while (report := await pipe.receive()) is not None:
            self._heard_at = self._now()
            match report:
                case EmbedderReady():
                    self._ready = report
                    self._note(
                        f"the embedding model is ready: {report.num_dimensions} dimensions, up to "
                        f"{report.max_tokens} tokens, {report.weights_bytes / 1e9:.2f} GB"
                    )
                case Embedded(id=request_id):
                    if self._open.pop(request_id, None) is not None:
                        self.num_served += 1
                        self._send(report)
                case EmbedRefused(id=request_id):
                    if self._open.pop(request_id, None) is not None:
                        self._send(
                            Failed(
                                id=request_id, code=report.code, message=report.message, param=report.param
                            )
                        )

    def _judge(self, born_at: float) -> str:
        """End what is late; why the child must be killed, '' while it need not."""
        now = self._now()
        if self._child is not None and is_stopped(self._child.pid):
            return "was stopped by a signal, and was killed"
        if self._ready is None:
            if now - born_at > self._load_s:
                return f"did not load its model within {self._load_s:g} s"
            return ""
        for request_id in [one for one, entry in self._open.items() if now > entry.until]:
            self.cancel(request_id)
            self._fail(request_id, "timeout", f"No embeddings within {self._request_s:g} s.")
        if self._open and now - self._heard_at > self._stall_s:
            return f"computed nothing for {self._stall_s:g} s, though it had work, and was killed"
        return ""

    async def stop(self) -> None:
        """End the child. It has no state worth a goodbye."""
        self._is_stopping = True
        if self._child is not None:
            with contextlib.suppress(ProcessLookupError):
                await self._child.kill()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
