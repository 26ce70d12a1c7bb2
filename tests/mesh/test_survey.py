"""The survey of ways to place a model: every row, the recommendation, and what is said when nothing fits."""

from __future__ import annotations

import msgspec

from mlx_mesh.mesh.capacity import HostCapacity, PlacementRequest
from mlx_mesh.mesh.footprint import LayerFootprint, ModelFootprint, TensorFootprint
from mlx_mesh.mesh.links import LINKS
from mlx_mesh.mesh.measurements import (
    HostMeasurement,
    LinkMeasurement,
    Measurements,
    host_key,
    link_key,
    rates_of,
    slowest_link,
)
from mlx_mesh.mesh.survey import Survey, hosts_that_hold_all, survey
from mlx_mesh.mesh.tensor_units import DividedBytes, Division, Segment
from mlx_mesh.mesh.types import Backend, HostFacts, Sharding, Versions

GB = 10**9


def model(layer_bytes: int = GB, groups: int = 8) -> ModelFootprint:
    layer = LayerFootprint(weights_bytes=layer_bytes, kv_bytes_per_token=4096)
    return ModelFootprint(
        model_type="llama",
        model_digest="d",
        num_layers=40,
        layers=(layer,) * 40,
        embedding_bytes=GB,
        head_bytes=GB,
        tied_embedding=False,
        legal_cuts=tuple(range(1, 40)),
        cut_reason="",
        hidden_bytes_per_token=16384,
        context_length=32768,
        vocab_size=1000,
        tensor=TensorFootprint(
            attention_units=groups,
            attention_bytes=10 * layer_bytes,
            mlp_units=128,
            mlp_bytes=30 * layer_bytes,
            replicated_bytes=2 * GB,
        ),
    )


def hosts(*memory_gb: int, rate: int = 0) -> list[HostCapacity]:
    return [
        HostCapacity(
            name=f"mac{i + 1}",
            slots=1,
            usable_memory_bytes=size * GB,
            memory_rate=rate,
            matrix_rate=rate * 20,
        )
        for i, size in enumerate(memory_gb)
    ]


def ways(found: Survey) -> list[tuple[int, str, bool]]:
    return [(len(o.hosts), str(o.sharding), o.is_possible) for o in found.options]


def test_each_number_of_hosts_has_a_row_for_pipeline_and_for_tensor() -> None:
    found = survey(model(), hosts(20, 20, 20), PlacementRequest())
    assert ways(found) == [
        (1, "none", False),
        (2, "pipeline", False),
        (2, "tensor", False),
        (3, "pipeline", True),
        (3, "tensor", True),
    ]
    assert all(option.reason for option in found.options)
    assert "missing" in found.options[1].reason


def test_the_blocking_number_is_in_the_row() -> None:
    found = survey(model(groups=2), hosts(64, 64, 64), PlacementRequest())
    tensor = found.options[-1]
    assert tensor.num_ranks == 3 and not tensor.is_possible
    assert "2 KV groups cannot be divided over 3 ranks" in tensor.reason


def test_a_model_that_fits_on_one_host_is_recommended_there() -> None:
    found = survey(model(), hosts(64, 32), PlacementRequest())
    assert found.recommendation == "it fits on one host: use mac1 alone"
    assert found.options[found.recommended].rows[0].part == "all layers"
    assert hosts_that_hold_all(model(), hosts(32, 64), PlacementRequest()) == ["mac2"]


def test_a_faster_way_than_one_host_is_named_beside_it() -> None:
    request = PlacementRequest(link=LINKS["thunderbolt5-rdma"])
    found = survey(model(), hosts(64, 64, rate=300 * GB), request)
    assert found.recommendation.startswith("it fits on one host")
    assert "tensor over mac1, mac2 is predicted to be 1." in found.recommendation


def test_the_fastest_that_fits_is_recommended_when_speeds_are_known() -> None:
    request = PlacementRequest(link=LINKS["thunderbolt5-rdma"])
    found = survey(model(), hosts(32, 32, 32, 32, rate=300 * GB), request)
    best = found.options[found.recommended]
    assert best.sharding is Sharding.TENSOR and best.num_ranks == 4
    assert best.decode_tokens_per_s == max(option.decode_tokens_per_s for option in found.options)
    assert "tensor is faster" in found.recommendation
    slow = survey(model(), hosts(32, 32, 32, rate=300 * GB), PlacementRequest(link=LINKS["wifi"]))
    assert slow.options[slow.recommended].sharding is Sharding.PIPELINE
    assert slow.options[slow.recommended].num_ranks == 2  # each more host costs another hop


def test_without_speeds_the_fewest_hosts_are_recommended() -> None:
    found = survey(model(), hosts(32, 32, 32), PlacementRequest())
    best = found.options[found.recommended]
    assert (best.num_ranks, best.sharding) == (2, Sharding.PIPELINE)
    assert "no speed is predicted" in found.recommendation


def test_when_nothing_fits_the_number_of_missing_hosts_and_bytes_are_told() -> None:
    found = survey(model(), hosts(16), PlacementRequest())
    assert found.recommended == -1
    assert (
        "nothing fits. 2 more hosts with 16.0 GB of usable memory like mac1 would do" in found.recommendation
    )
    assert "are missing" in found.recommendation and not found.recommendation.endswith(".")
    hopeless = survey(model(layer_bytes=40 * GB), hosts(16), PlacementRequest())
    assert "more hosts like mac1 do not help" in hopeless.recommendation


def test_a_context_beyond_the_models_own_is_said() -> None:
    found = survey(model(), hosts(64), PlacementRequest(context_tokens=10**6))
    assert found.context_tokens == 32768
    assert any("own context is 32768" in note for note in found.notes)


# ---------------------------------------------------------------- measurements


def facts(name: str, chip: str) -> HostFacts:
    versions = Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3.12")
    return HostFacts(
        hostname=name,
        system="Darwin",
        machine="arm64",
        chip=chip,
        memory_bytes=64 * GB,
        usable_memory_bytes=48 * GB,
        addresses=(),
        versions=versions,
    )


def test_a_measured_rate_wins_over_the_table_and_an_unknown_chip_is_said() -> None:
    mac, odd = facts("a", "Apple M3 Ultra"), facts("b", "Apple M99")
    assert rates_of(mac, Measurements()).memory_rate == 819 * 9 * GB // 10
    assert "'Apple M99' is not in the table" in rates_of(odd, Measurements()).note
    measured = Measurements(hosts={host_key(mac): HostMeasurement(memory_rate=5, matrix_rate=6)})
    assert (rates_of(mac, measured).memory_rate, rates_of(mac, measured).matrix_rate) == (5, 6)
    assert rates_of(odd, measured).memory_rate == 0


def test_the_slowest_measured_link_counts_and_one_missing_pair_makes_it_unknown() -> None:
    a, b, c = facts("a", ""), facts("b", ""), facts("c", "")
    links = {
        link_key(a, b): LinkMeasurement(rtt_ns=100, bandwidth=50),
        link_key(c, a): LinkMeasurement(rtt_ns=300, bandwidth=90),
    }
    assert slowest_link([a, b, c], Measurements(links=links), Backend.AUTO) is None
    links[link_key(b, c)] = LinkMeasurement(rtt_ns=200, bandwidth=70)
    link = slowest_link([a, b, c], Measurements(links=links), Backend.AUTO)
    assert link is not None and (link.rtt_ns, link.bandwidth, link.is_measured) == (300, 50, True)
    assert slowest_link([a, b], Measurements(), Backend.JACCL) == LINKS["thunderbolt5-rdma"]


def test_newer_measurements_replace_older_ones_of_the_same_host() -> None:
    old = Measurements(hosts={"a": HostMeasurement(memory_rate=1, matrix_rate=1)})
    new = Measurements(hosts={"a": HostMeasurement(memory_rate=2, matrix_rate=2)})
    assert old.merged(new).hosts["a"].memory_rate == 2


def test_the_rule_for_the_vocabulary_is_said_with_its_numbers() -> None:
    def notes(vocabulary_bytes: int) -> str:
        halves = Division(tuple(range(101)))
        divided = (DividedBytes(halves, (Segment(100, 1),), 40 * GB // 100),)
        plain = model()
        tensor = msgspec.structs.replace(
            plain.tensor, divided=divided, vocabulary_bytes=vocabulary_bytes, logits_bytes=256_000
        )
        footprint = msgspec.structs.replace(plain, tensor=tensor)
        return " ".join(survey(footprint, hosts(64, 64), PlacementRequest()).notes)

    assert "2.0 GB of embedding and output head (4.8 % of the model) are divided" in notes(2 * GB)
    assert "from 1 % of the model on; the leader gathers 0.3 MB of logits a token" in notes(2 * GB)
    assert "embedding and output head stay whole" in notes(0)
