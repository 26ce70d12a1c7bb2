"""Which layers each rank of a pipeline holds."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_mesh.mesh.capacity import PlacementRequest, Rank
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.memory import ModelMemory, describe_misfit
from mlx_mesh.mesh.partition import cheapest_stages, smallest_maximum
from mlx_mesh.mesh.types import Shard

_SHARE_SCALE = (
    1_000_000  # shares are compared as whole millionths of a rank's memory, so that none is a float
)


def plan_pipeline(
    footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest
) -> tuple[Shard, ...]:
    """Whole layers in proportion to memory, over legal cuts, honouring pins, within every rank's memory.
    Raises PlacementError."""
    _check_possible(footprint, ranks)
    memory = ModelMemory.for_request(footprint, request)
    cuts = choose_cuts(memory, ranks)
    if cuts is None:
        cuts = _least_short_cuts(memory, ranks)
        needs = [memory.stage(*stage_limits(cuts, rank.rank)) for rank in ranks]
        raise PlacementError(
            describe_misfit(
                footprint, request, ranks, needs, lambda other: choose_cuts(other, ranks) is not None
            )
        )
    return tuple(stage_shard(memory, rank, *stage_limits(cuts, rank.rank)) for rank in ranks)


def stage_shard(memory: ModelMemory, rank: Rank, start: int, end: int) -> Shard:
    """The shard of layers [start, end)."""
    return Shard(
        rank=rank.rank,
        host=rank.host,
        start_layer=start,
        end_layer=end,
        weights_bytes=memory.stage(start, end).weights,
        kv_bytes_per_token=sum(layer.kv_bytes_per_token for layer in memory.footprint.layers[start:end]),
        memory_limit_bytes=rank.memory_bytes,
    )


def stage_limits(cuts: Sequence[int], rank: int) -> tuple[int, int]:
    """[start, end) of a rank: rank 0 samples, so it is the last stage, and the last rank has layer 0."""
    stage = len(cuts) - 2 - rank
    return cuts[stage], cuts[stage + 1]


def choose_cuts(memory: ModelMemory, ranks: Sequence[Rank]) -> tuple[int, ...] | None:
    """(0, cut, ..., num_layers): first the least possible share of layers on the most loaded rank; of those
    divisions the one with the most even shares, then the one with the most even memory. A share is bytes of
    layers over the rank's memory. None: nothing fits."""
    stages, boundaries = ranks[::-1], _boundaries(memory.footprint)

    def layers_share(stage: int, start: int, end: int) -> int | None:
        rank = stages[stage]
        if not _pin_allows(rank, start, end) or memory.stage(start, end).total > rank.memory_bytes:
            return None
        return memory.layers_weights(start, end) * _SHARE_SCALE // rank.memory_bytes

    largest = smallest_maximum(boundaries, len(stages), layers_share)
    if largest is None:
        return None

    def unevenness(stage: int, start: int, end: int) -> tuple[int, int] | None:
        share = layers_share(stage, start, end)
        if share is None or share > largest:
            return None
        need = memory.stage(start, end).total * _SHARE_SCALE // stages[stage].memory_bytes
        return share**2, need**2

    return cheapest_stages(boundaries, len(stages), unevenness)


def _least_short_cuts(memory: ModelMemory, ranks: Sequence[Rank]) -> tuple[int, ...]:
    """The division with the least total shortage, most evenly spread, for the error text."""
    stages = ranks[::-1]

    def shortage(stage: int, start: int, end: int) -> tuple[int, int] | None:
        rank = stages[stage]
        if not _pin_allows(rank, start, end):
            return None
        missing = max(0, memory.stage(start, end).total - rank.memory_bytes)
        return missing, missing**2

    cuts = cheapest_stages(_boundaries(memory.footprint), len(stages), shortage)
    assert cuts is not None, "_check_possible found a division"
    return cuts


def _boundaries(footprint: ModelFootprint) -> tuple[int, ...]:
    return (0, *sorted(footprint.legal_cuts), footprint.num_layers)


def _pin_allows(rank: Rank, start: int, end: int) -> bool:
    return rank.pinned_layers in (0, end - start)


def most_stages(footprint: ModelFootprint) -> int:
    """How many ranks a pipeline of this model can have."""
    return len(footprint.legal_cuts) + 1


def _check_possible(footprint: ModelFootprint, ranks: Sequence[Rank]) -> None:
    """Everything that makes a pipeline impossible whatever the memory. Raises PlacementError."""
    num_layers, num_ranks, most = footprint.num_layers, len(ranks), most_stages(footprint)
    if num_ranks > num_layers:
        raise PlacementError(
            f"A pipeline needs at least one layer per rank, but the model has {num_layers} layers and the "
            f"hosts have {num_ranks} ranks. Use at most {most} ranks."
        )
    if num_ranks > most:
        raise PlacementError(
            f"The model can be cut into at most {most} stages, but the hosts have {num_ranks} ranks "
            f"({_cut_reason(footprint)}). {_legal_cuts(footprint)} Use at most {most} ranks."
        )
    _check_pins(footprint, ranks)


def _check_pins(footprint: ModelFootprint, ranks: Sequence[Rank]) -> None:
    pinned = [rank for rank in ranks if rank.pinned_layers]
    if not pinned:
        return
    num_layers, num_free = footprint.num_layers, len(ranks) - len(pinned)
    total = sum(rank.pinned_layers for rank in pinned)
    told = ", ".join(f"{rank}: {rank.pinned_layers}" for rank in pinned)
    if num_free == 0 and total != num_layers:
        raise PlacementError(
            f"The pinned layers add up to {total}, but the model has {num_layers} ({told}). Change them by "
            f"{num_layers - total:+d} in total, or leave `layers` out on one host."
        )
    if num_free and total + num_free > num_layers:
        raise PlacementError(
            f"The pinned layers take {total} of {num_layers} ({told}), which leaves "
            f"{max(0, num_layers - total)} for {num_free} more; each rank needs at least one. Pin at most "
            f"{num_layers - num_free} in total."
        )
    stages = ranks[::-1]

    def pin_cost(stage: int, start: int, end: int) -> tuple[int] | None:
        return (0,) if _pin_allows(stages[stage], start, end) else None

    if cheapest_stages(_boundaries(footprint), len(ranks), pin_cost) is None:
        raise PlacementError(
            f"The pinned layers ({told}) need a cut that is not legal ({_cut_reason(footprint)}). "
            f"{_legal_cuts(footprint)} Layers run from rank {len(ranks) - 1}, which has layer 0, to rank 0, "
            f"which has layer {num_layers - 1}."
        )


def _cut_reason(footprint: ModelFootprint) -> str:
    return footprint.cut_reason or "the model cannot be cut elsewhere"


def _legal_cuts(footprint: ModelFootprint) -> str:
    cuts = sorted(footprint.legal_cuts)
    if not cuts:
        return "There is no legal cut."
    if len(cuts) == footprint.num_layers - 1:
        return "Every cut between two layers is legal."
    return f"Legal cuts are before layer {', '.join(map(str, cuts))}."
