"""What the leader does next: which requests wait, which run, what each step plan admits and cancels.

Plain decisions without tensors or clocks of its own. The loop calls, in this order for each step:
`next_plan`, `applied` when the plan took effect on this rank, `produced` with what the step gave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_mesh.mesh.messages import (
    Admission,
    FinishReason,
    GenerateRequest,
    RequestFailed,
    StepPlan,
    TokenChunk,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class Produced:
    """One row's token of one step. The token of finish_reason "stop" is the end-of-text id."""

    id: str
    token: int
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None


@dataclass(slots=True)
class _Running:
    request: GenerateRequest
    admitted_s: float
    is_cancelled: bool = False  # no token of it is of interest any more
    has_produced: bool = False


class Scheduler:
    """The open requests of one epoch."""

    def __init__(
        self, epoch: int, *, max_sequences: int, context_length: int = 0, vocab_size: int = 0
    ) -> None:
        """`context_length` and `vocab_size` 0: not known, not checked."""
        self._epoch = epoch
        self._max_sequences = max_sequences
        self._context_length = context_length
        self.vocab_size = vocab_size
        self._step = 0
        self._waiting: dict[str, GenerateRequest] = {}
        self._running: dict[str, _Running] = {}
        self._to_cancel: list[str] = []

    @property
    def has_work(self) -> bool:
        """A plan made now would do something."""
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def submit(self, request: GenerateRequest) -> RequestFailed | TokenChunk | None:
        """Queue a request; an answer instead of None means that it is over before it began."""
        refusal = self._refusal(request)
        if refusal is not None:
            code, message = refusal
            return RequestFailed(id=request.id, code=code, message=message)
        if self._tokens_left(request) <= 0:  # it broke off after its last token, before its end was said
            return TokenChunk(id=request.id, finish_reason="length")
        self._waiting[request.id] = request
        return None

    def cancel(self, request_id: str) -> TokenChunk | None:
        """End a request: at once while it waits, else by the next plan. One that is not open is no error: its
        end crossed the command."""
        if self._waiting.pop(request_id, None) is not None:
            return TokenChunk(id=request_id, finish_reason="cancelled")
        running = self._running.get(request_id)
        if running is not None and not running.is_cancelled:
            running.is_cancelled = True
            self._to_cancel.append(request_id)
        return None

    def request(self, request_id: str) -> GenerateRequest:
        """An admitted request."""
        return self._running[request_id].request

    def next_plan(self, now_s: float) -> StepPlan:
        """The next step's plan, in arrival order; `now_s` dates the admissions."""
        cancel, self._to_cancel = tuple(self._to_cancel), []
        num_cancelling = sum(1 for running in self._running.values() if running.is_cancelled)
        num_free = self._max_sequences - (len(self._running) - num_cancelling)
        admit = []
        for request in list(self._waiting.values())[: max(0, num_free)]:
            del self._waiting[request.id]
            self._running[request.id] = _Running(request, now_s)
            admit.append(
                Admission(
                    id=request.id,
                    prompt_ids=request.prompt_ids + request.sent_ids,
                    max_tokens=self._tokens_left(request),
                    stop_token_ids=request.stop_token_ids,
                )
            )
        return self._plan(cancel, tuple(admit))

    def stop_plan(self) -> StepPlan:
        """The last plan of the epoch."""
        return self._plan((), (), stop=True)

    def applied(self, plan: StepPlan) -> list[TokenChunk]:
        """The ends that the plan's cancellations caused; those that finished by themselves before are out."""
        return [
            TokenChunk(id=request_id, finish_reason="cancelled")
            for request_id in plan.cancel
            if self._running.pop(request_id, None) is not None
        ]

    def produced(self, tokens: Sequence[Produced], now_s: float) -> list[TokenChunk]:
        """What to tell the clients about one step."""
        chunks = []
        for produced in tokens:
            running = self._running[produced.id]
            if produced.finish_reason is not None:
                del self._running[produced.id]
            if running.is_cancelled:
                if produced.finish_reason is not None:
                    chunks.append(TokenChunk(id=produced.id, finish_reason="cancelled"))
                continue
            is_text = produced.finish_reason != "stop"
            chunks.append(
                TokenChunk(
                    id=produced.id,
                    token_ids=(produced.token,) if is_text else (),
                    logprobs=(produced.logprobs,) if is_text and produced.logprobs else (),
                    finish_reason=produced.finish_reason,
                    prefill_s=0.0 if running.has_produced else now_s - running.admitted_s,
                )
            )
            running.has_produced = True
        return chunks

    def _plan(self, cancel: tuple[str, ...], admit: tuple[Admission, ...], stop: bool = False) -> StepPlan:
        self._step += 1
        return StepPlan(epoch=self._epoch, step=self._step, cancel=cancel, admit=admit, stop=stop)

    def _tokens_left(self, request: GenerateRequest) -> int:
        left = request.max_tokens - len(request.sent_ids)
        if self._context_length:
            left = min(left, self._context_length - len(request.prompt_ids) - len(request.sent_ids))
        return left

    def _refusal(self, request: GenerateRequest) -> tuple[str, str] | None:
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
        vocab_size = self.vocab_size or 1 << 31
        for ids in (request.prompt_ids, request.sent_ids, request.sampling.logit_bias):
            for extreme in (min(ids, default=0), max(ids, default=0)):
                if not 0 <= extreme < vocab_size:
                    return "invalid_token", f"Token id {extreme} is not in the vocabulary of {vocab_size}."
        return None
