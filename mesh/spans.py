"""Parts of a file as [start, end) spans of bytes. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Span = tuple[int, int]
"""Bytes [start, end)."""


def merge(spans: Iterable[Span]) -> list[Span]:
    """In order, without overlaps; spans that touch are one."""
    merged: list[Span] = []
    for start, end in sorted(spans):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(spans: Iterable[Span], taken: Iterable[Span]) -> list[Span]:
    """What of `spans` is not in `taken`."""
    left: list[Span] = []
    holes = merge(taken)
    at = 0
    for start, end in merge(spans):
        while at < len(holes) and holes[at][1] <= start:
            at += 1
        index = at
        while index < len(holes) and holes[index][0] < end:
            if holes[index][0] > start:
                left.append((start, holes[index][0]))
            start = max(start, holes[index][1])
            index += 1
        if start < end:
            left.append((start, end))
    return left


def covers(spans: Iterable[Span], wanted: Iterable[Span]) -> bool:
    """Whether every byte of `wanted` is in `spans`."""
    return not subtract(wanted, spans)


def total(spans: Iterable[Span]) -> int:
    """Bytes; spans must not overlap."""
    return sum(end - start for start, end in spans)


def on_grid(spans: Iterable[Span], step: int) -> Iterator[Span]:
    """The same bytes in spans that cross no multiple of `step`."""
    for start, end in spans:
        while start < end:
            edge = min(end, (start // step + 1) * step)
            yield start, edge
            start = edge
