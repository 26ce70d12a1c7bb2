"""From the coordinator's tokens to text: detokenising, stop strings, counting. The same for streamed and
whole answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from mlx_mesh.mesh.messages import TokenChunk, TokenLogprobs
from mlx_mesh.node.client import CoordinatorClient, GenerationFailed
from mlx_mesh.proxy.convert import NewSequence
from mlx_mesh.proxy.detokenizer import Decoder, Detokenizer
from mlx_mesh.proxy.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """One token of an answer; `start` is where its text begins, in characters of the answer."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that may be shown now, and the tokens whose text begins in it. The last piece of a sequence
    has a finish_reason and may have no text."""

    text: str
    tokens: tuple[TokenSpan, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class Tally:
    """What one sequence used. Times are of time.perf_counter."""

    prompt_tokens: int
    submitted_at: float
    completion_tokens: int = 0  # given to the client, or matched by a stop string
    cached_tokens: int = 0
    prefill_s: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0


class TextAssembler:
    """Chunks of one sequence in, pieces of text out. No clock and no waiting except for the tally's."""

    def __init__(self, decoder: Decoder, sequence: NewSequence) -> None:
        self._detokenizer = Detokenizer(decoder, sequence.prompt_tail)
        self._stops = StopMatcher(sequence.stop_strings)
        self._waiting: deque[TokenSpan] = deque()  # their text is not out yet
        self._num_decoded = 0  # characters, including those held back
        self._num_given = 0
        self.tally = Tally(len(sequence.request.prompt_ids), submitted_at=time.perf_counter())

    def add(self, chunk: TokenChunk) -> Piece:
        """What the chunk lets out. After a piece with a finish_reason there is nothing more to add."""
        self._note_arrival(chunk)
        text = ""
        for at, token_id in enumerate(chunk.token_ids):
            self.tally.completion_tokens += 1
            logprobs = chunk.logprobs[at] if at < len(chunk.logprobs) else None
            self._waiting.append(TokenSpan(token_id, self._num_decoded, logprobs))
            text += self._give(self._detokenizer.add(token_id))
            if self._stops.matched is not None:
                return Piece(text, self._release(), "stop")
        if chunk.finish_reason is None:
            return Piece(text, self._release())
        text += self._give(self._detokenizer.finish())
        if self._stops.matched is not None:
            return Piece(text, self._release(), "stop")
        text += self._stops.finish()
        tokens = tuple(self._waiting)
        self._waiting.clear()
        return Piece(text, tokens, chunk.finish_reason)

    def _give(self, text: str) -> str:
        self._num_decoded += len(text)
        given = self._stops.add(text)
        self._num_given += len(given)
        return given

    def _release(self) -> tuple[TokenSpan, ...]:
        """Tokens whose text has begun to be given out."""
        released: list[TokenSpan] = []
        while self._waiting and self._waiting[0].start < self._num_given:
            released.append(self._waiting.popleft())
        return tuple(released)

    def _note_arrival(self, chunk: TokenChunk) -> None:
        tally = self.tally
        tally.cached_tokens = max(tally.cached_tokens, chunk.cached_tokens)
        tally.prefill_s = tally.prefill_s or chunk.prefill_s  # a recovery prefills again; the first counts
        if chunk.token_ids:
            tally.last_at = time.perf_counter()
            tally.first_at = tally.first_at or tally.last_at


class Generation:
    """The sequences of one HTTP request, generated side by side. `close` it whatever happens: it cancels
    what still runs on all ranks."""

    def __init__(self, client: CoordinatorClient, decoder: Decoder, sequences: Sequence[NewSequence]) -> None:
        self._client = client
        self._pieces: asyncio.Queue[tuple[int, Piece] | Exception] = asyncio.Queue()
        self._num_left = len(sequences)
        assemblers = [TextAssembler(decoder, sequence) for sequence in sequences]
        self.tallies = tuple(assembler.tally for assembler in assemblers)
        self._tasks = [
            asyncio.create_task(self._pump(at, sequence, assembler))
            for at, (sequence, assembler) in enumerate(zip(sequences, assemblers, strict=True))
        ]

    async def _pump(self, index: int, sequence: NewSequence, assembler: TextAssembler) -> None:
        try:
            async with contextlib.aclosing(self._client.generate(sequence.request)) as chunks:
                async for chunk in chunks:
                    piece = assembler.add(chunk)
                    if piece.finish_reason == "cancelled":
                        raise GenerationFailed(
                            "the mesh ended this request", code="cancelled", retry_after_s=5
                        )
                    if piece.text or piece.finish_reason is not None:
                        self._pieces.put_nowait((index, piece))
                    if piece.finish_reason is not None:
                        return
        except Exception as error:  # handed to whoever waits in `next`
            self._pieces.put_nowait(error)

    async def next(self, timeout_s: float | None = None) -> tuple[int, Piece] | None:
        """The next piece and its sequence's number; None when all are finished. Raises TimeoutError when
        none comes in `timeout_s`, and GenerationFailed. None as the limit: the client ends at its own."""
        if self._num_left == 0:
            return None
        async with asyncio.timeout(timeout_s):
            item = await self._pieces.get()
        if isinstance(item, Exception):
            raise item
        self._num_left -= item[1].finish_reason is not None
        return item

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
