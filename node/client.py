"""The proxy's view of the coordinator: generate, status and live readiness over the socket pair.

asyncio only; no HTTP and no MLX. One `CoordinatorClient` serves every open request of the process.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Literal, TypeVar

import msgspec

from mlx_mesh.mesh.errors import MeshError, ProtocolError
from mlx_mesh.mesh.messages import (
    PROXY_BEAT_S,
    Cancel,
    ChangeNode,
    Chunk,
    Deadlines,
    Drain,
    Embed,
    Embedded,
    Failed,
    GenerateRequest,
    MeshStatus,
    NodeReply,
    ProxyBeat,
    ProxyConfig,
    ProxyEvent,
    ProxyReady,
    Readiness,
    ResetPrefixes,
    ScanNetwork,
    ScanReply,
    StatusQuery,
    StatusReply,
    Submit,
    SwitchModel,
    TokenChunk,
    UnloadModel,
)
from mlx_mesh.node.pipe import AsyncPipe, BlockingPipe

R = TypeVar("R")

CONFIG_DEADLINE_S = 30.0
"""The agent sends the settings right after it started the proxy."""

SWITCH_DEADLINE_S = 120.0
"""Another model is looked at, and perhaps asked of the hub, before the answer."""

STATUS_DEADLINE_S = 5.0
"""The coordinator answers from memory; more than this means that its loop is stuck."""

SCAN_MARGIN_S = 60.0
"""Beside the time of a scan, and of another one that runs already: for the system to tell its interfaces."""

REQUEST_MARGIN_S = 30.0
"""How much longer than `Deadlines.request_s` the client waits for the coordinator to end a request."""

_GONE = "the agent on the leader's host is gone; `mlx-mesh status` says whether the mesh still runs"


class GenerationFailed(MeshError):
    """A request ended with an error; `code` is the OpenAI error code, `retry_after_s` > 0 asks to retry,
    `param` names the field at fault, where one is."""

    def __init__(self, message: str, *, code: str, retry_after_s: int = 0, param: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s
        self.param = param


class StatusUnavailable(MeshError):
    """The coordinator did not answer within STATUS_DEADLINE_S."""


def read_config(sock: socket.socket) -> ProxyConfig:
    """The first frame on a fresh socket pair. Raises ProtocolError when it does not come or is not one."""
    pipe = BlockingPipe(sock, msgspec.msgpack.Decoder(ProxyConfig))
    sock.settimeout(CONFIG_DEADLINE_S)
    try:
        config = pipe.receive()
    except TimeoutError as error:
        raise ProtocolError(
            f"the agent sent no settings to the proxy within {CONFIG_DEADLINE_S:g} s"
        ) from error
    finally:
        sock.settimeout(None)
    if config is None:
        raise ProtocolError("the agent closed the proxy's pipe before it sent the settings")
    return config


class _OpenRequest:
    """What arrived for one request and was not taken yet. Chunks wait in order; the end comes last."""

    __slots__ = ("arrived", "chunks", "failure", "finished")

    def __init__(self) -> None:
        self.chunks: deque[TokenChunk] = deque()
        self.failure: GenerationFailed | None = None
        self.finished = False  # nothing more comes from the coordinator, so there is nothing to cancel
        self.arrived = asyncio.Event()


class CoordinatorClient:
    """Requests to the coordinator. `run` must be running while any other method is used."""

    def __init__(self, pipe: AsyncPipe[ProxyEvent], request_s: float = Deadlines().request_s) -> None:
        self._pipe = pipe
        self._deadline_s = request_s + REQUEST_MARGIN_S
        self._open: dict[str, _OpenRequest] = {}
        self._status_waiters: dict[str, asyncio.Future[MeshStatus]] = {}
        self._node_waiters: dict[str, asyncio.Future[NodeReply]] = {}
        self._scan_waiters: dict[str, asyncio.Future[ScanReply]] = {}
        self._embed_waiters: dict[str, asyncio.Future[Embedded]] = {}
        self._query_ids = itertools.count(1)
        self.draining = False
        self.readiness = Readiness(
            ready=False,
            reason="the coordinator has not reported yet",
            world_size=0,
            context_length=0,
            epoch=0,
        )

    @classmethod
    async def open(cls, sock: socket.socket) -> CoordinatorClient:
        """Take over the child's end of the socket pair, after `read_config`."""
        return cls(await AsyncPipe.open(sock, msgspec.msgpack.Decoder(ProxyEvent)))

    @property
    def num_open(self) -> int:
        return len(self._open)

    def announce(self) -> None:
        """Tell the coordinator that HTTP connections are accepted."""
        self._pipe.send(ProxyReady(pid=os.getpid()))

    async def run(self) -> None:
        """Hand events to whom they belong until the agent is gone (returns) or sends nonsense (raises
        ProtocolError). Open requests then end with the code `coordinator_lost`."""
        try:
            while (event := await self._pipe.receive()) is not None:
                self._dispatch(event)
        finally:
            for entry in self._open.values():
                _fail(entry, GenerationFailed(_GONE, code="coordinator_lost", retry_after_s=5))
            waiters: tuple[asyncio.Future[Any], ...] = (
                *self._status_waiters.values(),
                *self._node_waiters.values(),
                *self._scan_waiters.values(),
                *self._embed_waiters.values(),
            )
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(StatusUnavailable(_GONE))

    async def beat(self) -> None:
        """Tell the agent that this loop runs, for ever: one that does not is killed."""
        while True:
            self._pipe.send(ProxyBeat())
            await asyncio.sleep(PROXY_BEAT_S)

    def _dispatch(self, event: ProxyEvent) -> None:
        match event:
            case Chunk(chunk=chunk):
                if (entry := self._open.get(chunk.id)) and not entry.finished:  # else: cancelled meanwhile
                    entry.chunks.append(chunk)
                    entry.finished = chunk.finish_reason is not None
                    entry.arrived.set()
            case Failed(id=request_id):
                failure = GenerationFailed(
                    event.message, code=event.code, retry_after_s=event.retry_after_s, param=event.param
                )
                if entry := self._open.get(request_id):
                    _fail(entry, failure)
                elif (embedding := self._embed_waiters.get(request_id)) and not embedding.done():
                    embedding.set_exception(failure)
            case Embedded(id=request_id):
                embedding = self._embed_waiters.get(request_id)
                if embedding is not None and not embedding.done():
                    embedding.set_result(event)
            case Readiness():
                self.readiness = event
            case StatusReply(id=query_id):
                waiter = self._status_waiters.get(query_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(event.status)
            case NodeReply(id=query_id):
                changing = self._node_waiters.get(query_id)
                if changing is not None and not changing.done():
                    changing.set_result(event)
            case ScanReply(id=query_id):
                scanning = self._scan_waiters.get(query_id)
                if scanning is not None and not scanning.done():
                    scanning.set_result(event)
            case Drain():
                self.draining = True

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        """Submit, then yield chunks up to the one with a finish_reason. Raises GenerationFailed.

        A recovery of the mesh is only a pause here. Closing the generator early, or cancelling the task
        that waits on it, sends Cancel; close it explicitly (`contextlib.aclosing`).
        """
        assert request.id not in self._open, f"request id {request.id} is in use"
        entry = self._open[request.id] = _OpenRequest()
        self._pipe.send(Submit(request=request))
        deadline = asyncio.get_running_loop().time() + self._deadline_s
        try:
            while True:
                await self._arrival(entry, deadline)
                while entry.chunks:
                    chunk = entry.chunks.popleft()
                    yield chunk
                    if chunk.finish_reason is not None:
                        return
                if entry.failure is not None:
                    raise entry.failure
                entry.arrived.clear()
        finally:
            del self._open[request.id]
            if not entry.finished:
                self._pipe.send(Cancel(id=request.id))

    async def _arrival(self, entry: _OpenRequest, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await entry.arrived.wait()
        except TimeoutError as error:
            raise GenerationFailed(
                f"the request was not finished within {self._deadline_s:g} s", code="timeout"
            ) from error

    async def embed(self, request: Embed) -> Embedded:
        """Vectors from the embedder. Raises GenerationFailed. Cancelling the task that waits sends Cancel."""
        waiter: asyncio.Future[Embedded] = asyncio.get_running_loop().create_future()
        self._embed_waiters[request.id] = waiter
        self._pipe.send(request)
        try:
            async with asyncio.timeout(self._deadline_s):
                return await waiter
        except TimeoutError as error:
            raise GenerationFailed(
                f"no embeddings came within {self._deadline_s:g} s", code="timeout"
            ) from error
        finally:
            if not waiter.done() or waiter.cancelled():
                self._pipe.send(Cancel(id=request.id))
            del self._embed_waiters[request.id]

    async def status(self, with_metrics: bool = False) -> MeshStatus:
        """The live state of the mesh, with the coordinator's metrics when asked for. Raises
        StatusUnavailable after STATUS_DEADLINE_S."""
        query_id = f"status-{next(self._query_ids)}"
        query = StatusQuery(id=query_id, with_metrics=with_metrics)
        return await self._ask(query_id, query, self._status_waiters)

    async def change_node(self, action: Literal["drain", "add"], host: str) -> NodeReply:
        """Ask the mesh to go on without a host, or with it again; the answer says whether it will. Raises
        StatusUnavailable after STATUS_DEADLINE_S."""
        query_id = f"node-{next(self._query_ids)}"
        return await self._ask(
            query_id, ChangeNode(id=query_id, action=action, host=host), self._node_waiters
        )

    async def switch_model(self, model: str) -> NodeReply:
        """Ask for another model to be served; the answer comes when it is planned or refused. Raises
        StatusUnavailable after SWITCH_DEADLINE_S."""
        query_id = f"switch-{next(self._query_ids)}"
        query = SwitchModel(id=query_id, model=model)
        return await self._ask(query_id, query, self._node_waiters, SWITCH_DEADLINE_S)

    async def unload_model(self) -> NodeReply:
        """Have the engines end. Raises StatusUnavailable after STATUS_DEADLINE_S."""
        query_id = f"unload-{next(self._query_ids)}"
        return await self._ask(query_id, UnloadModel(id=query_id), self._node_waiters)

    async def reset_prefixes(self) -> NodeReply:
        """Have all ranks drop what they keep of prompts. Raises StatusUnavailable after STATUS_DEADLINE_S."""
        query_id = f"reset-{next(self._query_ids)}"
        return await self._ask(query_id, ResetPrefixes(id=query_id), self._node_waiters)

    async def scan(self, timeout_s: float) -> ScanReply:
        """Have the leader look for hosts on its network for `timeout_s`; 0: what it saw last. Raises
        StatusUnavailable SCAN_MARGIN_S after that."""
        query_id = f"scan-{next(self._query_ids)}"
        query = ScanNetwork(id=query_id, timeout_s=timeout_s)
        deadline_s = 2 * timeout_s + SCAN_MARGIN_S if timeout_s else STATUS_DEADLINE_S
        return await self._ask(query_id, query, self._scan_waiters, deadline_s)

    async def _ask(
        self,
        query_id: str,
        query: StatusQuery | ChangeNode | ResetPrefixes | SwitchModel | UnloadModel | ScanNetwork,
        waiters: dict[str, asyncio.Future[R]],
        deadline_s: float = 0.0,
    ) -> R:
        deadline_s = deadline_s or STATUS_DEADLINE_S
        waiter: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        waiters[query_id] = waiter
        self._pipe.send(query)
        try:
            async with asyncio.timeout(deadline_s):
                return await waiter
        except TimeoutError as error:
            raise StatusUnavailable(f"the coordinator did not answer within {deadline_s:g} s") from error
        finally:
            del waiters[query_id]

    async def close(self) -> None:
        await self._pipe.close()


def _fail(entry: _OpenRequest, failure: GenerationFailed) -> None:
    if not entry.finished:
        entry.failure = failure
        entry.finished = True
        entry.arrived.set()
