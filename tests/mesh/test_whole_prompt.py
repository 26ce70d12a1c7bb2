"""How long a prompt may be that is read in one piece."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.whole_prompt import LONGEST, Widths, longest_in_one_piece

WIDTHS = Widths(hidden=64, inner=128, heads=4, vocabulary=1000)


def rank(number: int, budget_bytes: int | None) -> RankKv:
    return RankKv(
        rank=number, host=f"mac{number}", budget_bytes=budget_bytes, fixed_bytes=0, per_token=((0, 100),)
    )


def test_widths_come_from_the_text_part_and_the_widest_layer() -> None:
    config = {
        "hidden_size": 1,
        "vocab_size": 7,
        "text_config": {"hidden_size": 8, "intermediate_size": [4, 16]},
    }
    assert Widths.of(config) == Widths(hidden=8, inner=16, heads=64, vocabulary=7)
    assert Widths.of({"text_config": None}).hidden == 8192


def test_twice_as_many_tokens_need_more_than_twice_as_much() -> None:
    pairs = 4 * 4 * 256**2
    assert WIDTHS.bytes_of(512) - 2 * WIDTHS.bytes_of(256) > pairs
    assert WIDTHS.bytes_of(256) > pairs


def test_hidden_states_that_are_kept_several_times_over_count_so_often() -> None:
    streams = Widths.of({"text_config": {"hidden_size": 64, "altup_num_inputs": 4}})
    assert streams.streams == 4 and WIDTHS.streams == 0
    assert replace(WIDTHS, streams=4).bytes_of(100) - WIDTHS.bytes_of(100) > 4 * 100 * 4 * 64


def test_the_rank_with_least_memory_decides() -> None:
    need = WIDTHS.bytes_of(512) + 512 * 100
    assert longest_in_one_piece(KvBudget(ranks=(rank(0, 10 * need), rank(1, need))), WIDTHS) == 512
    assert longest_in_one_piece(KvBudget(ranks=(rank(0, 10 * need), rank(1, need - 1))), WIDTHS) == 256
    assert longest_in_one_piece(KvBudget(ranks=(rank(0, 10),)), WIDTHS) == 0


@pytest.mark.parametrize("ranks", [(), (rank(0, None),), (rank(0, 1 << 50),)])
def test_without_a_limit_there_is_one_all_the_same(ranks: tuple[RankKv, ...]) -> None:
    assert longest_in_one_piece(KvBudget(ranks=ranks), WIDTHS) == LONGEST
