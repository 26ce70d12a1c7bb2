"""Predicted times, and that plans are as good as any other by their own measure."""

from __future__ import annotations

import itertools
import time

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mlx_mesh.mesh.capacity import (
    HostCapacity,
    PlacementRequest,
    mac_usable_bytes,
    ranks_of,
    wired_limit_advice,
)
from mlx_mesh.mesh.chips import CHIPS, find_chip
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint, TensorFootprint
from mlx_mesh.mesh.links import LINKS, Link
from mlx_mesh.mesh.memory import ModelMemory
from mlx_mesh.mesh.pipeline_plan import fits_as_pipeline
from mlx_mesh.mesh.placement import plan_placement, predict
from mlx_mesh.mesh.speed import PipelineSpeed, TensorSpeed
from mlx_mesh.mesh.tensor_plan import fits_by_tensor, tensor_needs
from mlx_mesh.mesh.types import Placement, Sharding

GB = 10**9


def model(
    num_layers: int,
    layer_bytes: int,
    *,
    active_bytes: int = 0,
    active_parameters: int = 0,
    hidden_bytes: int = 16384,
    head_bytes: int = GB,
    kv_bytes: int = 4096,
    sizes: tuple[int, ...] = (),
    groups: int = 8,
    legal_cuts: tuple[int, ...] | None = None,
) -> ModelFootprint:
    layers = tuple(
        LayerFootprint(
            weights_bytes=size,
            kv_bytes_per_token=kv_bytes,
            active_bytes=active_bytes,
            active_parameters=active_parameters,
        )
        for size in sizes or (layer_bytes,) * num_layers
    )
    total = sum(layer.weights_bytes for layer in layers)
    return ModelFootprint(
        model_type="any",
        model_digest="d",
        num_layers=len(layers),
        layers=layers,
        embedding_bytes=head_bytes,
        head_bytes=head_bytes,
        tied_embedding=False,
        legal_cuts=tuple(range(1, len(layers))) if legal_cuts is None else legal_cuts,
        cut_reason="",
        hidden_bytes_per_token=hidden_bytes,
        context_length=0,
        vocab_size=1000,
        tensor=TensorFootprint(
            attention_units=groups,
            attention_bytes=total // 10,
            mlp_units=groups * 16,
            mlp_bytes=total - total // 10,
            replicated_bytes=2 * head_bytes,
        ),
    )


def mac(name: str, chip: str, memory_gb: int, memory_limit_bytes: int = 0) -> HostCapacity:
    found = find_chip(chip)
    assert found is not None
    return HostCapacity(
        name=name,
        slots=1,
        usable_memory_bytes=mac_usable_bytes(memory_gb * 2**30),
        memory_rate=found.memory_rate,
        matrix_rate=found.matrix_rate,
        memory_limit_bytes=memory_limit_bytes,
    )


def layers_per_rank(placement: Placement) -> list[int]:
    return [shard.end_layer - shard.start_layer for shard in placement.shards]


# ---------------------------------------------------------------- the tables


def test_a_chip_is_found_by_its_brand_string_and_the_smaller_bin_is_said_aloud() -> None:
    chip = find_chip("Apple M4 Max")
    assert chip is not None and chip.memory_rate == 410 * GB * 9 // 10
    assert "40 GPU cores, 546 GB/s" in chip.note
    full = find_chip("M4 Max 40-core")
    assert full is not None and full.memory_rate == 546 * GB * 9 // 10 and full.note == ""
    ultra = find_chip("Apple M3 Ultra")
    assert ultra is not None and ultra.name == "M3 Ultra"


@pytest.mark.parametrize("text", ["", "AMD EPYC 7763", "Apple M4 Ultra", "Apple M17", "Apple A18 Pro"])
def test_an_unknown_chip_is_unknown(text: str) -> None:
    assert find_chip(text) is None


def test_bins_are_in_order_so_that_the_first_is_the_smaller() -> None:
    for bins in CHIPS.values():
        assert list(bins) == sorted(bins, key=lambda entry: entry.gb_per_s)
        assert len(bins) == 1 or all(entry.gpu_cores for entry in bins)


def test_a_ring_pays_for_each_rank_and_rdma_does_not() -> None:
    assert LINKS["ethernet10g"].small_sum_ns(4) == 3 * LINKS["ethernet10g"].rtt_ns
    assert LINKS["thunderbolt5-rdma"].small_sum_ns(4) == LINKS["thunderbolt5-rdma"].small_sum_ns(2)


# ---------------------------------------------------------------- against published figures

# Qwen3 235B A22B with 8 bits and DeepSeek V3.1 (37B active) with 4 bits, on M3 Ultras with RDMA, in tokens/s.
PUBLISHED = [
    (model(94, 2_650_000_000, active_bytes=249_000_000, hidden_bytes=8192), {1: 19.5, 2: 26.2, 4: 31.9}),
    (model(61, 6_200_000_000, active_bytes=346_000_000, hidden_bytes=14336), {1: 21.1, 2: 27.8, 4: 32.5}),
]


@pytest.mark.parametrize(("footprint", "figures"), PUBLISHED, ids=["qwen3-235b", "deepseek-v3.1"])
def test_predictions_are_near_published_tensor_figures(
    footprint: ModelFootprint, figures: dict[int, float]
) -> None:
    for count, seen in figures.items():
        hosts = [mac(f"m{i}", "M3 Ultra", 512) for i in range(count)]
        request = PlacementRequest(
            sharding=Sharding.TENSOR if count > 1 else Sharding.AUTO,
            context_tokens=1024,
            link=LINKS["thunderbolt5-rdma"],
        )
        predicted = predict(plan_placement(footprint, hosts, request), footprint, hosts, request)
        assert predicted is not None
        assert abs(predicted.decode_tokens_per_s / seen - 1) < 0.25, (count, predicted.decode_tokens_per_s)


# ---------------------------------------------------------------- which sharding


def chosen(link: str | None, chip: str = "M3 Ultra", footprint: ModelFootprint | None = None) -> Placement:
    hosts = [mac("a", chip, 512), mac("b", chip, 512)]
    request = PlacementRequest(link=LINKS[link] if link else None)
    return plan_placement(footprint or model(80, 1_760_000_000), hosts, request)


def test_tensor_is_chosen_where_its_sums_are_a_small_part_of_a_step() -> None:
    placement = chosen("thunderbolt5-rdma")
    assert placement.sharding is Sharding.TENSOR and "tensor is faster" in placement.reasons[0]


def test_pipeline_is_chosen_where_sums_would_eat_the_gain() -> None:
    for link in ("wifi", "ethernet1g", "thunderbolt5"):
        placement = chosen(link, footprint=model(48, 60_000_000))
        assert placement.sharding is Sharding.PIPELINE
        assert "pipeline is faster" in placement.reasons[0] and "for 96 sums over" in placement.reasons[0]


def test_an_unknown_link_or_chip_means_pipeline_and_is_said() -> None:
    assert chosen(None).sharding is Sharding.PIPELINE
    assert "link between the hosts is unknown" in chosen(None).reasons[0]
    hosts = [HostCapacity(name=n, slots=1, usable_memory_bytes=400 * GB) for n in "ab"]
    request = PlacementRequest(link=LINKS["thunderbolt5-rdma"])
    footprint = model(80, 1_760_000_000)
    placement = plan_placement(footprint, hosts, request)
    assert placement.sharding is Sharding.PIPELINE and "speed is unknown" in placement.reasons[0]
    assert predict(placement, footprint, hosts, request) is None


def test_two_ranks_of_one_host_gain_nothing_by_tensor() -> None:
    host = [HostCapacity(name="a", slots=2, usable_memory_bytes=400 * GB, memory_rate=700 * GB)]
    assert plan_placement(model(80, 2 * GB), host, PlacementRequest()).sharding is Sharding.PIPELINE


def test_the_faster_host_gets_more_than_its_memory_alone_would_give_it() -> None:
    footprint = model(60, GB)
    pair = [mac("fast", "M3 Ultra", 96), mac("slow", "M4", 96)]
    even = plan_placement(footprint, [mac("a", "M4", 96), mac("b", "M4", 96)], PlacementRequest())
    assert layers_per_rank(even) == [30, 30]
    fast, slow = layers_per_rank(plan_placement(footprint, pair, PlacementRequest()))
    assert fast > 55 and slow >= 1
    pinned = [mac("fast", "M3 Ultra", 96, memory_limit_bytes=30 * GB), mac("slow", "M4", 96)]
    fast, slow = layers_per_rank(plan_placement(footprint, pinned, PlacementRequest()))
    assert fast < 30  # the limit holds


def test_a_little_time_is_given_for_memory_that_is_used_evenly() -> None:
    pair = [mac("a", "M3 Ultra", 512), mac("b", "M2 Ultra", 512)]  # 819 and 800 GB/s
    first, second = layers_per_rank(plan_placement(model(60, GB), pair, PlacementRequest()))
    assert abs(first - second) <= 6


# ---------------------------------------------------------------- nothing beats the plan

LINK = Link(name="any", rtt_ns=50_000, bandwidth=5 * GB)
rates = st.sampled_from([60 * GB, 100 * GB, 250 * GB, 360 * GB, 720 * GB])


@st.composite
def unequal_hosts(draw: st.DrawFn, num_layers: int, num_hosts: int) -> list[HostCapacity]:
    """Some with two slots, a limit below their memory, or a pinned number of layers."""
    hosts = []
    for index in range(num_hosts):
        usable = draw(st.integers(6, 24)) * GB
        slots = draw(st.sampled_from([1, 1, 1, 2]))
        pinned = draw(st.sampled_from([0, 0, 0, 1, 2, num_layers // 2]))
        hosts.append(
            HostCapacity(
                name=f"h{index}",
                slots=slots,
                usable_memory_bytes=usable,
                layers=(pinned,) * slots if pinned else (),
                memory_limit_bytes=draw(st.sampled_from([0, 0, usable // 2, 2 * usable])),
                memory_rate=draw(rates),
                matrix_rate=draw(rates) * 50,
            )
        )
    return hosts


@st.composite
def pipeline_cases(draw: st.DrawFn) -> tuple[ModelFootprint, list[HostCapacity]]:
    sizes = tuple(draw(st.lists(st.integers(10**8, 3 * 10**9), min_size=4, max_size=11)))
    footprint = model(0, 0, sizes=sizes, head_bytes=10**8)
    forbidden = draw(st.sets(st.sampled_from(footprint.legal_cuts), max_size=3))
    cuts = tuple(cut for cut in footprint.legal_cuts if cut not in forbidden)
    hosts = draw(unequal_hosts(len(sizes), draw(st.integers(2, 4))))
    return msgspec.structs.replace(footprint, legal_cuts=cuts), hosts


@settings(max_examples=100, deadline=None)
@given(case=pipeline_cases())
def test_no_other_pipeline_split_is_five_percent_faster(
    case: tuple[ModelFootprint, list[HostCapacity]],
) -> None:
    footprint, hosts = case
    request = PlacementRequest(sharding=Sharding.PIPELINE, link=LINK)
    ranks = ranks_of(hosts)
    speed = PipelineSpeed.of(footprint, ranks, request)
    needs = ModelMemory.for_request(footprint, request)
    best: int | None = None
    for inner in itertools.combinations(footprint.legal_cuts, len(ranks) - 1):
        limits = list(itertools.pairwise((0, *inner, footprint.num_layers)))[::-1]
        if all(
            needs.stage(start, end).total <= rank.memory_bytes and rank.pinned_layers in (0, end - start)
            for (start, end), rank in zip(limits, ranks, strict=True)
        ):
            cost = sum(speed.stage_ns(rank, *pair) for rank, pair in enumerate(limits))
            best = cost if best is None else min(best, cost)
    assert fits_as_pipeline(footprint, ranks, request) == (best is not None)
    try:
        placement = plan_placement(footprint, hosts, request)
    except PlacementError:
        assert best is None
        return
    assert best is not None
    own = sum(speed.stage_ns(s.rank, s.start_layer, s.end_layer) for s in placement.shards)
    assert own <= best * 1.05
    assert plan_placement(footprint, hosts, request) == placement


def test_slots_of_one_machine_are_not_faster_than_it() -> None:
    footprint = model(20, 10**9, groups=8, head_bytes=10**8)
    found = {}
    for slots in (1, 2, 4):
        host = HostCapacity(
            name="one", slots=slots, usable_memory_bytes=200 * GB, memory_rate=10**11, matrix_rate=10**13
        )
        request = PlacementRequest(sharding=Sharding.PIPELINE if slots > 1 else Sharding.AUTO)
        placement = plan_placement(footprint, [host], request)
        predicted = predict(placement, footprint, [host], request)
        assert predicted is not None
        found[slots] = predicted
    assert found[1].prefill_ns <= found[2].prefill_ns <= found[4].prefill_ns
    assert found[1].decode_ns <= found[2].decode_ns <= found[4].decode_ns


@settings(max_examples=60, deadline=None)
@given(
    memory=st.lists(st.tuples(st.integers(8, 60), rates), min_size=2, max_size=3),
    link=st.sampled_from(sorted(LINKS)),
    sums=st.integers(20, 100),
    size=st.integers(10**8, 2 * 10**9),
)
def test_auto_is_never_five_percent_slower_than_either_sharding(
    memory: list[tuple[int, int]], link: str, sums: int, size: int
) -> None:
    plain = model(20, size, groups=8, head_bytes=10**8)
    tensor = msgspec.structs.replace(plain.tensor, sums_per_token=sums)
    footprint = msgspec.structs.replace(plain, tensor=tensor)
    hosts = [
        HostCapacity(name=f"h{i}", slots=1, usable_memory_bytes=gb * GB, memory_rate=rate)
        for i, (gb, rate) in enumerate(memory)
    ]
    times = {}
    for sharding in (Sharding.AUTO, Sharding.PIPELINE, Sharding.TENSOR):
        request = PlacementRequest(sharding=sharding, link=LINKS[link])
        try:
            placement = plan_placement(footprint, hosts, request)
        except PlacementError:
            continue
        predicted = predict(placement, footprint, hosts, request)
        assert predicted is not None
        times[sharding] = predicted.decode_ns
    assert (Sharding.AUTO in times) == bool(times)
    if times:
        assert times[Sharding.AUTO] <= min(times.values()) * 1.05


def test_the_sums_of_a_model_count_as_they_are() -> None:
    plain = model(20, GB)
    hosts = [mac("a", "M3 Ultra", 512), mac("b", "M3 Ultra", 512)]
    request = PlacementRequest(sharding=Sharding.TENSOR, link=LINKS["ethernet10g"])

    def sums_of(sums_per_token: int) -> int:
        tensor = msgspec.structs.replace(plain.tensor, sums_per_token=sums_per_token)
        footprint = msgspec.structs.replace(plain, tensor=tensor)
        predicted = predict(plan_placement(footprint, hosts, request), footprint, hosts, request)
        assert predicted is not None
        return predicted.exchange_ns

    assert sums_of(0) == sums_of(40)  # unknown: two a layer
    assert sums_of(100) - sums_of(60) == sums_of(60) - sums_of(20) > 0


@settings(max_examples=25, deadline=None)
@example(speeds=[720 * GB, 100 * GB, 100 * GB], memory=[9, 11, 29], groups=3)
@example(speeds=[100 * GB, 720 * GB, 100 * GB], memory=[8, 18, 8], groups=3)
@given(
    speeds=st.lists(rates, min_size=2, max_size=3),
    memory=st.lists(st.integers(8, 40), min_size=3, max_size=3),
    groups=st.integers(3, 9),
)
def test_no_other_tensor_split_is_five_percent_faster(
    speeds: list[int], memory: list[int], groups: int
) -> None:
    footprint = model(20, GB, groups=groups, head_bytes=10**8)
    hosts = [
        HostCapacity(name=f"h{i}", slots=1, usable_memory_bytes=memory[i] * GB, memory_rate=speed)
        for i, speed in enumerate(speeds)
    ]
    request = PlacementRequest(sharding=Sharding.TENSOR, link=LINK)
    ranks = ranks_of(hosts)
    speed = TensorSpeed.of(footprint, ranks, request)
    needs = ModelMemory.for_request(footprint, request)
    tries = itertools.product(range(1, 13), repeat=len(hosts))
    fitting = [
        speed.step_ns(weights)
        for weights in tries
        if all(n.total <= r.memory_bytes for n, r in zip(tensor_needs(needs, weights), ranks, strict=True))
    ]
    try:
        placement = plan_placement(footprint, hosts, request)
    except PlacementError:
        assert not fitting and not fits_by_tensor(footprint, ranks, request)
        return
    assert fits_by_tensor(footprint, ranks, request)
    own = speed.step_ns([shard.weight for shard in placement.shards])
    assert not fitting or own <= min(fitting) * 1.05


def test_a_divided_head_is_read_in_parts_and_its_logits_travel() -> None:
    whole = model(40, GB)
    tensor = whole.tensor
    on_leader = msgspec.structs.replace(tensor, replicated_bytes=GB, leader_bytes=GB)
    divided = msgspec.structs.replace(
        tensor,
        replicated_bytes=0,
        vocabulary_bytes=2 * GB,
        vocabulary_read_bytes=GB,
        num_lookups=1,
        logits_bytes=10**6,
    )
    ranks = ranks_of([mac("a", "M4 Max", 128), mac("b", "M4 Max", 128)])
    steps, sums = [], []
    for parts in (tensor, on_leader, divided):
        footprint = msgspec.structs.replace(whole, tensor=parts)
        speed = TensorSpeed.of(footprint, ranks, PlacementRequest(link=LINK))
        steps.append(speed.step_ns([1, 1]))
        sums.append(speed.sums_ns())
    half_a_head = GB // 2 * 10**9 // ranks[0].memory_rate
    assert steps[0] == steps[1] and abs(steps[0] - steps[2] - half_a_head) < 1000
    assert sums[0] == sums[1]
    gather = LINK.small_sum_ns(2) + 10**6 // 2 * 10**9 // LINK.bandwidth
    assert abs(sums[2] - sums[0] * 81 // 80 - gather) < 1000


def test_a_plan_for_eight_unequal_hosts_and_a_hundred_layers_takes_under_two_seconds() -> None:
    chips = ["M1 Max", "M2 Max", "M3 Max", "M4 Max", "M5 Max", "M2 Ultra", "M3 Ultra", "M4 Pro"]
    hosts = [mac(chip, chip, 64) for chip in chips]
    began = time.process_time()
    plan_placement(model(100, 2 * GB), hosts, PlacementRequest(link=LINKS["ethernet10g"]))
    assert time.process_time() - began < 2.0


def test_a_mac_that_gives_its_gpu_little_is_told_the_line_that_gives_more() -> None:
    memory = 64 * 2**30
    advice = wired_limit_advice("mac2", memory, mac_usable_bytes(memory))
    assert "sudo sysctl iogpu.wired_limit_mb=57344" in advice and advice.startswith("On mac2")
    assert wired_limit_advice("mac2", memory, mac_usable_bytes(memory, 57344)) == ""
