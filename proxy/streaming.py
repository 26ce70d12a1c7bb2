"""Server-sent events that keep the client alive by the clock, and notice when it is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.proxy.answers.base import Answer
from mlx_mesh.proxy.errors import to_api_error
from mlx_mesh.proxy.generation import Generation
from mlx_mesh.proxy.pieces import Piece
from mlx_mesh.proxy.usage import Usage

_log = logging.getLogger(__name__)

T = TypeVar("T")

Finish = Callable[[bool], Awaitable[None]]
"""Called once at the end of a stream; True when the client got all of it."""

STALLED_CLIENT_S = 120.0
"""A client that is connected and takes no byte for this long is given up."""


async def answer_events(
    generation: Generation, first: tuple[int, Piece] | None, answer: Answer, keepalive_s: float
) -> AsyncGenerator[bytes, None]:
    """The stream of one answer: opening at once, then pieces as they come, a sign of life whenever nothing
    was written for `keepalive_s`, the closing. An error becomes the last event instead.
    `first`: a piece that was taken from the generation before."""
    try:
        async for event in _events(generation, first, answer, keepalive_s):
            yield event
    except Exception as error:
        if not isinstance(error, MeshError):
            _log.exception("an answer broke off")
        yield answer.failure(to_api_error(error))


async def _events(
    generation: Generation, first: tuple[int, Piece] | None, answer: Answer, keepalive_s: float
) -> AsyncGenerator[bytes, None]:
    yield answer.opening(len(generation.tallies))
    item = first
    while True:
        if item is not None and (event := answer.piece(*item)):
            yield event
        try:
            item = await generation.next(keepalive_s)
        except TimeoutError:
            item = None
            yield answer.keepalive()
            continue
        if item is None:
            break
    yield answer.closing(Usage.of(generation.tallies))


class EventStream(Response):
    """Sends events as they come. When the client goes, or at the end, `finish` runs once, with whether
    the client saw the end."""

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        finish: Finish,
        headers: Mapping[str, str] | None = None,
        media_type: str = "text/event-stream",
    ) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.media_type = media_type
        self._events = events
        self._finish = finish
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_complete = False
        try:
            await while_connected(receive, self._write(send))
            is_complete = True
        except (ClientDisconnect, TimeoutError):
            pass  # nobody is left to tell
        finally:
            await self._events.aclose()
            await self._finish(is_complete)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._events:
            async with asyncio.timeout(STALLED_CLIENT_S):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Do the work unless the client goes: then it is cancelled and ClientDisconnect raised. The request's
    body must have been read."""
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return await task
    finally:
        for one in (task, watcher):
            one.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
