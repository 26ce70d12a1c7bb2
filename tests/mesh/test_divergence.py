"""Histories of ranks are compared, and the one that differs is named."""

from __future__ import annotations

from mlx_mesh.mesh.divergence import MAX_OPEN_STEPS, DigestBook, RollingDigest


def history(*steps: tuple[int, int]) -> RollingDigest:
    digest = RollingDigest()
    for step, token in steps:
        digest.add(step, [("a", token)])
    return digest


def test_equal_histories_have_equal_digests_and_one_other_token_shows_for_ever() -> None:
    same, again = history((1, 5), (2, 6)), history((1, 5), (2, 6))
    other = history((1, 4), (2, 6))
    assert same.value == again.value
    assert other.value != same.value
    assert other.add(3, [("a", 7)]) != same.add(3, [("a", 7)])


def test_the_order_of_rows_and_the_step_are_part_of_the_history() -> None:
    assert RollingDigest().add(1, [("a", 1), ("b", 2)]) != RollingDigest().add(1, [("b", 2), ("a", 1)])
    assert RollingDigest().add(1, []) != RollingDigest().add(2, [])


def test_a_step_is_verified_when_all_ranks_agree() -> None:
    book = DigestBook(2)
    assert book.note(0, 16, "x") is None and book.verified_step == 0
    assert book.note(1, 16, "x") is None and book.verified_step == 16


def test_the_rank_that_differs_from_most_is_named() -> None:
    book = DigestBook(3)
    book.note(0, 5, "x")
    book.note(1, 5, "y")
    found = book.note(2, 5, "x")
    assert found is not None and (found.odd, found.step) == (1, 5) and "step 5" in str(found)


def test_of_two_ranks_that_differ_the_leader_is_believed() -> None:
    book = DigestBook(2)
    book.note(1, 5, "x")
    found = book.note(0, 5, "y")
    assert found is not None and found.odd == 1


def test_late_digests_and_a_silent_rank_cost_no_memory() -> None:
    book = DigestBook(2)
    for rank in (0, 1):
        book.note(rank, 100, "x")
    assert book.note(1, 50, "other") is None
    for step in range(101, 101 + 2 * MAX_OPEN_STEPS):
        book.note(0, step, "x")
    assert len(book._open) <= MAX_OPEN_STEPS
