"""Embeddings and output heads are divided by vocabulary, and the leader gets the logits of one process."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mesh.mesh.footprint import WORTH_DIVIDING
from mlx_mesh.node.engine import certificate, vocabulary
from mlx_mesh.node.engine.certificate import certify
from mlx_mesh.node.engine.exchanges import RingExchange
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.probe import divisible_units, take_ranges
from mlx_mesh.node.engine.shard import shard_model
from mlx_mesh.node.engine.tensor import divide_layer
from mlx_mesh.node.engine.trace import trace_model

SHORT = {"num_hidden_layers": 1}
QUANTISED = {"quantization": {"group_size": 32, "bits": 4}, "head_dim": 32}


def _run(
    tiny: ModuleType, simulator: ModuleType, config: dict[str, Any], weights: list[int]
) -> tuple[float, list[Any]]:
    reference = tiny.forward(tiny.build(config).model, 1)
    placement = tiny.slices(len(tiny.build(config).layers), weights)

    def body(rank: int, exchange: Any) -> Any:
        shard = shard_model(tiny.build(config), placement, rank, exchange, tiny.ignore_progress)
        return tiny.forward(shard.model, 1), shard

    results = simulator.Simulator(len(weights)).run(body)
    return float(tiny.gap(results[0][0], reference)), [shard for _, shard in results]


@pytest.mark.parametrize("weights", [[1, 1], [2, 1, 1]], ids=str)
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("changes", [{}, QUANTISED], ids=["plain", "4bit"])
def test_the_rows_of_all_ranks_are_the_vocabulary_and_the_leader_has_all_logits(
    tiny: ModuleType, simulator: ModuleType, weights: list[int], tied: bool, changes: dict[str, Any]
) -> None:
    config = tiny.llama(**SHORT, **changes, tie_word_embeddings=tied)
    gap, shards = _run(tiny, simulator, config, weights)
    assert gap < 1e-4
    rows = [shard.model.model.embed_tokens["weight"].shape[0] for shard in shards]
    assert rows == {2: [51, 50], 3: [51, 25, 25]}[len(weights)]
    if not tied:
        assert [shard.model.lm_head["weight"].shape[0] for shard in shards] == rows


def test_a_gathered_head_gives_the_same_numbers_as_a_whole_one(
    tiny: ModuleType, simulator: ModuleType
) -> None:
    """Lookups and heads alone change no bit: each row is computed by one rank, as it would be by all."""
    lazy = tiny.build(tiny.llama(**SHORT))
    units = vocabulary.vocabulary_units(lazy, trace_model(lazy.model))
    tokens, x = mx.array([[0, 50, 51, 100]]), mx.random.normal((1, 3, 96), key=mx.random.key(3))

    def body(rank: int, exchange: Any) -> Any:
        model = tiny.build(tiny.llama(**SHORT)).model
        divide_layer(model, "", units, [1, 1], exchange, lambda _, *part: take_ranges(*part))
        return model.model.embed_tokens(tokens), model.model.embed_tokens.as_linear(x)

    whole = lazy.model.model.embed_tokens
    for looked_up, logits in simulator.Simulator(2).run(body):
        assert mx.array_equal(looked_up, whole(tokens)).item()
        assert logits.shape == (1, 3, 101) and mx.allclose(logits, whole.as_linear(x), atol=1e-5).item()


def test_what_is_under_a_hundredth_of_the_model_stays_whole(tiny: ModuleType) -> None:
    for size, is_divided in ((101, True), (3, False)):
        lazy = tiny.build(tiny.llama(vocab_size=size))
        footprint = measure(lazy, "")
        assert (footprint.embedding_bytes * WORTH_DIVIDING >= footprint.weights_bytes) == is_divided
        assert bool(footprint.tensor.vocabulary_bytes) == is_divided
        assert bool(divisible_units(lazy, trace_model(lazy.model)).vocabulary) == is_divided
        assert footprint.tensor.logits_bytes == (404 if is_divided else 0)


def test_a_whole_untied_head_is_the_leaders_alone(tiny: ModuleType, simulator: ModuleType) -> None:
    config = tiny.llama(vocab_size=3, tie_word_embeddings=False)
    lazy = tiny.build(config)
    tensor = measure(lazy, "").tensor
    assert tensor.leader_bytes == (3 * 96 + 96) * 4  # the head and the norm before it
    placement = tiny.slices(6, [2, 1])

    def body(rank: int, exchange: Any) -> Any:
        return shard_model(tiny.build(config), placement, rank, exchange, tiny.ignore_progress).weights_bytes

    assert simulator.Simulator(2).run(body) == [tensor.weights_bytes([2, 1], rank) for rank in range(2)]


def test_a_division_by_vocabulary_that_changes_logits_is_dropped(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = tiny.build(tiny.llama(**SHORT))
    trace = trace_model(lazy.model)
    assert [unit.path for unit in certify(lazy, trace, tmp_path / "right").vocabulary] == [
        "model.embed_tokens"
    ]
    monkeypatch.setattr(vocabulary._Lookup, "as_linear", lambda self, x: self["weight"][0, 0] + 0 * x)
    made = certify(lazy, trace, tmp_path / "wrong")
    assert not made.vocabulary and len(made.units) == 2
    assert "by vocabulary the whole model differs" in made.note
    assert certificate.certify(lazy, trace, tmp_path / "wrong") == made


def test_logits_that_nobody_needs_are_never_gathered() -> None:
    """A prefill's logits are dropped; the operations after it must not wait for them."""

    class Group:
        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 1

    exchange = RingExchange(Group())
    summed = mx.zeros((2,))
    exchange._note(summed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.distributed, "all_gather", lambda x, **_: x)
        gathered = exchange.all_gather(mx.ones((3,)))
    assert gathered.shape == (1, 3)
    assert exchange._before == [summed]
