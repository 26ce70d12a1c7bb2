"""Placement: what goes where, and what is said when it cannot go."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint, TensorFootprint
from mlx_mesh.mesh.memory import WORKING_BASE_BYTES, ModelMemory
from mlx_mesh.mesh.partition import split_units
from mlx_mesh.mesh.placement import HostCapacity, PlacementRequest, plan_placement, plan_rows
from mlx_mesh.mesh.types import Placement, Sharding

GB = 10**9
MB = 10**6


def footprint(
    *,
    num_layers: int = 30,
    layer_bytes: int = 14 * MB,
    embedding_bytes: int = 113 * MB,
    head_bytes: int = 2304,
    tied: bool = True,
    legal_cuts: tuple[int, ...] | None = None,
    cut_reason: str = "",
    attention_units: int = 3,
    mlp_units: int = 1536,
    kv_bytes: int = 1536,
    kv_window: int = 0,
    context_length: int = 8192,
    tensor_reason: str = "",
) -> ModelFootprint:
    """SmolLM2-135M in float32 unless told otherwise."""
    layer = LayerFootprint(weights_bytes=layer_bytes, kv_bytes_per_token=kv_bytes, kv_window=kv_window)
    total = num_layers * layer_bytes
    return ModelFootprint(
        model_type="llama",
        model_digest="d",
        num_layers=num_layers,
        layers=(layer,) * num_layers,
        embedding_bytes=embedding_bytes,
        head_bytes=head_bytes,
        tied_embedding=tied,
        legal_cuts=tuple(range(1, num_layers)) if legal_cuts is None else legal_cuts,
        cut_reason=cut_reason,
        hidden_bytes_per_token=2304,
        context_length=context_length,
        vocab_size=49152,
        tensor=TensorFootprint(
            attention_units=attention_units,
            attention_bytes=total // 4,
            mlp_units=mlp_units,
            mlp_bytes=total - total // 4,
            replicated_bytes=embedding_bytes + head_bytes,
            reason=tensor_reason,
        ),
    )


def hosts(*memory: int, slots: int = 1, layers: tuple[int, ...] = ()) -> list[HostCapacity]:
    return [
        HostCapacity(
            name=f"mac{i + 1}",
            slots=slots,
            usable_memory_bytes=bytes_,
            layers=(layers[i],) * slots if layers and layers[i] else (),
        )
        for i, bytes_ in enumerate(memory)
    ]


def stages(placement: Placement) -> list[tuple[int, int]]:
    return [(shard.start_layer, shard.end_layer) for shard in placement.shards]


def asked(sharding: Sharding, context_tokens: int = 4096, num_sequences: int = 4) -> PlacementRequest:
    return PlacementRequest(sharding=sharding, context_tokens=context_tokens, num_sequences=num_sequences)


AUTO = asked(Sharding.AUTO)
PIPELINE = asked(Sharding.PIPELINE)
TENSOR = asked(Sharding.TENSOR)


# ---------------------------------------------------------------- pipeline


def test_equal_hosts_get_equal_layers_and_rank_zero_is_the_last_stage() -> None:
    placement = plan_placement(footprint(), hosts(16 * GB, 16 * GB), AUTO)
    assert placement.sharding is Sharding.PIPELINE
    assert stages(placement) == [(15, 30), (0, 15)]
    assert [shard.host for shard in placement.shards] == ["mac1", "mac2"]


def test_layers_follow_memory() -> None:
    placement = plan_placement(footprint(), hosts(48 * GB, 16 * GB, 16 * GB), PIPELINE)
    assert [end - start for start, end in stages(placement)] == [18, 6, 6]


def test_slots_share_the_memory_of_their_host_and_number_their_ranks_in_a_row() -> None:
    placement = plan_placement(footprint(), hosts(32 * GB, 16 * GB, slots=2), PIPELINE)
    assert [shard.host for shard in placement.shards] == ["mac1", "mac1", "mac2", "mac2"]
    assert [shard.memory_limit_bytes for shard in placement.shards] == [16 * GB, 16 * GB, 8 * GB, 8 * GB]


def test_a_memory_limit_lowers_what_a_host_gets_and_never_raises_it() -> None:
    limited = HostCapacity(name="a", slots=1, usable_memory_bytes=64 * GB, memory_limit_bytes=8 * GB)
    raised = HostCapacity(name="b", slots=1, usable_memory_bytes=16 * GB, memory_limit_bytes=64 * GB)
    placement = plan_placement(footprint(), [limited, raised], PIPELINE)
    assert [shard.memory_limit_bytes for shard in placement.shards] == [8 * GB, 16 * GB]
    assert [end - start for start, end in stages(placement)] == [10, 20]


def test_the_first_stage_pays_for_the_embedding_and_the_last_for_norm_head_and_tied_embedding() -> None:
    tied = plan_placement(footprint(), hosts(16 * GB, 16 * GB, 16 * GB), PIPELINE)
    assert [shard.weights_bytes for shard in tied.shards] == [
        10 * 14 * MB + 113 * MB + 2304,
        10 * 14 * MB,
        10 * 14 * MB + 113 * MB,
    ]
    untied = plan_placement(
        footprint(tied=False, head_bytes=120 * MB), hosts(16 * GB, 16 * GB, 16 * GB), PIPELINE
    )
    assert [shard.weights_bytes for shard in untied.shards] == [260 * MB, 140 * MB, 253 * MB]


def test_pinned_layers_are_kept_and_the_rest_follows_memory() -> None:
    placement = plan_placement(footprint(), hosts(16 * GB, 16 * GB, 16 * GB, layers=(0, 20, 0)), AUTO)
    assert stages(placement) == [(25, 30), (5, 25), (0, 5)]


def test_only_legal_cuts_are_used() -> None:
    placement = plan_placement(footprint(legal_cuts=(4, 20, 21)), hosts(16 * GB, 16 * GB), PIPELINE)
    assert stages(placement) == [(20, 30), (0, 20)]


def test_a_rank_gets_fewer_layers_than_its_share_when_it_would_not_fit() -> None:
    # Rank 0 also holds a head of 4 GB, so it cannot take half of the 10 GB of layers.
    model = footprint(num_layers=10, layer_bytes=GB, embedding_bytes=0, head_bytes=4 * GB, tied=False)
    placement = plan_placement(model, hosts(8 * GB, 8 * GB), PIPELINE)
    assert [end - start for start, end in stages(placement)] == [3, 7]


def test_one_layer_per_rank_is_the_finest_pipeline() -> None:
    placement = plan_placement(footprint(num_layers=4), hosts(*[GB] * 4), PIPELINE)
    assert stages(placement) == [(3, 4), (2, 3), (1, 2), (0, 1)]


def test_more_ranks_than_layers_names_both_numbers_and_the_most_ranks() -> None:
    with pytest.raises(PlacementError, match=r"has 4 layers and the hosts have 5 ranks. Use at most 4 ranks"):
        plan_placement(footprint(num_layers=4), hosts(*[GB] * 5), PIPELINE)


def test_more_ranks_than_legal_cuts_allow_names_the_cuts_and_the_reason() -> None:
    model = footprint(legal_cuts=(4,), cut_reason="layers 4 to 29 share one KV cache")
    with pytest.raises(PlacementError) as caught:
        plan_placement(model, hosts(*[GB] * 3), PIPELINE)
    assert "at most 2 stages" in str(caught.value)
    assert "layers 4 to 29 share one KV cache" in str(caught.value)
    assert "before layer 4." in str(caught.value)


def test_each_slot_of_a_host_can_have_its_own_number_of_layers() -> None:
    one = HostCapacity(name="a", slots=3, usable_memory_bytes=48 * GB, layers=(12, 10, 8))
    shards = plan_placement(footprint(), [one], AUTO).shards
    assert [s.end_layer - s.start_layer for s in shards] == [12, 10, 8]
    short = msgspec.structs.replace(one, layers=(12, 18))
    with pytest.raises(PlacementError, match=r"has 3 slots pinned to \[12, 18\] layers"):
        plan_placement(footprint(), [short], AUTO)


def test_pinned_layers_that_do_not_add_up_say_the_sum_and_the_difference() -> None:
    with pytest.raises(PlacementError, match=r"add up to 28, but the model has 30 .*mac1.*: 20.*by \+2"):
        plan_placement(footprint(), hosts(GB, GB, layers=(20, 8)), AUTO)
    with pytest.raises(PlacementError, match=r"by -3"):
        plan_placement(footprint(), hosts(GB, GB, layers=(20, 13)), AUTO)


def test_pinned_layers_that_leave_nothing_for_the_others_say_the_most_that_can_be_pinned() -> None:
    with pytest.raises(PlacementError, match=r"take 30 of 30 .* leaves 0 for 1 more.* at most 29"):
        plan_placement(footprint(), hosts(GB, GB, layers=(30, 0)), AUTO)


def test_pinned_layers_that_need_an_illegal_cut_say_which_cuts_are_legal() -> None:
    with pytest.raises(PlacementError, match=r"not legal .*before layer 10, 20"):
        plan_placement(footprint(legal_cuts=(10, 20)), hosts(GB, GB, layers=(15, 0)), PIPELINE)


def test_a_model_that_does_not_fit_names_the_rank_the_host_and_the_missing_bytes() -> None:
    model = footprint(num_layers=10, layer_bytes=GB, embedding_bytes=0, head_bytes=0)
    with pytest.raises(PlacementError) as caught:
        plan_placement(model, hosts(6 * GB, 2 * GB), PIPELINE)
    message = str(caught.value)
    assert "Rank 0 on mac1 needs" in message or "Rank 1 on mac2 needs" in message
    assert "are missing" in message
    assert "may use 8.0 GB" in message
    assert "add a host" in message


def test_a_context_that_would_fit_is_suggested() -> None:
    model = footprint(kv_bytes=10_000, context_length=65536)
    request = asked(Sharding.PIPELINE, context_tokens=32768, num_sequences=1)
    with pytest.raises(PlacementError, match="would fit with a planned context of 16384 tokens"):
        plan_placement(model, hosts(5 * GB, 5 * GB), request)
    smaller = asked(Sharding.PIPELINE, context_tokens=16384, num_sequences=1)
    assert plan_placement(model, hosts(5 * GB, 5 * GB), smaller).world_size == 2


def test_kv_is_planned_for_the_models_context_at_most_and_for_a_window_at_most() -> None:
    whole = ModelMemory.for_request(footprint(context_length=1000), asked(Sharding.AUTO, 4096, 2))
    assert whole.stage(0, 30).kv == 30 * 1536 * 1000 * 2
    window = ModelMemory.for_request(footprint(kv_window=128), asked(Sharding.AUTO, 4096, 2))
    assert window.stage(0, 30).kv == 30 * 1536 * 128 * 2


# ---------------------------------------------------------------- tensor


def test_tensor_gives_equal_weights_to_hosts_that_fit() -> None:
    placement = plan_placement(footprint(), hosts(16 * GB, 64 * GB), TENSOR)
    assert [shard.weight for shard in placement.shards] == [1, 1]
    assert stages(placement) == [(0, 30), (0, 30)]
    # 2 of 3 KV groups on rank 0; the MLP in halves; embedding and norm on both.
    assert placement.shards[0].weights_bytes == 113 * MB + 2304 + 70 * MB + 157_500_000
    assert [shard.kv_bytes_per_token for shard in placement.shards] == [30 * 1024, 30 * 512]


def test_tensor_weights_follow_memory_when_equal_ones_do_not_fit() -> None:
    model = footprint(num_layers=10, layer_bytes=GB, embedding_bytes=0, head_bytes=0, attention_units=8)
    placement = plan_placement(model, hosts(12 * GB, 4 * GB), TENSOR)
    assert [shard.weight for shard in placement.shards] == [2, 1]  # the least uneven that fits


def test_three_kv_groups_over_four_ranks_are_refused_with_the_valid_numbers() -> None:
    with pytest.raises(PlacementError) as caught:
        plan_placement(footprint(), hosts(*[GB] * 4), TENSOR)
    message = str(caught.value)
    assert "3 KV groups cannot be divided over 4 ranks" in message
    assert "2 or 3 ranks" in message
    assert "pipeline works with up to 30 ranks" in message


def test_a_model_whose_rules_do_not_know_tensor_says_why() -> None:
    with pytest.raises(PlacementError, match="mamba mixers cannot be divided"):
        plan_placement(footprint(tensor_reason="mamba mixers cannot be divided"), hosts(GB, GB), TENSOR)


def test_pinned_layers_are_refused_for_tensor() -> None:
    with pytest.raises(PlacementError, match=r"`layers` pins a pipeline stage.*mac1, mac2"):
        plan_placement(footprint(), hosts(GB, GB, layers=(15, 15)), TENSOR)


def test_tensor_that_does_not_fit_names_each_short_host() -> None:
    model = footprint(num_layers=10, layer_bytes=GB, embedding_bytes=3 * GB)
    with pytest.raises(PlacementError, match=r"Rank 0 on mac1 needs[^\n]*missing"):
        plan_placement(model, hosts(4 * GB, 4 * GB), TENSOR)


# ---------------------------------------------------------------- auto and one rank


def test_one_rank_needs_no_sharding() -> None:
    placement = plan_placement(footprint(), hosts(16 * GB), AUTO)
    assert placement.sharding is Sharding.NONE
    assert stages(placement) == [(0, 30)]
    assert placement.shards[0].weights_bytes == footprint().weights_bytes


@pytest.mark.parametrize("sharding", [Sharding.PIPELINE, Sharding.TENSOR])
def test_one_rank_cannot_be_sharded(sharding: Sharding) -> None:
    with pytest.raises(PlacementError, match="needs at least two ranks"):
        plan_placement(footprint(), hosts(GB), asked(sharding))


def test_several_ranks_cannot_go_unsharded() -> None:
    with pytest.raises(PlacementError, match="the hosts have 2"):
        plan_placement(footprint(), hosts(GB, GB), asked(Sharding.NONE))


def test_one_rank_that_is_too_small_says_what_is_missing() -> None:
    with pytest.raises(PlacementError, match=r"Rank 0 on mac1 needs 1\.6 GB .* are missing"):
        plan_placement(footprint(), hosts(GB), AUTO)


def test_one_pinned_rank_must_have_all_layers() -> None:
    assert plan_placement(footprint(), hosts(16 * GB, layers=(30,)), AUTO).world_size == 1
    with pytest.raises(PlacementError, match="pinned to 20 layers"):
        plan_placement(footprint(), hosts(16 * GB, layers=(20,)), AUTO)


def test_auto_takes_tensor_only_when_a_pipeline_is_impossible() -> None:
    uncuttable = footprint(legal_cuts=(), cut_reason="its layers are never called")
    placement = plan_placement(uncuttable, hosts(16 * GB, 16 * GB), AUTO)
    assert placement.sharding is Sharding.TENSOR
    assert "its layers are never called" in placement.reasons[0]
    assert plan_placement(footprint(), hosts(16 * GB, 16 * GB), AUTO).sharding is Sharding.PIPELINE


def test_auto_that_finds_neither_says_both_reasons() -> None:
    model = footprint(legal_cuts=(), cut_reason="its layers are never called")
    with pytest.raises(PlacementError) as caught:
        plan_placement(model, hosts(*[16 * GB] * 4), AUTO)
    assert "its layers are never called" in str(caught.value)
    assert "3 KV groups" in str(caught.value)


def test_auto_with_pinned_layers_never_turns_into_tensor() -> None:
    with pytest.raises(PlacementError, match="add up to 28"):
        plan_placement(footprint(), hosts(16 * GB, 16 * GB, layers=(14, 14)), AUTO)


def test_hosts_without_memory_or_slots_are_refused_by_name() -> None:
    with pytest.raises(PlacementError, match="no hosts"):
        plan_placement(footprint(), [], AUTO)
    with pytest.raises(PlacementError, match="mac1 offers no memory"):
        plan_placement(footprint(), hosts(0), AUTO)
    with pytest.raises(PlacementError, match="mac1 has 0 slots"):
        plan_placement(footprint(), hosts(GB, slots=0), AUTO)


def test_rows_for_the_table_agree_with_the_shards() -> None:
    for sharding in (Sharding.PIPELINE, Sharding.TENSOR):
        model, request = footprint(), asked(sharding)
        placement = plan_placement(model, hosts(16 * GB, 16 * GB), request)
        rows = plan_rows(placement, model, request)
        assert [row.weights_bytes for row in rows] == [shard.weights_bytes for shard in placement.shards]
        for row in rows:
            used = row.weights_bytes + row.kv_bytes + row.working_bytes
            assert row.margin_bytes == 16 * GB - used
    assert [row.part for row in rows] == ["2 of 3 KV groups", "1 of 3 KV groups"]
    pipeline = plan_placement(model, hosts(16 * GB, 16 * GB), PIPELINE)
    assert [row.part for row in plan_rows(pipeline, model, PIPELINE)] == ["layers 15-29", "layers 0-14"]


# ---------------------------------------------------------------- properties


@given(
    num_units=st.integers(1, 60),
    weights=st.lists(st.integers(1, 50), min_size=1, max_size=8),
)
def test_units_are_all_given_at_least_one_each_and_never_a_whole_unit_from_the_ideal(
    num_units: int, weights: list[int]
) -> None:
    if num_units < len(weights):
        with pytest.raises(PlacementError):
            split_units(num_units, weights)
        return
    shares = split_units(num_units, weights)
    assert sum(shares) == num_units
    assert min(shares) >= 1
    ideal = [num_units * weight / sum(weights) for weight in weights]
    for share, exact in zip(shares, ideal, strict=True):
        assert share == 1 or share < exact + 1
        if min(ideal) >= 1:
            assert abs(share - exact) < 1
    for (a, share_a), (b, share_b) in itertools.combinations(zip(weights, shares, strict=True), 2):
        if a > b:
            assert share_a >= share_b
        if a == b:
            assert share_a >= share_b  # of equals the lower rank has the odd unit


sizes = st.integers(1, 40).map(lambda n: n * 100 * MB)


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[ModelFootprint, list[HostCapacity], PlacementRequest]:
    num_layers = draw(st.integers(2, 7))
    layers = tuple(
        LayerFootprint(weights_bytes=draw(sizes), kv_bytes_per_token=draw(st.integers(0, 2000)))
        for _ in range(num_layers)
    )
    cuts = draw(st.sets(st.integers(1, num_layers - 1)))
    model = ModelFootprint(
        model_type="any",
        model_digest="d",
        num_layers=num_layers,
        layers=layers,
        embedding_bytes=draw(sizes),
        head_bytes=draw(sizes),
        tied_embedding=draw(st.booleans()),
        legal_cuts=tuple(cuts),
        cut_reason="",
        hidden_bytes_per_token=1,
        context_length=0,
        vocab_size=10,
        tensor=TensorFootprint(
            attention_units=0, attention_bytes=0, mlp_units=0, mlp_bytes=0, replicated_bytes=0, reason="none"
        ),
    )
    pins = st.one_of(st.just(0), st.integers(1, num_layers))
    machines = [
        HostCapacity(
            name=f"h{i}",
            slots=1,
            usable_memory_bytes=draw(st.integers(1, 30)) * 500 * MB,
            layers=(pin,) if (pin := draw(pins)) else (),
        )
        for i in range(draw(st.integers(2, 4)))
    ]
    request = asked(Sharding.PIPELINE, draw(st.integers(1, 10)) * 512, draw(st.integers(1, 4)))
    return model, machines, request


def every_division(
    model: ModelFootprint, machines: list[HostCapacity], request: PlacementRequest
) -> list[tuple[tuple[int, ...], int]]:
    """All divisions that keep the pins and the memory, each with the share of its most loaded rank."""
    memory = ModelMemory.for_request(model, request)
    found = []
    for cuts in itertools.combinations(sorted(model.legal_cuts), len(machines) - 1):
        limits = (0, *cuts, model.num_layers)
        worst, allowed = 0, True
        for stage, (start, end) in enumerate(itertools.pairwise(limits)):
            machine = machines[len(machines) - 1 - stage]
            fits = memory.stage(start, end).total <= machine.usable_memory_bytes
            allowed &= fits and (machine.layers in ((), (end - start,)))
            share = sum(layer.weights_bytes for layer in model.layers[start:end])
            worst = max(worst, share * 1_000_000 // machine.usable_memory_bytes)
        if allowed:
            found.append((limits, worst))
    return found


@settings(max_examples=300)
@given(case=small_cases())
def test_a_pipeline_is_found_exactly_when_there_is_one_and_its_worst_share_is_the_least(
    case: tuple[ModelFootprint, list[HostCapacity], PlacementRequest],
) -> None:
    divisions = every_division(*case)
    try:
        placement = plan_placement(*case)
    except PlacementError as error:
        assert not divisions
        assert str(error).endswith((".", ")"))
        return
    limits = (0, *(shard.end_layer for shard in reversed(placement.shards)))
    worst = dict(divisions)
    assert worst[limits] == min(worst.values())
    assert plan_placement(*case) == placement
    for row in plan_rows(placement, case[0], case[2]):
        assert row.margin_bytes >= 0


@settings(max_examples=100, deadline=None)
@given(
    groups=st.integers(1, 8),
    memory=st.lists(st.integers(1, 40).map(lambda n: n * GB), min_size=2, max_size=4),
)
def test_tensor_plans_fit_and_hold_every_unit_once(groups: int, memory: list[int]) -> None:
    model = footprint(num_layers=10, layer_bytes=GB, attention_units=groups)
    try:
        placement = plan_placement(model, hosts(*memory), TENSOR)
    except PlacementError:
        return
    rows = plan_rows(placement, model, TENSOR)
    assert all(row.margin_bytes >= 0 for row in rows)
    held = sum(shard.weights_bytes - model.tensor.replicated_bytes for shard in placement.shards)
    total = model.tensor.attention_bytes + model.tensor.mlp_bytes
    assert total <= held <= total + 2 * len(memory)  # a byte of rounding per part and rank
    assert all(row.working_bytes >= WORKING_BASE_BYTES for row in rows)
