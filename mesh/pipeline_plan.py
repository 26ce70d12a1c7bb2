"""Which layers each rank of a pipeline holds."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from mlx_mesh.mesh.capacity import PlacementRequest, Rank
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.memory import ModelMemory, misfit
from mlx_mesh.mesh.partition import cheapest_stages, smallest_maximum
from mlx_mesh.mesh.speed import PipelineSpeed
from mlx_mesh.mesh.types import Shard

_SHARE_SCALE = (
    1_000_000  # shares are compared as whole millionths of a rank's memory, so that none is a float
)

TIME_PER_MILLE = 30
"""So much of the least time per token is given for memory that is used more evenly."""


def plan_pipeline(
    footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest
) -> tuple[Shard, ...]:
    """Whole layers over legal cuts, honouring pins, within every rank's memory: so that a token takes least
    time, and as evenly by memory as that allows. Raises PlacementError."""
    _check_possible(footprint, ranks)
    memory = ModelMemory.for_request(footprint, request)
    cuts = choose_cuts(memory, ranks, PipelineSpeed.of(footprint, ranks, request))
    if cuts is None:
        cuts = _least_short_cuts(memory, ranks)
        needs = [memory.stage(*stage_limits(cuts, rank.rank)) for rank in ranks]
        raise misfit(footprint, request, ranks, needs, lambda other: _can_fit(other, ranks))
    return tuple(stage_shard(memory, rank, *stage_limits(cuts, rank.rank)) for rank in ranks)


def fits_as_pipeline(footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest) -> bool:
    """Whether `plan_pipeline` would find one; much quicker."""
    try:
        _check_possible(footprint, ranks)
    except PlacementError:
        return False
    return _can_fit(ModelMemory.for_request(footprint, request), ranks)


def _can_fit(memory: ModelMemory, ranks: Sequence[Rank]) -> bool:
    """A stage that grows by a layer needs more memory, so what a start reaches ends where it fits no more."""
    boundaries = _boundaries(memory.footprint)
    reached = {0}  # indexes of boundaries
    for rank in ranks[::-1]:
        following: set[int] = set()
        for first in reached:
            start = boundaries[first]
            for index in range(first + 1, len(boundaries)):
                end = boundaries[index]
                if memory.stage(start, end).total > rank.memory_bytes:
                    break
                if _pin_allows(rank, start, end):
                    following.add(index)
        reached = following
    return len(boundaries) - 1 in reached


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


def choose_cuts(
    memory: ModelMemory, ranks: Sequence[Rank], speed: PipelineSpeed | None = None
) -> tuple[int, ...] | None:
    """(0, cut, ..., num_layers): of the divisions whose time per token is within TIME_PER_MILLE of the least
    one, those with the least share of layers on the most loaded rank; of these the fastest, then the one with
    the most even shares, then the one with the most even memory. A share is bytes of layers over the rank's
    memory. Ranks of equal speed are as fast however the layers lie. None: nothing fits."""
    stages, boundaries = ranks[::-1], _boundaries(memory.footprint)
    num_stages = len(stages)

    if not _can_fit(memory, ranks):
        return None
    shares_of = {(rank.memory_bytes, rank.pinned_layers): _shares(memory, boundaries, rank) for rank in ranks}
    known = {
        (stage, start, end): share
        for stage, rank in enumerate(stages)
        for (start, end), share in shares_of[rank.memory_bytes, rank.pinned_layers].items()
    }

    def share_at(stage: int, start: int, end: int) -> int | None:
        return known.get((stage, start, end))

    smallest = smallest_maximum(boundaries, num_stages, share_at)
    if smallest is None:
        return None
    timed = None if speed is None or speed.rates.are_equal else speed
    largest = smallest if timed is None else _share_for_speed(known, boundaries, num_stages, smallest, timed)

    def unevenness(stage: int, start: int, end: int) -> tuple[int, int, int] | None:
        share = share_at(stage, start, end)
        if share is None or share > largest:
            return None
        need = memory.stage(start, end).total * _SHARE_SCALE // stages[stage].memory_bytes
        time = timed.stage_ns(stages[stage].rank, start, end) if timed else 0
        return time, share**2, need**2

    return cheapest_stages(boundaries, num_stages, unevenness)


def _shares(memory: ModelMemory, boundaries: Sequence[int], rank: Rank) -> dict[tuple[int, int], int]:
    """Of every stage that this rank could hold."""
    found = {}
    for index, start in enumerate(boundaries):
        for end in boundaries[index + 1 :]:
            if memory.stage(start, end).total > rank.memory_bytes:
                break
            if _pin_allows(rank, start, end):
                found[start, end] = memory.layers_weights(start, end) * _SHARE_SCALE // rank.memory_bytes
    return found


def _share_for_speed(
    known: Mapping[tuple[int, int, int], int],
    boundaries: Sequence[int],
    num_stages: int,
    smallest: int,
    speed: PipelineSpeed,
) -> int:
    """The least cap on shares (to one part in 64) under which the time is still near the least possible."""

    def least_time(cap: int | None) -> int:
        def time(stage: int, start: int, end: int) -> tuple[int] | None:
            share = known.get((stage, start, end))
            if share is None or (cap is not None and share > cap):
                return None
            return (speed.stage_ns(num_stages - 1 - stage, start, end),)

        cuts = cheapest_stages(boundaries, num_stages, time)
        assert cuts is not None, "the smallest cap allows a division"
        limits = itertools.pairwise(cuts)
        return sum(speed.stage_ns(num_stages - 1 - stage, *pair) for stage, pair in enumerate(limits))

    allowed = least_time(None) * (1000 + TIME_PER_MILLE) // 1000
    low, high = smallest, max(known.values())
    while high - low > max(1, high // 64):
        middle = (low + high) // 2
        if least_time(middle) <= allowed:
            high = middle
        else:
            low = middle
    return high if least_time(low) > allowed else low


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
