"""What a rank needs in bytes: weights, KV for the planned context, and working memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlx_mesh.mesh.capacity import PlacementRequest, Rank
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint

WORKING_BASE_BYTES = 256 * 1024**2
"""Interpreter, MLX and activations of one engine process."""

WEIGHTS_PER_WORKING_BYTE = 20
"""Plus one byte for so many bytes of weights: what MLX's allocator keeps while it loads and computes."""

SMALLEST_CONTEXT = 512
"""No smaller context is suggested when a model does not fit."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes of one rank."""

    weights: int
    kv: int
    working: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.working


def need_of(weights: int, kv: int) -> Need:
    """Adds the working memory."""
    return Need(weights, kv, WORKING_BASE_BYTES + weights // WEIGHTS_PER_WORKING_BYTE)


def kv_bytes(layer: LayerFootprint, context_tokens: int, num_sequences: int) -> int:
    """Cache of one layer for so many sequences, all of that length."""
    tokens = min(context_tokens, layer.kv_window) if layer.kv_window else context_tokens
    return (layer.kv_bytes_per_token * tokens + layer.fixed_state_bytes) * num_sequences


def whole_kv_bytes(layer: LayerFootprint, context_tokens: int) -> int:
    """The keys and values of one sequence that every tensor rank keeps."""
    tokens = min(context_tokens, layer.kv_window) if layer.kv_window else context_tokens
    return layer.whole_kv_bytes_per_token * tokens


@dataclass(frozen=True, slots=True)
class ModelMemory:
    """Sums over layer ranges of one model for one request, each in constant time."""

    footprint: ModelFootprint
    weights_before: tuple[int, ...]
    kv_before: tuple[int, ...]
    kv: tuple[int, int]  # keys and values of all layers: what every tensor rank keeps, and what is divided
    states: tuple[int, int]  # fixed states likewise

    @classmethod
    def of(cls, footprint: ModelFootprint, context_tokens: int, num_sequences: int) -> ModelMemory:
        weights, kv = [0], [0]
        for layer in footprint.layers:
            weights.append(weights[-1] + layer.weights_bytes)
            kv.append(kv[-1] + kv_bytes(layer, context_tokens, num_sequences))
        whole_states = sum(layer.whole_state_bytes for layer in footprint.layers) * num_sequences
        all_states = sum(layer.fixed_state_bytes for layer in footprint.layers) * num_sequences
        whole_kv = sum(whole_kv_bytes(layer, context_tokens) for layer in footprint.layers) * num_sequences
        return cls(
            footprint,
            tuple(weights),
            tuple(kv),
            (whole_kv, kv[-1] - all_states - whole_kv),
            (whole_states, all_states - whole_states),
        )

    @classmethod
    def for_request(cls, footprint: ModelFootprint, request: PlacementRequest) -> ModelMemory:
        return cls.of(footprint, request.context_for(footprint), request.num_sequences)

    def layers_weights(self, start: int, end: int) -> int:
        """Bytes of the parameters of layers [start, end), without embedding and head."""
        return self.weights_before[end] - self.weights_before[start]

    def stage(self, start: int, end: int) -> Need:
        """A pipeline stage of layers [start, end): the first one also reads the embedding, the last one the
        norm and the head, which is the embedding again when tied (read once when it is the only stage), and
        of a vision model the towers and the embedding."""
        footprint = self.footprint
        weights = self.layers_weights(start, end)
        is_first, is_last = start == 0, end == footprint.num_layers
        if is_first or (is_last and (footprint.tied_embedding or footprint.media)):
            weights += footprint.embedding_bytes
        if is_last:
            weights += footprint.head_bytes + footprint.tower_bytes
        return need_of(weights, self.kv_before[end] - self.kv_before[start])

    def tensor_share(self, attention_units: int, mlp_units: int) -> Need:
        """A tensor rank that holds so many of the model's units."""
        tensor = self.footprint.tensor
        weights = tensor.replicated_bytes
        weights += part_of(tensor.attention_bytes, attention_units, tensor.attention_units)
        weights += part_of(tensor.mlp_bytes, mlp_units, tensor.mlp_units)
        part = (attention_units, tensor.attention_units)
        return need_of(weights, self.kv_of(part, part))

    @property
    def whole_kv(self) -> int:
        """What every tensor rank keeps of the caches."""
        return self.kv[0] + self.states[0]

    def kv_of(self, kv_part: tuple[int, int], state_part: tuple[int, int]) -> int:
        """The caches of a tensor rank with these parts of what is divided."""
        return self.whole_kv + part_of(self.kv[1], *kv_part) + part_of(self.states[1], *state_part)


def part_of(whole: int, units: int, of_units: int) -> int:
    """Bytes of so many units, rounded up; what has no units is whole on every rank."""
    return -(-whole * units // of_units) if of_units else whole


def format_bytes(value: int) -> str:
    """For people, in decimal units: "61.2 GB", "540 MB"."""
    if abs(value) >= 1_000_000_000:
        return f"{value / 1e9:.1f} GB"
    return f"{value / 1e6:.0f} MB"


def misfit(
    footprint: ModelFootprint,
    request: PlacementRequest,
    ranks: Sequence[Rank],
    needs: Sequence[Need],
    fits: Callable[[ModelMemory], bool],
) -> PlacementError:
    """The error for needs that exceed a rank's memory: who is short, by how much, and what would work.
    `fits` says whether the model could be placed with other memory sums, that is another context."""
    context, sequences = request.context_for(footprint), request.num_sequences
    lines = ["The model does not fit."]
    missing_bytes: Counter[str] = Counter()
    for rank, need in zip(ranks, needs, strict=True):
        missing = need.total - rank.memory_bytes
        if missing > 0:
            missing_bytes[rank.host] += missing
            lines.append(
                f"Rank {rank.rank} on {rank.host} needs {format_bytes(need.total)} (weights "
                f"{format_bytes(need.weights)}, KV {format_bytes(need.kv)}, working memory "
                f"{format_bytes(need.working)}) and may use {format_bytes(rank.memory_bytes)}: "
                f"{format_bytes(missing)} are missing."
            )
    needed, usable = sum(need.total for need in needs), sum(rank.memory_bytes for rank in ranks)
    lines.append(
        f"All ranks together need {format_bytes(needed)} and may use {format_bytes(usable)}; KV is planned "
        f"for {sequences} sequences of {context} tokens."
    )
    smaller = context // 2
    while smaller >= SMALLEST_CONTEXT and not fits(ModelMemory.of(footprint, smaller, sequences)):
        smaller //= 2
    if smaller >= SMALLEST_CONTEXT:
        lines.append(f"It would fit with a planned context of {smaller} tokens.")
    elif fits(ModelMemory.of(footprint, SMALLEST_CONTEXT, 1)):
        lines.append(f"It would fit with 1 sequence of {SMALLEST_CONTEXT} tokens.")
    else:
        lines.append("No smaller context helps: add a host, raise a `memory_limit`, or use a smaller model.")
    return PlacementError("\n".join(lines), missing_bytes)


def in_one_line(error: PlacementError) -> str:
    """ "12.3 GB are missing (mac1 10.0 GB, mac3 2.3 GB)." or what else the reason is."""
    missing = error.missing_bytes
    if not missing:
        return " ".join(str(error).split())
    hosts = ", ".join(f"{host} {format_bytes(count)}" for host, count in missing.items())
    return f"{format_bytes(sum(missing.values()))} are missing ({hosts})."
