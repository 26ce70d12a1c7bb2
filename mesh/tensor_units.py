"""How a divisible part of a layer falls to ranks: pure arithmetic that engines and planners share.

A unit of work is an attention, an MLP or another mixer, counted in groups (heads or blocks of inner columns).
A rank has the groups [start, stop) of it; a layout says which elements of a parameter's axis they own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

import msgspec

from mlx_mesh.mesh.partition import split_units

Range = tuple[int, int]


class Segment(msgspec.Struct, frozen=True):
    """A run of `size` elements on an axis. Each group owns `per_group` consecutive ones; `ratio` neighbouring
    groups own the same ones (query heads of one KV head). per_group 0: every rank needs the whole run."""

    size: int
    per_group: int = 0
    ratio: int = 1


Layout = tuple[Segment, ...]


def ranges_of(layout: Layout, start: int, stop: int) -> tuple[Range, ...]:
    """The elements that groups [start, stop) need, in order. Elements can come twice: groups that begin or
    end inside a shared block get a copy of it each, because their counts would not divide otherwise."""
    found: list[Range] = []
    offset = 0
    for segment in layout:
        for a, b in _blocks(segment, start, stop):
            if found and found[-1][1] == offset + a:
                found[-1] = (found[-1][0], offset + b)
            else:
                found.append((offset + a, offset + b))
        offset += segment.size
    return tuple(found)


def _blocks(segment: Segment, start: int, stop: int) -> Iterator[Range]:
    per_group, ratio = segment.per_group, segment.ratio
    if not per_group:
        yield 0, segment.size
        return
    first, last = start // ratio, (stop - 1) // ratio
    if first == last or (start % ratio == 0 and stop % ratio == 0):
        yield first * per_group, (last + 1) * per_group
    else:
        for group in range(start, stop):
            yield group // ratio * per_group, (group // ratio + 1) * per_group


@functools.lru_cache(maxsize=65536)  # a search over weights asks the same again and again
def count_of(layout: Layout, start: int, stop: int) -> int:
    """How many elements groups [start, stop) have."""
    return sum(b - a for a, b in ranges_of(layout, start, stop))


def size_of(layout: Layout) -> int:
    return sum(segment.size for segment in layout)


class Division(msgspec.Struct, frozen=True):
    """Where a unit may be cut. `edges` are the group numbers where shares begin and end, from 0 to the number
    of groups; `fine_edges` is used when there are more ranks than edges leave room for, at the price of
    copies of what groups share."""

    edges: tuple[int, ...]
    fine_edges: tuple[int, ...] = ()

    def can_serve(self, num_ranks: int) -> bool:
        return max(len(self.edges), len(self.fine_edges)) > num_ranks

    def share(self, weights: Sequence[int], rank: int) -> Range:
        """The groups [start, stop) of one rank."""
        edges = self.edges if len(self.edges) > len(weights) else self.fine_edges
        units = split_units(len(edges) - 1, weights)
        start = sum(units[:rank])
        return edges[start], edges[start + units[rank]]


class DividedBytes(msgspec.Struct, frozen=True):
    """Parameters that are cut alike, `times` of them: each element of `layout` weighs `bytes_per_element`.
    `is_leaders`: not cut, but rank 0 alone keeps them (biases that may count only once). `kv_itemsize`: these
    are keys and values that may be quantised, of numbers of so many bytes; 0 = they are not."""

    division: Division
    layout: Layout
    bytes_per_element: int
    times: int = 1
    is_leaders: bool = False
    kv_itemsize: int = 0

    @property
    def total(self) -> int:
        return self.times * self.bytes_per_element * size_of(self.layout)

    def of_rank(self, weights: Sequence[int], rank: int) -> int:
        """Bytes that one rank holds; all of them when there are too many ranks to cut."""
        if not self.division.can_serve(len(weights)):
            return self.total
        if self.is_leaders:
            return 0 if rank else self.total
        start, stop = self.division.share(weights, rank)
        return self.times * self.bytes_per_element * count_of(self.layout, start, stop)
