"""How to divide: units by weights, and a row of layers into stages. Integers only, so every rank and every
machine gets the same answer."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from mlx_mesh.mesh.errors import PlacementError

Cost = tuple[int, ...]


def split_units(num_units: int, weights: Sequence[int]) -> tuple[int, ...]:
    """Whole units per rank in proportion to `weights` by largest remainder, at least one each; of equal
    remainders the lower rank's comes first. Raises PlacementError when there are fewer units than ranks."""
    return _split_units(num_units, tuple(weights))


@functools.lru_cache(maxsize=65536)  # a search over weights asks the same of every kind of part
def _split_units(num_units: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    if not weights or min(weights) < 1:
        raise PlacementError(f"Weights {tuple(weights)} cannot divide anything: each must be 1 or more.")
    if num_units < len(weights):
        raise PlacementError(f"{num_units} units cannot be divided over {len(weights)} ranks, one each.")
    shares = [0] * len(weights)
    open_ranks, units = list(range(len(weights))), num_units
    while True:
        total = sum(weights[rank] for rank in open_ranks)
        small = [rank for rank in open_ranks if units * weights[rank] < total]
        if not small:
            break
        for rank in small:  # entitled to less than one: gets one, and the others share the rest
            shares[rank] = 1
            open_ranks.remove(rank)
        units -= len(small)
    for rank in open_ranks:
        shares[rank] = units * weights[rank] // total
    by_remainder = sorted(open_ranks, key=lambda rank: (-(units * weights[rank] % total), rank))
    for rank in by_remainder[: num_units - sum(shares)]:
        shares[rank] += 1
    return tuple(shares)


def cheapest_stages(
    boundaries: Sequence[int], num_stages: int, cost: Callable[[int, int, int], Cost | None]
) -> tuple[int, ...] | None:
    """Stage limits (b0, ..., b_num_stages) out of the increasing `boundaries`, from its first to its last,
    with the least sum of `cost(stage, start, end)`, added and compared as tuples. A cost of None forbids a
    stage. None when no division is allowed."""
    best: dict[int, tuple[Cost, tuple[int, ...]]] = {boundaries[0]: ((), (boundaries[0],))}
    for stage in range(num_stages):
        following: dict[int, tuple[Cost, tuple[int, ...]]] = {}
        ends = boundaries[-1:] if stage == num_stages - 1 else boundaries
        for start, (spent, path) in best.items():
            for end in ends:
                price = cost(stage, start, end) if end > start else None
                if price is None:
                    continue
                total = tuple(map(sum, zip(spent, price, strict=True))) if spent else price
                if end not in following or total < following[end][0]:
                    following[end] = (total, (*path, end))
        best = following
    return best[boundaries[-1]][1] if boundaries[-1] in best else None


def smallest_maximum(
    boundaries: Sequence[int], num_stages: int, load: Callable[[int, int, int], int | None]
) -> int | None:
    """The least possible value of the largest `load(stage, start, end)`; None when no division is allowed."""
    best: dict[int, int] = {boundaries[0]: 0}
    for stage in range(num_stages):
        following: dict[int, int] = {}
        ends = boundaries[-1:] if stage == num_stages - 1 else boundaries
        for start, largest in best.items():
            for end in ends:
                here = load(stage, start, end) if end > start else None
                if here is None:
                    continue
                worst = max(largest, here)
                if end not in following or worst < following[end]:
                    following[end] = worst
        best = following
    return best.get(boundaries[-1])
