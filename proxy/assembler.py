"""Tokens of one sequence in, pieces of an answer out: detokenising, tags, stop strings, counting.

The one pipeline behind every endpoint, streamed and whole. It waits for nothing and looks at no clock but
the tally's.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mlx_mesh.mesh.messages import GenerateRequest, TokenChunk
from mlx_mesh.proxy.detokenizer import Decoder, Detokenizer
from mlx_mesh.proxy.markup import Markup, Region
from mlx_mesh.proxy.media.item import Params
from mlx_mesh.proxy.pieces import CallPiece, EndPiece, Piece, ReasoningPiece, TextPiece, TokenSpan
from mlx_mesh.proxy.splitter import Calls, Found, Splitter, Stretch
from mlx_mesh.proxy.stops import StopMatcher


@dataclass(frozen=True, slots=True)
class NewSequence:
    """One sequence to generate, and how its tokens become an answer."""

    request: GenerateRequest
    stop_strings: tuple[str, ...] = ()
    prompt_tail: tuple[int, ...] = ()  # what the text continues
    shares_prompt: bool = False  # with the sequence before: counted there
    markup: Markup = field(default_factory=Markup)
    region: Region = Region.ANSWER  # where the prompt ends
    tools: tuple[dict[str, Any], ...] = ()
    one_call: bool = False  # the answer ends with its first call
    strip_thinking: bool = False
    thinking_budget: int | None = None  # in tokens, None = no limit
    thinking_end_ids: tuple[int, ...] = ()  # what ends the reasoning when the budget is spent
    media_params: Params = field(default_factory=dict)  # the request's parts that have its media


@dataclass(slots=True)
class Tally:
    """What one sequence used. Times are of time.perf_counter."""

    prompt_tokens: int
    submitted_at: float
    shares_prompt: bool = False
    completion_tokens: int = 0  # given to the client, or matched by a stop string or a tag
    reasoning_tokens: int = 0  # of these
    cached_tokens: int = 0
    prefill_s: float = 0.0
    first_at: float = 0.0
    last_at: float = 0.0


class Assembler:
    """One sequence. After a piece that is an EndPiece there is nothing more to add."""

    def __init__(self, decoder: Decoder, sequence: NewSequence) -> None:
        markup, tools = sequence.markup, sequence.tools
        visible: Mapping[int, str] = markup.visible_ids if sequence.tools or markup.has_reasoning else {}
        self._detokenizer = Detokenizer(decoder, sequence.prompt_tail, visible)
        self._splitter = Splitter(markup, sequence.region, tools)
        self._stops = StopMatcher(sequence.stop_strings)
        self._sequence = sequence
        self._undecided: deque[TokenSpan] = deque()  # start: in the generated text; region not known yet
        self._waiting: deque[TokenSpan] = deque()  # start: in the answer; text not out yet
        self._num_decoded = 0  # characters of the generated text
        self._num_answer = 0  # characters of the answer, including those that are held back
        self._num_given = 0
        self._num_calls = 0
        self._was_reasoning = sequence.region is Region.REASONING
        self._is_done = False
        self.token_ids: list[int] = []
        request = sequence.request
        self.tally = Tally(len(request.prompt_ids), time.perf_counter(), shares_prompt=sequence.shares_prompt)

    @property
    def must_end_thinking(self) -> bool:
        """The budget is spent inside the reasoning: what generates must stop, and go on after
        `end_thinking`."""
        budget = self._sequence.thinking_budget
        if budget is None or self._is_done or self._splitter.region is not Region.REASONING:
            return False
        return self.tally.reasoning_tokens + len(self._undecided) >= budget

    def end_thinking(self) -> list[Piece]:
        """Write the closing tag in the model's place."""
        pieces: list[Piece] = []
        for token_id in self._sequence.thinking_end_ids:
            pieces += self._add_token(token_id, None)
        return pieces

    def add(self, chunk: TokenChunk) -> list[Piece]:
        """What the chunk lets out."""
        self._note_arrival(chunk)
        pieces: list[Piece] = []
        for at, token_id in enumerate(chunk.token_ids):
            pieces += self._add_token(token_id, chunk.logprobs[at] if at < len(chunk.logprobs) else None)
            if self._is_done or self.must_end_thinking:
                return pieces
        if chunk.finish_reason is not None:
            pieces += self.finish(chunk.finish_reason)
        return pieces

    def finish(self, reason: str) -> list[Piece]:
        """No more tokens come."""
        pieces = self._give(self._splitter.add(self._decoded(self._detokenizer.finish())))
        if not self._is_done:
            pieces += self._give(self._splitter.finish(is_cut=reason == "length"))
        if self._is_done:
            return pieces
        text = self._stops.finish()
        if self._splitter.region is Region.ANSWER and not self._splitter.is_after_tag:
            self._settle_inside(self._num_decoded + 1, self._num_answer - self._num_decoded)
        self._settle_outside(self._num_decoded + 1, self._was_reasoning)
        if text or self._waiting:
            pieces.append(TextPiece(text, tuple(self._waiting)))
        self._is_done = True
        if reason == "stop" and self._num_calls:
            reason = "tool_calls"
        return [*pieces, EndPiece(reason)]

    def _add_token(self, token_id: int, logprobs: Any) -> list[Piece]:
        self.tally.completion_tokens += 1
        self.token_ids.append(token_id)
        self._undecided.append(TokenSpan(token_id, self._num_decoded, logprobs))
        return self._give(self._splitter.add(self._decoded(self._detokenizer.add(token_id))))

    def _decoded(self, text: str) -> str:
        self._num_decoded += len(text)
        return text

    # ------------------------------------------------------------ out

    def _give(self, found: Sequence[Found]) -> list[Piece]:
        pieces: list[Piece] = []
        for one in found:
            give: Callable[[Any], list[Piece]] = (
                self._give_calls if isinstance(one, Calls) else self._give_text
            )
            pieces += give(one)
            if self._is_done:
                break
        return pieces

    def _give_text(self, stretch: Stretch) -> list[Piece]:
        is_reasoning = stretch.region is Region.REASONING
        self._settle_outside(stretch.start, is_reasoning or self._was_reasoning)
        self._was_reasoning = is_reasoning
        end = stretch.start + len(stretch.text)
        if is_reasoning:
            self._settle_outside(end, is_reasoning=True)
            held = self._flush_stops()
            return held if self._sequence.strip_thinking else [*held, ReasoningPiece(stretch.text)]
        self._settle_inside(end, self._num_answer - stretch.start)
        self._num_answer += len(stretch.text)
        text = self._stops.add(stretch.text)
        self._num_given += len(text)
        tokens = self._release()
        pieces: list[Piece] = [TextPiece(text, tokens)] if text or tokens else []
        if self._stops.matched is not None:
            reason = "tool_calls" if self._num_calls else "stop"
            return [*pieces, *self._end(reason, self._stops.matched)]
        return pieces

    def _give_calls(self, found: Calls) -> list[Piece]:
        self._settle_outside(self._num_decoded, self._was_reasoning)
        self._was_reasoning = False
        calls = found.calls[:1] if self._sequence.one_call else found.calls
        pieces = self._flush_stops()
        for call in calls:
            pieces.append(CallPiece(self._num_calls, call))
            self._num_calls += 1
        return [*pieces, *self._end("tool_calls")] if self._sequence.one_call else pieces

    def _end(self, reason: str, stop_string: str | None = None) -> list[Piece]:
        self._is_done = True
        return [EndPiece(reason, stop_string)]

    def _flush_stops(self) -> list[Piece]:
        """A stop string does not reach over a tag."""
        text = self._stops.finish()
        self._num_given += len(text)
        tokens = self._release()
        return [TextPiece(text, tokens)] if text or tokens else []

    # ------------------------------------------------------------ tokens

    def _settle_outside(self, end: int, is_reasoning: bool) -> None:
        """Tokens that begin before `end` in the generated text are not of the answer."""
        while self._undecided and self._undecided[0].start < end:
            self._undecided.popleft()
            self.tally.reasoning_tokens += is_reasoning

    def _settle_inside(self, end: int, shift: int) -> None:
        """Tokens that begin before `end` are of the answer; `shift` from generated text to answer."""
        while self._undecided and self._undecided[0].start < end:
            token = self._undecided.popleft()
            self._waiting.append(TokenSpan(token.token_id, token.start + shift, token.logprobs))

    def _release(self) -> tuple[TokenSpan, ...]:
        """Tokens whose text has begun to be given out."""
        released: list[TokenSpan] = []
        while self._waiting and self._waiting[0].start < self._num_given:
            released.append(self._waiting.popleft())
        return tuple(released)

    def _note_arrival(self, chunk: TokenChunk) -> None:
        tally = self.tally
        tally.prompt_tokens = chunk.prompt_tokens or tally.prompt_tokens
        tally.cached_tokens = max(tally.cached_tokens, chunk.cached_tokens)
        tally.prefill_s = tally.prefill_s or chunk.prefill_s  # a recovery prefills again; the first counts
        if chunk.token_ids:
            tally.last_at = time.perf_counter()
            tally.first_at = tally.first_at or tally.last_at
