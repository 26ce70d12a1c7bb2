"""Predicted time per token. A model of what decides it, not of everything: use it to compare plans.

Decode is bound by reading weights and the KV cache, plus a constant per layer (kernel launches), plus what
travels. Prefill is bound by arithmetic. Times are whole nanoseconds, so every machine gets the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from mlx_mesh.mesh.capacity import PlacementRequest, Rank
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint
from mlx_mesh.mesh.links import LOOPBACK, Link
from mlx_mesh.mesh.memory import whole_kv_bytes
from mlx_mesh.mesh.partition import split_units

NANOSECONDS = 1_000_000_000

LAYER_NS = 100_000
"""Of one layer and token beside reading: what large models show above their memory-bound time."""

EXPERT_LAYER_NS = 200_000
"""The same for a layer with experts."""

PROMPT_TOKENS_PER_TOKEN = 4
"""Requests are mostly prompt: a split is judged by one generated token and so many of its prompt."""

CHUNK_TOKENS = 512
"""Tokens of one prefill chunk: the weights are read once for all of them."""

TENSOR_GAIN_PER_MILLE = 30
"""Tensor is chosen where it is predicted to be faster by at least this part, because its time depends on the
link's delays."""

_NOMINAL_RATE = 100_000_000_000
"""When no host's speed is known: any value, since only proportions matter then."""


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Per token, for one request at the planned context. `prefill_ns` 0 = unknown."""

    decode_ns: int
    prefill_ns: int  # of a long prompt, whose chunks fill all stages
    exchange_ns: int  # part of decode_ns: what travels between ranks

    @property
    def decode_tokens_per_s(self) -> float:
        return NANOSECONDS / self.decode_ns

    @property
    def prefill_tokens_per_s(self) -> float:
        return NANOSECONDS / self.prefill_ns if self.prefill_ns else 0.0


@dataclass(frozen=True, slots=True)
class Rates:
    """Speeds of all ranks with the unknown ones filled in, for comparing splits."""

    memory: tuple[int, ...]  # bytes a second
    matrix: tuple[int, ...]  # operations a second; () = unknown somewhere
    are_known: bool

    @classmethod
    def of(cls, ranks: Sequence[Rank]) -> Rates:
        """A rank of unknown speed counts as the slowest known one."""
        known = [rank.memory_rate for rank in ranks if rank.memory_rate]
        slowest = min(known, default=_NOMINAL_RATE)
        matrix = tuple(rank.matrix_rate for rank in ranks)
        return cls(
            memory=tuple(rank.memory_rate or slowest for rank in ranks),
            matrix=matrix if all(matrix) else (),
            are_known=len(known) == len(ranks),
        )

    @property
    def are_equal(self) -> bool:
        return len(set(self.memory)) == 1 and len(set(self.matrix)) <= 1


def active_bytes(layer: LayerFootprint) -> int:
    """Weights that one token reads."""
    return layer.active_bytes or layer.weights_bytes


def active_parameters(layer: LayerFootprint) -> int:
    """That one token is multiplied with; two bytes each where the footprint does not say."""
    return layer.active_parameters or active_bytes(layer) // 2


def has_experts(layer: LayerFootprint) -> bool:
    return 0 < layer.active_bytes < layer.weights_bytes


def _cache_bytes(layer: LayerFootprint, context_tokens: int) -> int:
    tokens = min(context_tokens, layer.kv_window) if layer.kv_window else context_tokens
    return layer.kv_bytes_per_token * tokens + layer.fixed_state_bytes


def _constant_ns(layer: LayerFootprint) -> int:
    return EXPERT_LAYER_NS if has_experts(layer) else LAYER_NS


def _head_bytes(footprint: ModelFootprint) -> int:
    """What the output head reads for each token."""
    return footprint.head_bytes + (footprint.embedding_bytes if footprint.tied_embedding else 0)


@dataclass(frozen=True, slots=True)
class PipelineSpeed:
    """Times of stages of one model on the given ranks; each in constant time."""

    footprint: ModelFootprint
    ranks: tuple[Rank, ...]
    rates: Rates
    decode_before: tuple[tuple[int, ...], ...]  # per rank: of all layers before the index
    prefill_before: tuple[tuple[int, ...], ...]
    link: Link | None

    @classmethod
    def of(cls, footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest) -> PipelineSpeed:
        rates, context = Rates.of(ranks), request.context_for(footprint)
        decode, prefill = [], []
        for index in range(len(ranks)):
            decode.append(_sums(footprint, _decode_time(rates.memory[index], context)))
            matrix = rates.matrix[index] if rates.matrix else 0
            prefill.append(_sums(footprint, _prefill_time(rates.memory[index], matrix)))
        return cls(footprint, tuple(ranks), rates, tuple(decode), tuple(prefill), request.link)

    def decode_ns(self, rank: int, start: int, end: int) -> int:
        """One token through layers [start, end) on `rank`, with the head behind the last one."""
        time = self.decode_before[rank][end] - self.decode_before[rank][start]
        if end == self.footprint.num_layers:
            time += _head_bytes(self.footprint) * NANOSECONDS // self.rates.memory[rank]
        return time

    def prefill_ns(self, rank: int, start: int, end: int) -> int:
        """One token of a prompt; 0 when a rank's matrix rate is unknown."""
        return self.prefill_before[rank][end] - self.prefill_before[rank][start]

    def stage_ns(self, rank: int, start: int, end: int) -> int:
        """What a split is judged by: summed over its stages."""
        prompt = PROMPT_TOKENS_PER_TOKEN * self.prefill_ns(rank, start, end)
        return self.decode_ns(rank, start, end) + prompt

    def predict(self, stages: Sequence[tuple[int, int]]) -> Prediction | None:
        """`stages[rank]` is [start, end). None when a speed or the link between hosts is unknown."""
        if not self.rates.are_known:
            return None
        hidden = self.footprint.hidden_bytes_per_token
        exchange, slowest = 0, 0
        prefill: dict[str, int] = {}  # by host: its stages share what it can compute
        for index, rank in enumerate(self.ranks):
            if len(self.ranks) > 1:  # the hidden state to the next stage; from the last one the token's id
                link = _link_between(self.ranks[index], self.ranks[index - 1], self.link)
                if link is None:
                    return None
                exchange += link.hop_ns(hidden if index else 4)
                slowest = max(slowest, hidden * NANOSECONDS // link.bandwidth)
            prefill[rank.host] = prefill.get(rank.host, 0) + self.prefill_ns(index, *stages[index])
        slowest = max(slowest, *prefill.values())
        decode = sum(self.decode_ns(index, *limits) for index, limits in enumerate(stages))
        return Prediction(
            decode_ns=max(1, decode + exchange),
            prefill_ns=slowest if self.rates.matrix else 0,
            exchange_ns=exchange,
        )


def _sums(footprint: ModelFootprint, time: Callable[[LayerFootprint], int]) -> tuple[int, ...]:
    total = [0]
    for layer in footprint.layers:
        total.append(total[-1] + time(layer))
    return tuple(total)


def _decode_time(memory_rate: int, context_tokens: int) -> Callable[[LayerFootprint], int]:
    def time(layer: LayerFootprint) -> int:
        read = active_bytes(layer) + _cache_bytes(layer, context_tokens)
        return read * NANOSECONDS // memory_rate + _constant_ns(layer)

    return time


def _prefill_time(memory_rate: int, matrix_rate: int) -> Callable[[LayerFootprint], int]:
    def time(layer: LayerFootprint) -> int:
        if not matrix_rate:
            return 0
        read = layer.weights_bytes * NANOSECONDS // memory_rate // CHUNK_TOKENS
        return 2 * active_parameters(layer) * NANOSECONDS // matrix_rate + read

    return time


def _link_between(one: Rank, other: Rank, link: Link | None) -> Link | None:
    return LOOPBACK if one.host == other.host else link


@dataclass(frozen=True, slots=True)
class TensorSpeed:
    """Times of one step when every layer is divided over the given ranks."""

    footprint: ModelFootprint
    ranks: tuple[Rank, ...]
    rates: Rates
    link: Link | None  # the slowest that the ranks have between them
    read_whole: int  # bytes that every rank reads for a token
    read_by_leader: int  # and what only rank 0 reads
    read_divided: int  # of an output head that is divided by vocabulary
    mlp_active: int  # and those of the MLPs that are divided
    cache_bytes: int
    whole_cache_bytes: int  # of them, what every rank keeps and reads
    constant_ns: int
    parameters: int
    whole_parameters: int  # of these, in parts of layers that stay whole on every rank
    num_sums: int  # collectives of one token, without the gathering of logits

    @classmethod
    def of(cls, footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest) -> TensorSpeed:
        tensor, context = footprint.tensor, request.context_for(footprint)
        asleep = sum(layer.weights_bytes - active_bytes(layer) for layer in footprint.layers)
        mlp_asleep = min(asleep, tensor.mlp_bytes) if tensor.mlp_units else 0
        divided_lookups = tensor.vocabulary_bytes - tensor.vocabulary_read_bytes
        looked_up = 0 if footprint.tied_embedding else footprint.embedding_bytes - divided_lookups
        is_one_host = len({rank.host for rank in ranks}) == 1
        parameters = sum(active_parameters(layer) for layer in footprint.layers)
        in_layers = sum(layer.weights_bytes for layer in footprint.layers)
        divided = tensor.attention_bytes + tensor.mlp_bytes
        return cls(
            footprint=footprint,
            ranks=tuple(ranks),
            rates=Rates.of(ranks),
            link=LOOPBACK if is_one_host else request.link,
            read_whole=max(0, tensor.replicated_bytes - looked_up - (asleep - mlp_asleep)),
            read_by_leader=tensor.leader_bytes,
            read_divided=tensor.vocabulary_read_bytes,
            mlp_active=tensor.mlp_bytes - mlp_asleep,
            cache_bytes=sum(_cache_bytes(layer, context) for layer in footprint.layers),
            whole_cache_bytes=sum(
                whole_kv_bytes(layer, context) + layer.whole_state_bytes for layer in footprint.layers
            ),
            constant_ns=sum(_constant_ns(layer) for layer in footprint.layers),
            parameters=parameters,
            whole_parameters=parameters * max(0, in_layers - divided) // max(1, in_layers),
            num_sums=(tensor.sums_per_token or 2 * footprint.num_layers) + tensor.num_lookups,
        )

    def step_ns(self, weights: Sequence[int]) -> int:
        """One token on the slowest rank, without what travels."""
        tensor = self.footprint.tensor
        attention, mlp = shares(tensor.attention_units, weights), shares(tensor.mlp_units, weights)
        cache = tensor.kv_parts(weights)
        slowest, total = 0, sum(weights)
        for index, rank in enumerate(self.ranks):
            read = self.read_whole + (0 if index else self.read_by_leader)
            read += _part(self.read_divided, weights[index], total)
            read += _part(self.mlp_active, mlp[index], tensor.mlp_units)
            read += _part(tensor.attention_bytes, attention[index], tensor.attention_units)
            divided = self.cache_bytes - self.whole_cache_bytes
            read += self.whole_cache_bytes + _part(divided, *cache[index])
            # Ranks of one host read at the same time.
            slowest = max(slowest, read * NANOSECONDS * rank.slots // self.rates.memory[index])
        return slowest + self.constant_ns

    def sums_ns(self) -> int:
        """For one token over the link: the sums, and the gathering of logits; 0 when it is unknown."""
        if self.link is None:
            return 0
        num_ranks, logits = len(self.ranks), self.footprint.tensor.logits_bytes
        small = self.link.small_sum_ns(num_ranks)
        sums = self.num_sums * (small + self._travel_ns())
        if not logits:
            return sums
        # Around the ring every rank's part passes every link but one.
        return sums + small + (num_ranks - 1) * logits * NANOSECONDS // (num_ranks * self.link.bandwidth)

    def _travel_ns(self) -> int:
        """One token's part in one sum, beyond a small message's time."""
        assert self.link is not None
        num_ranks, hidden = len(self.ranks), self.footprint.hidden_bytes_per_token
        return 2 * (num_ranks - 1) * hidden * NANOSECONDS // (num_ranks * self.link.bandwidth)

    def predict(self, weights: Sequence[int]) -> Prediction | None:
        """None when a speed or the link is unknown."""
        if not self.rates.are_known or self.link is None:
            return None
        sums = self.sums_ns()
        prefill = 0
        if self.rates.matrix:
            total, whole = sum(weights), self.whole_parameters
            slowest = max(
                2
                * (whole * total + (self.parameters - whole) * weight)
                * NANOSECONDS
                * rank.slots
                // (total * rate)
                for weight, rank, rate in zip(weights, self.ranks, self.rates.matrix, strict=True)
            )
            small = self.num_sums * self.link.small_sum_ns(len(self.ranks)) // CHUNK_TOKENS
            prefill = slowest + small + self.num_sums * self._travel_ns()
        return Prediction(
            decode_ns=max(1, self.step_ns(weights) + sums), prefill_ns=prefill, exchange_ns=sums
        )


def shares(num_units: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Units per rank; zeros when that part is whole on every rank."""
    return split_units(num_units, weights) if num_units else (0,) * len(weights)


def _part(whole: int, units: int, of_units: int) -> int:
    return -(-whole * units // of_units) if of_units else 0
