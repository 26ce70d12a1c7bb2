"""The sequences of one HTTP request, generated side by side. The same for streamed and whole answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import msgspec

from mlx_mesh.mesh.messages import GenerateRequest
from mlx_mesh.node.client import CoordinatorClient, GenerationFailed
from mlx_mesh.proxy.assembler import Assembler, NewSequence
from mlx_mesh.proxy.detokenizer import Decoder
from mlx_mesh.proxy.media.item import NOUNS, blamed, told
from mlx_mesh.proxy.open_answers import CancelledByRequest
from mlx_mesh.proxy.pieces import EndPiece, Piece

_OF_MEDIA = tuple(f"invalid_{kind}" for kind in NOUNS)
"""Codes of engines that could not use what a prompt has beside text."""

_SOON_S = 0.001  # 0 would mean no limit


class Generation:
    """`close` it whatever happens: it cancels what still runs on all ranks."""

    def __init__(self, client: CoordinatorClient, decoder: Decoder, sequences: Sequence[NewSequence]) -> None:
        self._client = client
        self._pieces: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()
        self._num_left = len(sequences)
        self._admitted = asyncio.Event()
        self._began_at = time.monotonic()
        assemblers = [Assembler(decoder, sequence) for sequence in sequences]
        self.tallies = tuple(assembler.tally for assembler in assemblers)
        self._tasks = [
            asyncio.create_task(self._pump(at, sequence, assembler))
            for at, (sequence, assembler) in enumerate(zip(sequences, assemblers, strict=True))
        ]

    async def _pump(self, index: int, sequence: NewSequence, assembler: Assembler) -> None:
        try:
            request: GenerateRequest | None = sequence.request
            while request is not None:
                request = await self._follow(index, request, sequence, assembler)
        except GenerationFailed as error:
            if error.code in _OF_MEDIA:
                error = GenerationFailed(
                    told(str(error), error.param, sequence.media_params),
                    code=error.code,
                    retry_after_s=error.retry_after_s,
                    param=blamed(error.param, sequence.media_params),
                )
            self._pieces.put_nowait(error)
        except Exception as error:  # handed to whoever waits in `next`
            self._pieces.put_nowait(error)
        finally:
            self._admitted.set()

    async def _follow(
        self, index: int, request: GenerateRequest, sequence: NewSequence, assembler: Assembler
    ) -> GenerateRequest | None:
        """Pass one request's tokens on. The request to go on with when the thinking had to be ended."""
        if not assembler.must_end_thinking:
            async with contextlib.aclosing(self._client.generate(request)) as chunks:
                async for chunk in chunks:
                    if index == 0:
                        self._admitted.set()
                    if chunk.finish_reason == "cancelled":
                        raise GenerationFailed(
                            "the mesh ended this request", code="cancelled", retry_after_s=5
                        )
                    if self._put(index, assembler.add(chunk)):
                        return None
                    if assembler.must_end_thinking:
                        break
        self._put(index, assembler.end_thinking())
        if len(assembler.token_ids) >= request.max_tokens:
            self._put(index, assembler.finish("length"))
            return None
        return msgspec.structs.replace(
            request,
            id=f"{sequence.request.id}-t{len(assembler.token_ids)}",
            sent_ids=tuple(assembler.token_ids),
            max_time_s=self._time_left(sequence.request.max_time_s),
        )

    def _time_left(self, max_time_s: float) -> float:
        """Of a limit that began with the first submission; 0 = there is none."""
        spent_s = time.monotonic() - self._began_at
        return max(_SOON_S, max_time_s - spent_s) if max_time_s else 0.0

    def _put(self, index: int, pieces: Sequence[Piece]) -> bool:
        """True when the sequence is complete."""
        for piece in pieces:
            self._pieces.put_nowait((index, piece))
        return bool(pieces) and isinstance(pieces[-1], EndPiece)

    async def is_admitted(self, timeout_s: float) -> bool:
        """Whether the first sequence has its place, or something ended, within `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._admitted.wait()
        return self._admitted.is_set()

    async def next(self, timeout_s: float | None = None) -> tuple[int, Piece] | None:
        """The next piece and its sequence's number; None when all are finished. Raises TimeoutError when
        none comes in `timeout_s`, and GenerationFailed. None as the limit: the client ends at its own."""
        if self._num_left == 0:
            return None
        async with asyncio.timeout(timeout_s):
            item = await self._pieces.get()
        if isinstance(item, Exception):
            raise item
        self._num_left -= isinstance(item[1], EndPiece)
        return item

    def cancel(self) -> None:
        """Somebody else than the client ends it: `next` raises CancelledByRequest."""
        for task in self._tasks:
            task.cancel()
        self._pieces.put_nowait(CancelledByRequest("This answer was cancelled by a request for its id."))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
