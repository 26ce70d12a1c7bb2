"""Which weight each rank has when every layer is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mlx_mesh.mesh.capacity import PlacementRequest, Rank
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.memory import ModelMemory, Need, describe_misfit, part_of
from mlx_mesh.mesh.partition import split_units
from mlx_mesh.mesh.pipeline_plan import most_stages
from mlx_mesh.mesh.types import Shard

_FINEST_WEIGHT = 1000  # weights by memory are at most this, so that a plan stays readable


def plan_tensor(
    footprint: ModelFootprint, ranks: Sequence[Rank], request: PlacementRequest
) -> tuple[Shard, ...]:
    """Equal weights when they fit, because all ranks wait for the slowest; else weights by memory, then by
    the memory that is left beside what every rank holds whole. Raises PlacementError."""
    _check_possible(footprint, ranks)
    memory = ModelMemory.for_request(footprint, request)
    weights = _choose_weights(memory, ranks)
    if weights is None:
        least = min(
            _candidates(memory, ranks), key=lambda tried: _shortage(ranks, tensor_needs(memory, tried))
        )
        raise PlacementError(
            describe_misfit(
                footprint,
                request,
                ranks,
                tensor_needs(memory, least),
                lambda other: _choose_weights(other, ranks) is not None,
            )
        )
    units = attention_shares(footprint, weights)
    kv_per_token = footprint.kv_bytes_per_token
    return tuple(
        Shard(
            rank=rank.rank,
            host=rank.host,
            start_layer=0,
            end_layer=footprint.num_layers,
            weight=weight,
            weights_bytes=need.weights,
            kv_bytes_per_token=part_of(kv_per_token, share, footprint.tensor.attention_units),
            memory_limit_bytes=rank.memory_bytes,
        )
        for rank, weight, need, share in zip(
            ranks, weights, tensor_needs(memory, weights), units, strict=True
        )
    )


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
    return _shares(footprint.tensor.attention_units, weights)


def tensor_needs(memory: ModelMemory, weights: Sequence[int]) -> list[Need]:
    """Bytes per rank for these weights."""
    tensor = memory.footprint.tensor
    attention, mlp = _shares(tensor.attention_units, weights), _shares(tensor.mlp_units, weights)
    return [memory.tensor_share(*units) for units in zip(attention, mlp, strict=True)]


def _shares(num_units: int, weights: Sequence[int]) -> tuple[int, ...]:
    return split_units(num_units, weights) if num_units else (0,) * len(weights)


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


def _choose_weights(memory: ModelMemory, ranks: Sequence[Rank]) -> tuple[int, ...] | None:
    """The first candidate that fits."""
    for weights in _candidates(memory, ranks):
        if not _shortage(ranks, tensor_needs(memory, weights)):
            return weights
    return None


def _candidates(memory: ModelMemory, ranks: Sequence[Rank]) -> list[tuple[int, ...]]:
    whole = memory.tensor_share(0, 0).total
    by_memory = _small([rank.memory_bytes for rank in ranks])
    by_room = _small([max(1, rank.memory_bytes - whole) for rank in ranks])
    return list(dict.fromkeys([(1,) * len(ranks), by_memory, by_room]))


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
