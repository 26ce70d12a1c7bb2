"""What running sequences cost each rank, and who is the tightest."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_mesh.mesh.capacity import HostCapacity, PlacementRequest
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint, TensorFootprint
from mlx_mesh.mesh.kv_budget import BLOCK_TOKENS, MEDIA_BYTES, MEDIA_PART, KvBudget, RankKv, kv_budget
from mlx_mesh.mesh.memory import WORKING_BASE_BYTES
from mlx_mesh.mesh.placement import plan_placement, plan_rows
from mlx_mesh.mesh.types import Sharding

MB = 1_000_000


def rank(budget: int | None, per_token: Any = ((0, 1000),), fixed: int = 0, number: int = 0) -> RankKv:
    return RankKv(
        rank=number, host=f"mac{number}", budget_bytes=budget, fixed_bytes=fixed, per_token=tuple(per_token)
    )


def footprint(*layers: LayerFootprint) -> ModelFootprint:
    return ModelFootprint(
        model_type="test",
        model_digest="d",
        num_layers=len(layers),
        layers=layers,
        embedding_bytes=4 * MB,
        head_bytes=0,
        tied_embedding=True,
        legal_cuts=tuple(range(1, len(layers))),
        cut_reason="",
        hidden_bytes_per_token=64,
        context_length=8192,
        vocab_size=100,
        tensor=TensorFootprint(
            attention_units=4, attention_bytes=4 * MB, mlp_units=4, mlp_bytes=4 * MB, replicated_bytes=4 * MB
        ),
    )


PLAIN = LayerFootprint(weights_bytes=2 * MB, kv_bytes_per_token=1000)
SLIDING = LayerFootprint(weights_bytes=2 * MB, kv_bytes_per_token=1000, kv_window=512)
STATE = LayerFootprint(weights_bytes=2 * MB, kv_bytes_per_token=0, fixed_state_bytes=5000)


def test_rows_are_padded_to_the_longest_and_grow_in_blocks() -> None:
    one = rank(None)
    assert one.bytes_of(1, 1) == 1000 * BLOCK_TOKENS == one.bytes_of(1, BLOCK_TOKENS)
    assert one.bytes_of(3, BLOCK_TOKENS + 1) == 3 * 1000 * 2 * BLOCK_TOKENS
    assert one.bytes_of(0, 0) == 0


def test_windows_stop_growing_and_states_never_grow() -> None:
    mixed = rank(None, per_token=((0, 10), (512, 100)), fixed=7)
    assert mixed.bytes_of(1, 512) == 512 * 110 + 7
    assert mixed.bytes_of(2, 5120) == 2 * (5120 * 10 + 512 * 100 + 7)


def test_the_rank_that_lacks_most_is_named_and_without_a_limit_nobody_is_short() -> None:
    budget = KvBudget(ranks=(rank(None), rank(2 * MB, number=1), rank(1 * MB, number=2)))
    assert budget.short(1, 512) is None
    short = budget.short(4, 600)
    assert short is not None and short.rank == 2
    assert KvBudget().short(1000, 1 << 30) is None


def test_a_refusal_has_the_numbers() -> None:
    text = KvBudget(ranks=(rank(1 * MB, number=1),)).explain(2000, 8192)
    assert text.startswith(
        "A sequence of 2000 tokens needs 2 MB of KV memory on rank 1 (mac1), which has 1 MB"
    )
    assert "up to 768 tokens" in text and "memory limit of mac1" in text


@given(budget=st.integers(0, 20 * MB), context=st.integers(0, 20_000), window=st.sampled_from([0, 300]))
def test_the_longest_sequence_fits_and_one_block_more_does_not(
    budget: int, context: int, window: int
) -> None:
    kv = KvBudget(ranks=(rank(budget, per_token=((0, 500), (window, 500))),))
    longest = kv.longest_sequence(context)
    if longest is None:
        assert kv.short(1, context) is None
    else:
        assert (longest == 0 or kv.short(1, longest) is None) and kv.short(1, longest + 1) is not None


@pytest.mark.parametrize("sharding", [Sharding.PIPELINE, Sharding.TENSOR])
@pytest.mark.parametrize("layers", [(PLAIN,) * 4, (PLAIN, SLIDING, STATE, PLAIN)])
def test_the_budget_agrees_with_the_plan_rank_by_rank(
    sharding: Sharding, layers: tuple[LayerFootprint, ...]
) -> None:
    """What the plan reserves for its sequences is what they cost here, and the limit is the same."""
    model = footprint(*layers)
    request = PlacementRequest(sharding=sharding, context_tokens=1024, num_sequences=3)
    hosts = [
        HostCapacity(name="a", slots=1, usable_memory_bytes=WORKING_BASE_BYTES + 60 * MB),
        HostCapacity(name="b", slots=1, usable_memory_bytes=WORKING_BASE_BYTES + 50 * MB),
    ]
    placement = plan_placement(model, hosts, request)
    budget = kv_budget(model, placement)
    for row, mine in zip(plan_rows(placement, model, request), budget.ranks, strict=True):
        assert mine.bytes_of(3, 1024) == pytest.approx(row.kv_bytes, abs=16)
        assert mine.budget_bytes == row.limit_bytes - row.weights_bytes - row.working_bytes
    assert budget.short(3, 1024) is None, "the plan found room for these"


def test_the_leader_sets_memory_aside_for_what_towers_made_of_pictures() -> None:
    model = footprint(PLAIN, PLAIN)
    towers = msgspec.structs.replace(model, media=("image",), tower_bytes=MB)
    for usable in (WORKING_BASE_BYTES + 60 * MB, WORKING_BASE_BYTES + 6000 * MB):
        hosts = [HostCapacity(name=name, slots=1, usable_memory_bytes=usable) for name in "ab"]
        placement = plan_placement(model, hosts, PlacementRequest(sharding=Sharding.PIPELINE))
        leader, other = kv_budget(towers, placement).ranks
        text_leader, text_other = kv_budget(model, placement).ranks
        assert other == text_other and text_leader.media_bytes == 0
        assert leader.budget_bytes is not None and text_leader.budget_bytes is not None
        assert leader.media_bytes == min(MEDIA_BYTES, text_leader.budget_bytes // MEDIA_PART)
        assert leader.budget_bytes + leader.media_bytes == text_leader.budget_bytes


def test_a_model_on_one_rank_and_one_without_a_limit() -> None:
    model = footprint(PLAIN, PLAIN)
    host = HostCapacity(name="a", slots=1, usable_memory_bytes=WORKING_BASE_BYTES + 100 * MB)
    placement = plan_placement(model, [host], PlacementRequest())
    (one,) = kv_budget(model, placement).ranks
    assert one.bytes_of(1, 256) == 2 * 1000 * 256 and one.budget_bytes is not None
