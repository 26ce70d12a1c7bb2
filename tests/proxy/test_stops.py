"""Stop strings, byte-exact at every way of cutting the text."""

from __future__ import annotations

import itertools

import pytest

from mlx_mesh.proxy.stops import StopMatcher

CASES = [
    ("1, 2, 3, 4, 5, 6, 7", ["6"], "1, 2, 3, 4, 5, ", "6"),
    ("say hello world now", ["hello world"], "say ", "hello world"),
    ("stop at once", ["stop"], "", "stop"),
    ("no match her", ["here"], "no match her", None),
    ("aaab", ["aab"], "a", "aab"),
    ("ababac", ["abac"], "ab", "abac"),
    ("abcde", ["abcde", "bcd"], "a", "bcd"),  # completes first
    ("xabc", ["bc", "abc"], "x", "abc"),  # completes together: the longer one
    ("ends with a beginnin", ["beginning", "nin!"], "ends with a beginnin", None),
    ("你好。再见", ["。"], "你好", "。"),
    ("a👩‍👧b", ["👧"], "a👩\u200d", "👧"),
    ("line\n\nnext", ["\n\n"], "line", "\n\n"),
    ("no stops", [], "no stops", None),
]


def cuts(text: str, num_pieces: int) -> list[list[str]]:
    """Every way to cut the text into so many pieces, empty ones included."""
    at = itertools.combinations_with_replacement(range(len(text) + 1), num_pieces - 1)
    return [[text[a:b] for a, b in itertools.pairwise((0, *where, len(text)))] for where in at]


@pytest.mark.parametrize(("text", "stops", "expected", "matched"), CASES)
def test_the_result_does_not_depend_on_where_the_text_is_cut(
    text: str, stops: list[str], expected: str, matched: str | None
) -> None:
    for pieces in [*cuts(text, 1), *cuts(text, 2), *cuts(text, 3), list(text)]:
        matcher = StopMatcher(stops)
        given = "".join(matcher.add(piece) for piece in pieces)
        assert (given + matcher.finish(), matcher.matched) == (expected, matched), pieces


@pytest.mark.parametrize(("text", "stops", "expected", "matched"), CASES)
def test_nothing_that_may_become_a_stop_string_is_given_out_early(
    text: str, stops: list[str], expected: str, matched: str | None
) -> None:
    matcher = StopMatcher(stops)
    given = ""
    for char in text:
        given += matcher.add(char)
        assert expected.startswith(given)


def test_text_that_cannot_begin_a_stop_string_is_not_held() -> None:
    matcher = StopMatcher(["END"])
    assert matcher.add("hello E") == "hello "
    assert matcher.is_holding
    assert matcher.add("at") == "Eat"
    assert not matcher.is_holding


def test_after_a_match_nothing_more_comes_out() -> None:
    matcher = StopMatcher(["."])
    assert matcher.add("one. two") == "one"
    assert matcher.add("three") == ""
    assert matcher.finish() == ""
