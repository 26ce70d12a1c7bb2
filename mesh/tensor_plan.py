"""Which weight each rank has when every layer is divided."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

from mlx_mesh.mesh.capacity import PlacementRequest, Rank
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.memory import ModelMemory, Need, misfit, need_of, part_of
from mlx_mesh.mesh.partition import split_units
from mlx_mesh.mesh.pipeline_plan import most_stages
from mlx_mesh.mesh.speed import TensorSpeed, shares
from mlx_mesh.mesh.types import Shard

_FINE_TOTAL = 120  # weights are refined in parts of about this
_NUM_STARTS = 6  # the best candidates, from each of which the weights are refined
_MOST_DEALS = 500  # ways to deal out units that are tried
_FINEST_WEIGHT = 1000  # weights by memory are at most this, so that a plan stays readable


def plan_tensor(
    footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest
) -> tuple[Shard, ...]:
    """Of the weights that fit those with the fastest step: all ranks wait for the slowest, so equal ranks
    get equal weights. Raises PlacementError."""
    _check_possible(footprint, ranks)
    memory = ModelMemory.for_request(footprint, request)
    speed = TensorSpeed.of(footprint, ranks, request)
    weights = _fitting_weights(memory, ranks, speed)
    if weights is None:
        least = min(
            _candidates(memory, ranks, speed), key=lambda tried: _shortage(ranks, tensor_needs(memory, tried))
        )
        raise misfit(
            footprint,
            request,
            ranks,
            tensor_needs(memory, least),
            lambda other: _fitting_weights(other, ranks, speed) is not None,
        )
    needs, parts = tensor_needs(memory, weights), footprint.tensor.kv_parts(weights)
    whole_kv = sum(layer.whole_kv_bytes_per_token for layer in footprint.layers)
    divided_kv = footprint.kv_bytes_per_token - whole_kv
    return tuple(
        Shard(
            rank=rank.rank,
            host=rank.host,
            start_layer=0,
            end_layer=footprint.num_layers,
            weight=weight,
            weights_bytes=need.weights,
            kv_bytes_per_token=whole_kv + part_of(divided_kv, *part),
            memory_limit_bytes=rank.memory_bytes,
        )
        for rank, weight, need, part in zip(ranks, weights, needs, parts, strict=True)
    )


def fits_by_tensor(footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest) -> bool:
    """Whether `plan_tensor` would find weights; much quicker when there is too little memory."""
    try:
        _check_possible(footprint, ranks)
    except PlacementError:
        return False
    memory, speed = ModelMemory.for_request(footprint, request), TensorSpeed.of(footprint, ranks, request)
    return _fitting_weights(memory, ranks, speed) is not None


def _fitting_weights(
    memory: ModelMemory, ranks: Sequence[Rank], speed: TensorSpeed
) -> tuple[int, ...] | None:
    """None when none fit."""
    if _least_bytes(memory, len(ranks)) > sum(rank.memory_bytes for rank in ranks):
        return None
    return _choose_weights(memory, ranks, speed)


def _least_bytes(memory: ModelMemory, num_ranks: int) -> int:
    """What all ranks need together however the weights fall: nothing is divided into less than itself."""
    tensor = memory.footprint.tensor
    divided = tensor.attention_bytes + tensor.mlp_bytes + tensor.vocabulary_bytes + tensor.leader_bytes
    whole = memory.kv_before[-1] if tensor.kv_groups == 0 else memory.whole_kv
    kv = memory.kv_before[-1] + whole * (num_ranks - 1)
    working = need_of(0, 0).total * num_ranks
    return num_ranks * tensor.replicated_bytes + divided + kv + working


def tensor_obstacle(footprint: ModelFootprint, num_ranks: int) -> str:
    """Why tensor sharding over so many ranks is impossible whatever the memory; '' when it is possible."""
    tensor = footprint.tensor
    if tensor.reason:
        return tensor.reason
    for units, what in ((tensor.attention_units, "KV groups"), (tensor.mlp_units, "MLP units")):
        if 0 < units < num_ranks:
            choices = {1: "needs at least two", 2: "works with 2 ranks", 3: "works with 2 or 3 ranks"}
            works = choices.get(units, f"works with 2 to {units} ranks")
            return f"{units} {what} cannot be divided over {num_ranks} ranks; tensor {works}"
    if not tensor.attention_units and not tensor.mlp_units:
        return "no part of this model can be divided"
    return ""


def attention_shares(footprint: ModelFootprint, weights: Sequence[int]) -> tuple[int, ...]:
    """KV groups per rank; zeros when attention is whole on every rank."""
    return shares(footprint.tensor.attention_units, weights)


def tensor_needs(memory: ModelMemory, weights: Sequence[int]) -> list[Need]:
    """Bytes per rank for these weights."""
    tensor = memory.footprint.tensor
    attention, mlp = shares(tensor.attention_units, weights), shares(tensor.mlp_units, weights)
    needs = [memory.tensor_share(*units) for units in zip(attention, mlp, strict=True)]
    if not tensor.divided:
        return needs
    parts = zip(tensor.kv_parts(weights), tensor.state_parts(weights), strict=True)
    return [
        need_of(tensor.weights_bytes(weights, rank), memory.kv_of(*own)) for rank, own in enumerate(parts)
    ]


def _check_possible(footprint: ModelFootprint, ranks: Sequence[Rank]) -> None:
    pinned = dict.fromkeys(rank.host for rank in ranks if rank.pinned_layers)
    if pinned:
        raise PlacementError(
            "`layers` pins a pipeline stage, but tensor sharding puts every layer on every rank. Remove it "
            f"from {', '.join(pinned)}, or use sharding pipeline."
        )
    obstacle = tensor_obstacle(footprint, len(ranks))
    if obstacle:
        raise PlacementError(
            f"Tensor sharding is impossible: {obstacle}. Sharding pipeline works with up to "
            f"{most_stages(footprint)} ranks."
        )


def _choose_weights(memory: ModelMemory, ranks: Sequence[Rank], speed: TensorSpeed) -> tuple[int, ...] | None:
    """The fastest that fit; None when none do."""
    candidates = _candidates(memory, ranks, speed)
    if speed.rates.are_equal and not _shortage(ranks, tensor_needs(memory, candidates[0])):
        return candidates[0]

    def badness(weights: tuple[int, ...]) -> tuple[int, int]:
        return _shortage(ranks, tensor_needs(memory, weights)), speed.step_ns(weights)

    starts = sorted(candidates, key=badness)[: 1 if _are_alike(ranks, speed) else _NUM_STARTS]
    best = min((_refine(start, badness) for start in starts), key=badness)
    if badness(best)[0]:
        return None
    readable = (split_units(total, best) for total in range(len(ranks), _FINE_TOTAL))
    near = speed.step_ns(best) * 101 // 100
    return next((tried for tried in readable if badness(tried) <= (0, near)), best)


def _refine(
    weights: tuple[int, ...], badness: Callable[[tuple[int, ...]], tuple[int, int]]
) -> tuple[int, ...]:
    """Move weight between two ranks for as long as that is better, in ever smaller steps."""
    scale = max(1, _FINE_TOTAL // sum(weights))
    current = tuple(weight * scale for weight in weights)
    least, step = badness(weights), max(1, sum(current) // 8)
    while step:
        tries = [
            tuple(w + step * ((i == taker) - (i == giver)) for i, w in enumerate(current))
            for giver, taker in itertools.permutations(range(len(current)), 2)
            if current[giver] > step
        ]
        best = min(tries, key=badness, default=current)
        if badness(best) < least:
            current, least = best, badness(best)
        else:
            step //= 2
    common = math.gcd(*current)
    return tuple(weight // common for weight in current)


def _candidates(memory: ModelMemory, ranks: Sequence[Rank], speed: TensorSpeed) -> list[tuple[int, ...]]:
    """Equal weights, by speed, by memory, by the memory beside what every rank holds whole, and all ways to
    deal out the units."""
    whole, tensor = memory.tensor_share(0, 0).total, memory.footprint.tensor
    by_speed = _small([rate // rank.slots for rate, rank in zip(speed.rates.memory, ranks, strict=True)])
    by_memory = _small([rank.memory_bytes for rank in ranks])
    by_room = _small([max(1, rank.memory_bytes - whole) for rank in ranks])
    numbers = {number for number in (tensor.attention_units, tensor.mlp_units) if number}
    if _are_alike(ranks, speed):
        numbers = {min(numbers)}
    deals = [deal for number in sorted(numbers) for deal in _deals(number, len(ranks))]
    return list(dict.fromkeys([(1,) * len(ranks), by_speed, by_memory, by_room, *deals]))


def _are_alike(ranks: Sequence[Rank], speed: TensorSpeed) -> bool:
    return speed.rates.are_equal and len({rank.memory_bytes for rank in ranks}) == 1


def _deals(num_units: int, num_ranks: int) -> list[tuple[int, ...]]:
    """All ways to give each rank at least one of the units, or of fewer when there are too many ways."""
    while num_units > num_ranks and math.comb(num_units - 1, num_ranks - 1) > _MOST_DEALS:
        num_units -= 1
    if num_units < num_ranks:
        return []
    edges = itertools.combinations(range(1, num_units), num_ranks - 1)
    return [
        tuple(end - start for start, end in itertools.pairwise((0, *inner, num_units))) for inner in edges
    ]


def _small(values: Sequence[int]) -> tuple[int, ...]:
    """The same proportions in small whole numbers, at least 1."""
    exact = [value // math.gcd(*values) for value in values]
    largest = max(exact)
    if largest <= _FINEST_WEIGHT:
        return tuple(exact)
    small = [max(1, value * _FINEST_WEIGHT // largest) for value in exact]
    return tuple(value // math.gcd(*small) for value in small)


def _shortage(ranks: Sequence[Rank], needs: Sequence[Need]) -> int:
    """Missing bytes over all ranks."""
    return sum(max(0, need.total - rank.memory_bytes) for rank, need in zip(ranks, needs, strict=True))
