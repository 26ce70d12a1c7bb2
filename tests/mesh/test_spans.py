"""Spans of bytes behave as sets of bytes do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_mesh.mesh.spans import Span, covers, merge, on_grid, subtract, total

spans = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 12)).map(lambda s: (s[0], s[0] + s[1])))


def bytes_of(found: list[Span]) -> set[int]:
    return {byte for start, end in found for byte in range(start, end)}


@given(spans, spans)
def test_they_are_merged_subtracted_and_compared_like_sets(one: list[Span], other: list[Span]) -> None:
    assert bytes_of(merge(one)) == bytes_of(one)
    assert total(merge(one)) == len(bytes_of(one))
    assert bytes_of(subtract(one, other)) == bytes_of(one) - bytes_of(other)
    assert covers(one, other) == (bytes_of(other) <= bytes_of(one))


@given(spans, st.integers(1, 20))
def test_pieces_on_a_grid_are_the_same_bytes_and_cross_no_line(some: list[Span], step: int) -> None:
    pieces = list(on_grid(merge(some), step))
    assert bytes_of(pieces) == bytes_of(some)
    assert all(start // step == (end - 1) // step for start, end in pieces)


def test_spans_that_touch_are_one() -> None:
    assert merge([(5, 9), (0, 5), (9, 9), (12, 13)]) == [(0, 9), (12, 13)]
