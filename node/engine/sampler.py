"""Which token comes next. The leader chooses for all rows, the followers only receive.

A row that is not plain greedy carries one RowProcessor. It puts the row's whole choice into its scores,
`filtered logits / temperature + Gumbel noise`, so that one argmax over the batch samples every row (the
Gumbel-max trick), whatever the mixture. The noise is a pure function of the request's seed and the position,
so a token depends neither on the other rows nor on the process. `mx.random.categorical` would do neither: it
inverts a cumulative sum, which 1e-6 of noise in the logits shifts, and draws for the batch as a whole.
"""

from __future__ import annotations

import hashlib
import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_mesh.mesh.messages import GenerateRequest, SamplingParams, TokenLogprobs
from mlx_mesh.node.engine.exchange import Array, Exchange
from mlx_mesh.node.engine.grammar import RowGrammar

SMALLEST_TOP_P = 1e-9
"""top_p 0 means the best token only; an exact 0 would keep none."""


def is_plain_greedy(request: GenerateRequest) -> bool:
    """True when a bare argmax over the model's logits is all that the request needs."""
    sampling = request.sampling
    return (
        sampling.temperature <= 0
        and request.logprobs is None
        and not request.grammar
        and not sampling.logit_bias
        and sampling.repetition_penalty == 1
        and sampling.presence_penalty == 0
        and sampling.frequency_penalty == 0
    )


def noise_key(seed: int, position: int) -> Array:
    """The random key of the token at `position` (number of tokens before it, prompt included)."""
    digest = _draw(seed, position, b"mlx-mesh-token")
    return mx.array([int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")], mx.uint32)


def xtc_applies(sampling: SamplingParams, position: int) -> bool:
    """Whether the most probable tokens are left out at `position`; drawn apart from the token's noise."""
    if sampling.xtc_probability <= 0:
        return False
    draw = int.from_bytes(_draw(sampling.seed, position, b"mlx-mesh-xtc"), "little")
    return draw < sampling.xtc_probability * 2.0**64


def _draw(seed: int, position: int, purpose: bytes) -> bytes:
    numbers = seed.to_bytes(16, "little", signed=True) + position.to_bytes(8, "little")
    return hashlib.blake2b(numbers, digest_size=8, person=purpose).digest()


def exclude_top(logits: Array, threshold: float, kept: tuple[int, ...]) -> Array:
    """Logits (1, V) without the tokens more probable than `threshold`, but for the least of these and `kept`
    (XTC, as mlx-lm's apply_xtc)."""
    probabilities = mx.softmax(logits, axis=-1)
    above = mx.where(probabilities > threshold, probabilities, mx.inf)
    is_out = probabilities > mx.min(above, axis=-1, keepdims=True)
    if kept:
        is_out[:, mx.array(kept, mx.uint32)] = False
    return mx.where(is_out, -mx.inf, logits)


def filter_logits(logits: Array, *, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Array:
    """Logits (1, V) with everything outside the three filters at -inf.

    Each filter looks at the model's distribution before temperature, as in mlx-lm, and a token stays when all
    three keep it. Ties at a threshold stay together, so the result does not depend on sorting order.
    """
    vocab_size = logits.shape[-1]
    by_rank = 0 < top_k < vocab_size
    by_mass = top_p < 1
    thresholds = []
    if by_rank or by_mass:
        best = mx.sort(mx.topk(logits, top_k, axis=-1) if by_rank else logits, axis=-1)  # ascending
        if by_rank:
            thresholds.append(best[..., :1])
        if by_mass:
            probabilities = mx.exp(best - mx.logsumexp(logits, axis=-1, keepdims=True))
            mass_above = mx.cumsum(probabilities, axis=-1, reverse=True, inclusive=False)
            num_dropped = (mass_above >= max(top_p, SMALLEST_TOP_P)).sum(axis=-1, keepdims=True)
            thresholds.append(mx.take_along_axis(best, num_dropped, axis=-1))
    if min_p > 0:
        thresholds.append(mx.max(logits, axis=-1, keepdims=True) + math.log(min(min_p, 1.0)))
    for threshold in thresholds:
        logits = mx.where(logits < threshold, -mx.inf, logits)
    return logits


def penalise(logits: Array, tokens: Array, num_prompt: int, sampling: SamplingParams) -> Array:
    """Logits (1, V) after bias and penalties. `tokens`: all tokens so far, the prompt's `num_prompt` first.

    Repetition looks at the last `repetition_context_size` tokens, prompt included (mlx-lm's rule); presence
    and frequency count the tokens generated so far (OpenAI's rule).
    """
    if sampling.logit_bias:
        ids = mx.array(list(sampling.logit_bias), mx.uint32)
        bias = mx.array(list(sampling.logit_bias.values()), mx.float32)
        logits = logits.at[:, ids].add(bias)
    if sampling.repetition_penalty != 1 and tokens.size > 0:
        recent = tokens[-sampling.repetition_context_size :] if sampling.repetition_context_size else tokens
        chosen = logits[:, recent]
        penalty = sampling.repetition_penalty
        logits[:, recent] = mx.where(chosen < 0, chosen * penalty, chosen / penalty)
    generated = tokens[num_prompt:]
    if generated.size > 0 and (sampling.presence_penalty or sampling.frequency_penalty):
        counts = mx.zeros((logits.shape[-1],), mx.float32).at[generated].add(1.0)
        logits = logits - sampling.frequency_penalty * counts
        logits = logits - sampling.presence_penalty * (counts > 0)
    return logits


@dataclass(frozen=True, slots=True)
class _Noted:
    """Logprobs of one position, still lazy when noted and evaluated with the step's ids."""

    logprobs: Array  # (V,)
    top_ids: Array | None  # (k,), best first

    def arrays(self) -> list[Array]:
        return [self.logprobs] if self.top_ids is None else [self.logprobs, self.top_ids]


class RowProcessor:
    """The logits processor of one request (see BatchGenerator.insert): one call for each new position."""

    def __init__(
        self, request: GenerateRequest, sampler: LeaderSampler, grammar: RowGrammar | None = None
    ) -> None:
        """`grammar`: one that has advanced by the request's sent_ids."""
        self._sampling = request.sampling
        self._num_prompt = len(request.prompt_ids)  # without sent_ids: those were generated
        self._grammar = grammar
        self._num_matched = self._num_prompt + len(request.sent_ids)  # tokens that the grammar knows of
        self._num_logprobs = request.logprobs
        self._sampler = sampler
        self._noted: deque[_Noted] = deque()

    def __call__(self, tokens: Array, logits: Array) -> Array:
        """Scores (1, V) float32 whose argmax is the choice; `tokens` are all tokens so far."""
        logits = logits.astype(mx.float32)
        if self._num_logprobs is not None:
            self._note(logits[0], self._num_logprobs)
        sampling = self._sampling
        logits = penalise(logits, tokens, self._num_prompt, sampling)
        if self._grammar is not None:
            logits = self._constrain(logits, tokens, self._grammar)
        if sampling.temperature <= 0:
            return logits
        logits = filter_logits(logits, top_p=sampling.top_p, top_k=sampling.top_k, min_p=sampling.min_p)
        if xtc_applies(sampling, tokens.shape[0]):
            logits = exclude_top(logits, sampling.xtc_threshold, sampling.xtc_kept)
        # The best score is 0 before the division, so that a tiny temperature cannot overflow.
        scores = (logits - mx.max(logits, axis=-1, keepdims=True)) / sampling.temperature
        key = noise_key(sampling.seed, tokens.shape[0])
        return scores + mx.random.gumbel((1, logits.shape[-1]), mx.float32, key=key)

    @property
    def failure(self) -> str:
        """Why the request's grammar cannot go on; '' while it can."""
        return self._grammar.failure if self._grammar is not None else ""

    def _constrain(self, logits: Array, tokens: Array, grammar: RowGrammar) -> Array:
        # Reading the newest id waits for the step that samples it: the price of a grammar.
        grammar.advance(tokens[self._num_matched :].tolist())
        self._num_matched = tokens.shape[0]
        return mx.where(mx.array(grammar.allowed()), logits, -mx.inf)

    def take_logprobs(self, token: int) -> TokenLogprobs | None:
        """Logprobs of the oldest position not taken yet, at which `token` was chosen."""
        if not self._noted:
            return None
        noted = self._noted.popleft()
        # Reads evaluated memory: an index into the array would queue behind the step that already runs.
        values = memoryview(noted.logprobs)
        top = () if noted.top_ids is None else tuple((i, values[i]) for i in noted.top_ids.tolist())
        return TokenLogprobs(logprob=values[token], top=top)

    def _note(self, logits: Array, num_top: int) -> None:
        logprobs = logits - mx.logsumexp(logits)
        top_ids = None
        if num_top > 0:
            num_top = min(num_top, logprobs.shape[0])
            best = mx.argpartition(-logprobs, kth=num_top - 1)[:num_top]
            top_ids = best[mx.argsort(-logprobs[best])]
        noted = _Noted(logprobs, top_ids)
        self._noted.append(noted)
        self._sampler.evaluate_with_ids(noted.arrays())


class LeaderSampler:
    """The one sampler of all rows on the leader: argmax, then ids to everyone."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._with_ids: list[Array] = []
        self.vocab_size = 0  # of the model's output; known after the first step

    def evaluate_with_ids(self, arrays: list[Array]) -> None:
        """Have these evaluated in the same graph as the ids of this step."""
        self._with_ids.extend(arrays)

    def __call__(self, logprobs: Array) -> Array:
        self.vocab_size = logprobs.shape[-1]
        ids = mx.argmax(logprobs, axis=-1).astype(mx.uint32)
        if self._with_ids:
            (ids,) = mx.depends([ids], self._with_ids)
            self._with_ids = []
        return self._exchange.broadcast_ids(ids, ids.shape[0], [logprobs])

    def processors(self, request: GenerateRequest, grammar: RowGrammar | None = None) -> list[RowProcessor]:
        """What the request's row needs: nothing when it is plain greedy."""
        assert (grammar is not None) == bool(request.grammar), (
            "a grammar is compiled before its request is admitted"
        )
        return [] if is_plain_greedy(request) else [RowProcessor(request, self, grammar)]


class FollowerSampler:
    """The one sampler of all rows on a follower: takes the leader's ids."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    def __call__(self, logprobs: Array) -> Any:
        return self._exchange.broadcast_ids(None, logprobs.shape[0], [logprobs])
