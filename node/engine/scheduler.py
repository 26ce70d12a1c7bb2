"""What the leader does next: which requests wait, which run, what each step plan admits and cancels.

Plain decisions without tensors or clocks of its own. The loop calls, in this order for each step:
`next_plan`, `applied` when the plan took effect on this rank, `produced` with what the step gave.

Memory is given out as it is needed: a request is admitted when it fits beside the running ones and all have
room to grow. When they have grown too large together, the newest row leaves and goes on later from where it
was; the oldest always stays, so that everybody's turn comes. Nobody is overtaken in the queue, but while it
waits for a row that computes its own prompt (PrefixPlanner.must_wait).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from mlx_mesh.mesh.kv_budget import BLOCK_TOKENS, KvBudget
from mlx_mesh.mesh.messages import (
    Admission,
    FinishReason,
    GenerateRequest,
    RequestFailed,
    StepPlan,
    TokenChunk,
    TokenLogprobs,
)
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.node.engine.prefix_planner import PrefixPlanner, Stored

GROWTH_TOKENS = BLOCK_TOKENS
"""What each row must be able to grow by when one more is admitted: rows do not come and go at each step."""

AHEAD_TOKENS = 16
"""Steps that may be under way when a plan is made; rows are this much longer when it is applied."""


@dataclass(frozen=True, slots=True)
class Produced:
    """One row's token of one step. The token of finish_reason "stop" is the end-of-text id."""

    id: str
    token: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    failure: str = ""  # this row alone cannot go on; the token does not count


@dataclass(frozen=True, slots=True)
class Held:
    """Bytes of what a prompt's pictures have become: all of it is with the leader for as long as the request
    is open, and with every rank that has a row of it, but `after` alone once its prompt is read. `reading`:
    what each rank needs besides while it reads the prompt, where that is in one piece."""

    all: int = 0
    after: int = 0
    reading: int = 0


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    admitted_s: float
    length: int  # tokens in its caches
    is_cancelled: bool = False  # no token of it is of interest any more
    is_leaving: bool = False  # it makes room, and comes back
    has_produced: bool = False
    new_ids: list[int] = field(default_factory=list)  # since its admission
    num_reused: int = 0  # tokens that did not have to be computed
    held: Held = Held()

    @property
    def num_prompt(self) -> int:
        """Tokens of a prompt that the front end cannot count; 0 for all others."""
        return len(self.request.prefix_keys)

    @property
    def num_cached(self) -> int:
        """Of these, what the client counts: one that comes back has sent tokens in its prompt."""
        return 0 if self.request.sent_ids else self.num_reused


class Scheduler:
    """The open requests of one epoch."""

    def __init__(
        self,
        epoch: int,
        *,
        max_sequences: int,
        context_length: int = 0,
        vocab_size: int = 0,
        kv: KvBudget | None = None,
        prefixes: PrefixPlanner | None = None,
    ) -> None:
        """`context_length` and `vocab_size` 0: not known, not checked; `kv` None: memory is no limit;
        `prefixes` None: no prefix is kept."""
        self._epoch = epoch
        self._max_sequences = max_sequences
        self._context_length = context_length
        self._kv = kv or KvBudget()
        self._longest = self._kv.longest_sequence(context_length)
        self.prefixes = prefixes or PrefixPlanner(PrefixSettings(is_enabled=False), self._kv, can_cut=True)
        self.num_preempted = 0
        self.vocab_size = vocab_size
        self._step = 0
        self._waiting: dict[str, GenerateRequest] = {}
        self._running: dict[str, _Running] = {}
        self._to_cancel: list[str] = []
        self._held: dict[str, Held] = {}  # of open requests that have some

    @property
    def has_work(self) -> bool:
        """A plan made now would do something."""
        return bool(self._waiting or self._running or self.prefixes.has_orders)

    @property
    def is_reading(self) -> bool:
        """Some row's prompt is being computed."""
        return not all(row.has_produced for row in self._running.values())

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def runs(self, request_id: str) -> bool:
        """The request has a row."""
        return request_id in self._running

    def submit(self, request: GenerateRequest, held: Held = Held()) -> RequestFailed | TokenChunk | None:
        """Queue a request; an answer instead of None means that it is over before it began."""
        refusal = self._refusal(request, held)
        if refusal is not None:
            code, message = refusal
            return RequestFailed(id=request.id, code=code, message=message)
        if (
            self._tokens_left(request, held) <= 0
        ):  # it broke off after its last token, before its end was said
            return TokenChunk(id=request.id, finish_reason="length")
        self._waiting[request.id] = request
        if held.all or held.reading:
            self._held[request.id] = held
        return None

    def cancel(self, request_id: str) -> TokenChunk | None:
        """End a request: at once while it waits, else by the next plan. One that is not open is no error: its
        end crossed the command."""
        if self._waiting.pop(request_id, None) is not None:
            self._held.pop(request_id, None)
            self.prefixes.waits_no_more(request_id)
            return TokenChunk(id=request_id, finish_reason="cancelled")
        running = self._running.get(request_id)
        if running is not None and not running.is_cancelled:
            running.is_cancelled = True
            self._to_cancel.append(request_id)
        return None

    def fail(self, row: Produced) -> RequestFailed | None:
        """Give up a request whose row failed, at the next plan. None when it ends in this step anyway."""
        running = self._running[row.id]
        if running.is_cancelled or row.finish_reason is not None:
            return None
        self.cancel(row.id)
        return RequestFailed(id=row.id, code="grammar_failed", message=row.failure)

    def request(self, request_id: str) -> GenerateRequest:
        """An admitted request."""
        return self._running[request_id].request

    def num_cached(self, request_id: str) -> int:
        """Prompt tokens of an admitted request that need not be computed."""
        return self._running[request_id].num_cached

    def num_prompt(self, request_id: str) -> int:
        """Tokens of an admitted request's prompt that the front end cannot count; 0 for all others."""
        return self._running[request_id].num_prompt

    def next_plan(self, now_s: float) -> StepPlan:
        """The next step's plan, in arrival order; `now_s` dates the admissions."""
        for request_id in self._to_cancel:
            self.prefixes.leaves(request_id, is_kept=True)
        leave = self._make_room()
        cancel, self._to_cancel = (*self._to_cancel, *leave), []
        admit = []
        for request in list(self._waiting.values()):
            prompt = request.prompt_ids + request.sent_ids
            known_as = (request.prefix_keys or request.prompt_ids) + request.sent_ids
            held = self._held.get(request.id, Held())
            if request.id in cancel or not self._has_room(len(prompt), held):
                break
            if self.prefixes.must_wait(request, known_as):
                continue  # for a row that is being computed now; those behind it need not wait as well
            self.prefixes.find(request, known_as)  # so that making room takes anything else first
            self._evict_for(len(prompt), held)
            del self._waiting[request.id]
            part = self.prefixes.admit(request, known_as)
            self._running[request.id] = _Running(
                request, now_s, len(prompt), num_reused=part.num_reused, held=held
            )
            admit.append(
                Admission(
                    id=request.id,
                    prompt_ids=prompt,
                    max_tokens=self._tokens_left(request, held),
                    stop_token_ids=request.stop_token_ids,
                    entry=part.entry,
                    reuse=part.reuse,
                    num_reused=part.num_reused,
                    checkpoints=part.checkpoints,
                )
            )
        return self._plan(cancel, tuple(admit), leave=tuple(leave))

    def _staying(self) -> list[_Running]:
        """Rows that run on, oldest first."""
        return [row for row in self._running.values() if not (row.is_cancelled or row.is_leaving)]

    def _taken_by(self, rows: Sequence[_Running], new: Held = Held()) -> list[int]:
        """Bytes by rank of what the pictures of these rows and of one to come have become, and of what those
        need that are being read in one piece."""
        leader = sum(row.held.all for row in rows) + new.all
        other = sum(row.held.after if row.has_produced else row.held.all for row in rows) + new.all
        reading = sum(row.held.reading for row in rows if not row.has_produced) + new.reading
        return [(other if rank.rank else leader) + reading for rank in self._kv.ranks]

    def _has_room(self, num_tokens: int, held: Held) -> bool:
        """For one more row of so many tokens, when no prefix is kept; never while somebody leaves, who is to
        come back first."""
        rows = self._staying()
        if len(rows) >= self._max_sequences or any(row.is_leaving for row in self._running.values()):
            return False
        longest = max((num_tokens, *(row.length for row in rows))) + GROWTH_TOKENS
        return not rows or self._kv.short(len(rows) + 1, longest, self._taken_by(rows, held)) is None

    def _evict_for(self, num_tokens: int, held: Held) -> None:
        """Kept prefixes make room for one more row, which has it without them."""
        rows = self._staying()
        longest = max((num_tokens, *(row.length for row in rows))) + GROWTH_TOKENS
        count, by_pictures = len(rows) + 1 + self._num_copies, self._taken_by(rows, held)
        self.prefixes.make_room(
            lambda taken: self._kv.short(count, longest, _sum(taken, by_pictures)) is None
        )

    @property
    def _num_copies(self) -> int:
        """Rows that may be there twice: one that ends is copied out of the batch before it leaves it, and so
        are those that are cancelled, which the batch has until their plan is applied."""
        num_cancelled = sum(row.is_cancelled for row in self._running.values())
        return 1 + 2 * num_cancelled if self.prefixes.is_enabled else 0

    def _make_room(self) -> list[str]:
        """Newest rows that leave, so that the others can take their next steps. Kept prefixes go before."""
        rows, leaving = self._staying(), []
        while len(rows) > 1 and self._kv.short(
            len(rows), max(row.length for row in rows) + AHEAD_TOKENS, self._taken_by(rows)
        ):
            row = rows.pop()
            row.is_leaving = True
            leaving.append(row.request.id)
            self.prefixes.leaves(row.request.id, is_kept=False)
        if rows:
            longest = max(row.length for row in rows) + AHEAD_TOKENS
            count, by_pictures = len(rows) + self._num_copies, self._taken_by(rows)
            self.prefixes.make_room(
                lambda taken: self._kv.short(count, longest, _sum(taken, by_pictures)) is None
            )
        self.num_preempted += len(leaving)
        return leaving

    def stop_plan(self) -> StepPlan:
        """The last plan of the epoch."""
        return self._plan((), (), stop=True)

    def applied(self, plan: StepPlan) -> list[TokenChunk]:
        """The ends that the plan's cancellations caused; those that finished by themselves before are out,
        and those that made room wait again, before all others."""
        chunks, again = [], {}
        for request_id in plan.cancel:
            row = self._running.pop(request_id, None)
            if row is None:
                continue
            self.prefixes.ended(request_id)
            if row.is_cancelled:
                self._held.pop(request_id, None)
                chunks.append(TokenChunk(id=request_id, finish_reason="cancelled"))
                continue
            sent_ids = (*row.request.sent_ids, *row.new_ids)
            again[request_id] = msgspec.structs.replace(row.request, sent_ids=sent_ids)
        # The newest left first, so the oldest of them is the last one here.
        self._waiting = {**dict(reversed(again.items())), **self._waiting}
        return chunks

    def produced(self, tokens: Sequence[Produced], now_s: float) -> list[TokenChunk]:
        """What to tell the clients about one step."""
        chunks = []
        for produced in tokens:
            running = self._running[produced.id]
            if produced.finish_reason is not None:
                del self._running[produced.id]
                self._held.pop(produced.id, None)
                self.prefixes.ended(produced.id)
            else:
                self.prefixes.first_token(produced.id)
            if running.is_cancelled:
                if produced.finish_reason is not None:
                    chunks.append(TokenChunk(id=produced.id, finish_reason="cancelled"))
                continue
            is_text = produced.finish_reason != "stop"
            running.length += 1
            running.new_ids.append(produced.token)
            chunks.append(
                TokenChunk(
                    id=produced.id,
                    token_ids=(produced.token,) if is_text else (),
                    logprobs=(produced.logprobs,) if is_text and produced.logprobs else (),
                    finish_reason=produced.finish_reason,
                    cached_tokens=0 if running.has_produced else running.num_cached,
                    prefill_s=0.0 if running.has_produced else now_s - running.admitted_s,
                    prompt_tokens=0 if running.has_produced else running.num_prompt,
                )
            )
            running.has_produced = True
        return chunks

    def stored(self, entries: Sequence[Stored]) -> None:
        """What a step kept of the caches of its rows."""
        self.prefixes.stored(entries)

    def _plan(
        self,
        cancel: tuple[str, ...],
        admit: tuple[Admission, ...],
        *,
        leave: tuple[str, ...] = (),
        stop: bool = False,
    ) -> StepPlan:
        self._step += 1
        save, evict = self.prefixes.take_saves(), self.prefixes.take_evictions()
        return StepPlan(
            epoch=self._epoch,
            step=self._step,
            cancel=cancel,
            leave=leave,
            admit=admit,
            save=save,
            evict=evict,
            stop=stop,
        )

    def _longest_with(self, held: Held) -> int | None:
        """Tokens of the longest sequence that fits beside so much, once its prompt is read."""
        if not held.all:
            return self._longest
        return self._kv.longest_sequence(self._context_length, self._taken_by((), replace(held, reading=0)))

    def _tokens_left(self, request: GenerateRequest, held: Held) -> int:
        left = request.max_tokens - len(request.sent_ids)
        if self._context_length:
            left = min(left, self._context_length - len(request.prompt_ids) - len(request.sent_ids))
        longest = self._longest_with(held)
        if longest is not None:
            left = min(left, longest - len(request.prompt_ids) - len(request.sent_ids))
        return left

    def _refusal(self, request: GenerateRequest, held: Held) -> tuple[str, str] | None:
        """Code and message for a request that no rank may see: a failure inside a step would end them all."""
        num_prompt = len(request.prompt_ids)
        if request.id in self._waiting or request.id in self._running:
            return "duplicate_request", f"The request {request.id} is open already."
        if num_prompt == 0:
            return "empty_prompt", "The prompt has no tokens."
        if request.max_tokens <= 0:
            return "invalid_max_tokens", f"max_tokens is {request.max_tokens}; at least 1 is needed."
        if self._context_length and num_prompt >= self._context_length:
            return (
                "context_length_exceeded",
                f"The prompt has {num_prompt} tokens; the context of {self._context_length} leaves no room "
                "for an answer.",
            )
        num_tokens = num_prompt + len(request.sent_ids)
        longest = self._longest_with(held)
        if longest is not None and num_tokens >= longest and request.max_tokens > len(request.sent_ids):
            # The front end refuses these; here come those with pictures, which it cannot measure, and those
            # that were open when the mesh became smaller.
            taken = self._taken_by((), replace(held, reading=0))
            return "kv_memory_exceeded", self._kv.explain(num_tokens + 1, self._context_length, taken)
        if held.reading and (why := self._kv.why_not_read(num_prompt, self._taken_by((), held))):
            return "kv_memory_exceeded", why
        vocab_size = self.vocab_size or 1 << 31
        for ids in (request.prompt_ids, request.sent_ids, request.sampling.logit_bias):
            for extreme in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= extreme < vocab_size:
                    return "invalid_token", f"Token id {extreme} is not in the vocabulary of {vocab_size}."
        return None


def _sum(one: Sequence[int], other: Sequence[int]) -> Sequence[int]:
    """By rank; where one says nothing, the other."""
    return [a + b for a, b in zip(one, other, strict=True)] if one and other else one or other
