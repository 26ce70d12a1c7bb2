"""The leader's index of kept prefixes: what is found is right, and no rank keeps more than its limit."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_mesh.mesh import prefix_index
from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.prefix_index import MIN_TOKENS, Hit, PrefixIndex, common_length, packed
from mlx_mesh.mesh.prefix_settings import UNKNOWN_LIMIT_BYTES, PrefixSettings, limits_of, longest_entry


def tokens(count: int, *other: int) -> list[int]:
    return [*range(100, 100 + count), *other]


def index(*limits: int) -> PrefixIndex:
    return PrefixIndex(limits or (1000,))


@given(st.lists(st.integers(0, 3), max_size=40), st.lists(st.integers(0, 3), max_size=40))
def test_the_common_length_is_that_of_the_lists(a: list[int], b: list[int]) -> None:
    naive = 0
    while naive < min(len(a), len(b)) and a[naive] == b[naive]:
        naive += 1
    assert common_length(packed(a), packed(b)) == naive


def test_a_prompt_begins_with_the_longest_common_prefix_and_keeps_a_token_to_compute() -> None:
    it = index()
    it.add(1, tokens(40, 1, 2, 3), "", (10,), can_cut=True)
    it.add(2, tokens(30, 9), "", (10,), can_cut=True)
    assert it.find(tokens(40, 7, 7, 7)) == Hit(1, 40)
    assert it.find(tokens(30, 9, 9)) == Hit(2, 31)
    assert it.find(tokens(40, 1, 2, 3)) == Hit(1, 42)
    assert it.find(tokens(20)) == Hit(2, 19)
    assert it.find(tokens(MIN_TOKENS)) is None
    assert it.find([1, *tokens(40)]) is None


def test_what_cannot_be_cut_is_found_only_as_a_whole() -> None:
    it = index()
    it.add(1, tokens(20), "", (10,), can_cut=False)
    it.add(2, tokens(40), "", (10,), can_cut=False)
    assert it.find(tokens(30)) == Hit(1, 20)
    assert it.find(tokens(41)) == Hit(2, 40)
    assert it.find(tokens(40)) == Hit(1, 20)
    assert it.longest_known(tokens(33, 1)) == 33
    assert len(it) == 2


def test_an_entry_that_has_some_tokens_and_can_give_them_alone() -> None:
    it = index()
    it.add_row(1, tokens(40), "")
    assert it.stored_with(tokens(30)) is None
    it.add(2, tokens(35), "", (10,), can_cut=False)
    assert it.stored_with(tokens(30)) is None
    assert it.stored_with(tokens(35)) == 2
    it.add(3, tokens(32), "", (10,), can_cut=True)
    assert it.stored_with(tokens(30)) == 3


def test_requests_with_different_salts_share_nothing() -> None:
    it = index()
    it.add(1, tokens(40), "a", (10,), can_cut=True)
    assert it.find(tokens(50)) is None
    assert it.find(tokens(50), "b") is None
    assert it.find(tokens(50), "a") == Hit(1, 40)
    assert it.add(2, tokens(60), "b", (10,), can_cut=True) == []


def test_a_longer_entry_replaces_its_prefixes_where_it_can_be_cut() -> None:
    it = index()
    it.add(1, tokens(20, 5), "", (10,), can_cut=True)
    it.add(2, tokens(30), "", (10,), can_cut=True)
    assert it.add(3, tokens(50), "", (10,), can_cut=True) == [2]
    assert it.add(4, tokens(40), "", (10,), can_cut=True) == [4]  # one that is there has it
    assert it.used == [20]
    assert it.add(5, tokens(60), "", (10,), can_cut=False) == []
    assert it.add(6, tokens(60), "", (10,), can_cut=False) == [5]
    assert it.add(7, tokens(45), "", (10,), can_cut=False) == [7]


def test_the_rank_with_the_least_room_decides_for_all_and_the_oldest_goes_first() -> None:
    it = index(1000, 25)
    it.add(1, tokens(20, 1), "", (10, 10), can_cut=True)
    it.add(2, tokens(20, 2), "", (10, 10), can_cut=True)
    it.use(1)
    assert it.add(3, tokens(20, 3), "", (10, 10), can_cut=True) == [2]
    assert it.add(4, tokens(20, 4), "", (10, 30), can_cut=True) == [1, 3, 4]
    assert it.used == [0, 0]
    assert len(it) == 0


def test_only_so_many_entries_are_looked_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "MAX_ENTRIES", 2)
    it = index()
    assert [it.add(n, tokens(20, n), "", (1,), can_cut=True) for n in range(1, 5)] == [[], [], [1], [2]]


def test_rows_that_run_are_found_and_never_evicted() -> None:
    it = index(5)
    it.add_row(1, tokens(40), "")
    assert it.find(tokens(30, 1)) == Hit(1, 30)
    assert it.clear() == []
    assert it.add(1, tokens(45), "", (3,), can_cut=True) == []  # it ended
    assert it.used == [3]
    assert it.clear() == [1]
    it.remove(1)
    assert it.used == [0]


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=16, max_size=24), st.booleans(), st.integers(1, 40)),
        max_size=25,
    )
)
def test_limits_hold_and_every_hit_is_a_prefix_that_is_kept(
    entries: list[tuple[list[int], bool, int]],
) -> None:
    it = index(100, 60)
    kept: dict[int, tuple[list[int], bool]] = {}
    for number, (ids, can_cut, size) in enumerate(entries, 1):
        hit = it.find(ids)
        if hit is not None:
            theirs, cuts = kept[hit.entry]
            assert MIN_TOKENS <= hit.num_tokens < len(ids)
            assert theirs[: hit.num_tokens] == ids[: hit.num_tokens]
            assert cuts or len(theirs) == hit.num_tokens
        kept[number] = (ids, can_cut)
        for gone in it.add(number, ids, "", (size, size), can_cut=can_cut):
            del kept[gone]
        assert all(number in it for number in kept)
        assert len(it) == len(kept)
        assert all(used <= limit for used, limit in zip(it.used, (100, 60), strict=True))


def test_a_prefix_that_fits_into_no_limit_is_not_kept_at_all() -> None:
    def rank(number: int, budget_bytes: int | None) -> RankKv:
        return RankKv(
            rank=number, host="h", budget_bytes=budget_bytes, fixed_bytes=10, per_token=((0, 2), (256, 1))
        )

    kv = KvBudget(ranks=(rank(0, None), rank(1, 4000)))
    assert longest_entry(PrefixSettings(), kv) == 768  # 10 + 2 * 768 + 256 of 2000 bytes
    assert longest_entry(PrefixSettings(max_bytes=700), kv) == 0
    assert longest_entry(PrefixSettings(), KvBudget()) >= 1 << 23


def test_the_limit_is_what_was_asked_for_or_half_of_what_memory_leaves() -> None:
    def rank(number: int, budget_bytes: int | None) -> RankKv:
        return RankKv(rank=number, host="h", budget_bytes=budget_bytes, fixed_bytes=0, per_token=())

    kv = KvBudget(ranks=(rank(0, 1000), rank(1, None)))
    assert limits_of(PrefixSettings(), kv) == (500, UNKNOWN_LIMIT_BYTES)
    assert limits_of(PrefixSettings(max_bytes=700), kv) == (700, 700)
    assert limits_of(PrefixSettings(max_bytes=7000), kv) == (1000, 7000)
    assert limits_of(PrefixSettings(), KvBudget()) == (UNKNOWN_LIMIT_BYTES,)
