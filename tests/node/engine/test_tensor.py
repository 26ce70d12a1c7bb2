"""Tensor shares add up to what one process computes, also when they are not equal."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.node.engine.probe import divisible_units
from mlx_mesh.node.engine.rules_mixers import mixer_units
from mlx_mesh.node.engine.rules_mlp import mlp_units
from mlx_mesh.node.engine.shard import check_cuts, shard_model
from mlx_mesh.node.engine.trace import trace_model

TOLERANCE = 1e-4  # relative to the largest logit, float32

BIASED = {"attention_bias": True, "mlp_bias": True}
QUANTISED = {"quantization": {"group_size": 32, "bits": 4}}


def _run(
    tiny: ModuleType, simulator: ModuleType, config: dict[str, Any], weights: list[int]
) -> tuple[float, list[Any]]:
    reference = tiny.forward(tiny.build(config).model)
    placement = tiny.slices(len(tiny.build(config).layers), weights)
    shards: list[Any] = [None] * len(weights)

    def body(rank: int, exchange: Any) -> Any:
        shards[rank] = shard_model(tiny.build(config), placement, rank, exchange, tiny.ignore_progress)
        check_cuts(shards[rank], exchange)
        return tiny.forward(shards[rank].model)

    outputs = simulator.Simulator(len(weights)).run(body)[0]
    return float(tiny.gap(outputs, reference)), shards


@pytest.mark.parametrize(
    "changes", [{}, BIASED, QUANTISED | {"head_dim": 32}], ids=["plain", "biases", "4bit"]
)
@pytest.mark.parametrize("weights", [[1, 1], [2, 1], [1, 1, 1], [1, 5]])
def test_nine_heads_in_three_groups_divide_over_any_ranks(
    tiny: ModuleType, simulator: ModuleType, weights: list[int], changes: dict[str, Any]
) -> None:
    error, shards = _run(tiny, simulator, tiny.llama(**changes), weights)
    assert error < TOLERANCE
    heads = [shard.model.layers[0].self_attn.n_heads for shard in shards]
    assert sum(heads) == 9 and all(count % 3 == 0 and count > 0 for count in heads)
    assert not shards[0].whole_parts
    inner = [shard.model.layers[0].mlp.up_proj.weight.shape[0] for shard in shards]
    assert sum(inner) == 160


def test_two_equal_ranks_get_six_and_three_heads(tiny: ModuleType, simulator: ModuleType) -> None:
    _, shards = _run(tiny, simulator, tiny.llama(), [1, 1])
    attention = [shard.model.layers[0].self_attn for shard in shards]
    assert [(a.n_heads, a.n_kv_heads) for a in attention] == [(6, 2), (3, 1)]


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_the_qwen_family_divides(tiny: ModuleType, simulator: ModuleType, kind: str) -> None:
    small = {
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        "vocab_size": 101,
        "head_dim": 16,
    }
    for weights in ([1, 1], [1, 2], [1, 1, 1]):
        error, shards = _run(tiny, simulator, tiny.CONFIGS[kind] | small, weights)
        assert error < TOLERANCE
        assert not shards[0].whole_parts


@pytest.mark.parametrize("kind", ["hunyuan", "gemma4_text", "rwkv7"])
def test_what_no_rule_divides_is_cut_linear_by_linear(
    tiny: ModuleType, simulator: ModuleType, kind: str
) -> None:
    error, shards = _run(tiny, simulator, tiny.CONFIGS[kind], [2, 1])
    assert error < TOLERANCE
    assert any("attn" in part for part in shards[0].whole_parts)


def test_attention_whose_keys_other_layers_use_is_not_divided_by_heads(tiny: ModuleType) -> None:
    lazy = tiny.build(tiny.CONFIGS["gemma3n"] | {"vocab_size": 300, "vocab_size_per_layer_input": 300})
    assert mixer_units(0, "self_attn", lazy.layers[0].self_attn)[0]
    kept = divisible_units(lazy, trace_model(lazy.model))
    assert not [unit for unit in kept.units if unit.kind == "attention"]
    assert "layers.0.self_attn: layers share a KV cache" in kept.refusals
    assert any(unit.kind == "gathered" and unit.path == "self_attn.q_proj" for unit in kept.units)


def test_a_batch_that_grows_and_shrinks_gives_the_tokens_of_one_process(
    tiny: ModuleType, simulator: ModuleType
) -> None:
    placement = tiny.slices(6, [2, 1])
    alone = tiny.generate(tiny.build(tiny.llama()).model, None)

    def body(rank: int, exchange: Any) -> Any:
        shard = shard_model(tiny.build(tiny.llama()), placement, rank, exchange, tiny.ignore_progress)
        return tiny.generate(shard.model, exchange)

    assert simulator.Simulator(2).run(body) == [alone, alone]


class _Averaging(nn.Module):  # type: ignore[misc]
    """Looks like an MLP, but its activation needs all inner columns at once."""

    def __init__(self, old: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = old.gate_proj, old.up_proj, old.down_proj

    def __call__(self, x: Any) -> Any:
        inner = self.gate_proj(x)
        return self.down_proj((inner - inner.mean(axis=-1, keepdims=True)) * self.up_proj(x))


def test_a_unit_whose_shares_do_not_add_up_is_caught_by_numbers(tiny: ModuleType) -> None:
    lazy = tiny.build(tiny.llama())
    lazy.layers[2].mlp = _Averaging(lazy.layers[2].mlp)
    assert mlp_units(2, "mlp", lazy.layers[2].mlp)
    kept = divisible_units(lazy, trace_model(lazy.model))
    assert [unit.layer for unit in kept.units if unit.kind == "mlp"] == [0, 1, 3, 4, 5]
    (refusal,) = kept.refusals
    assert refusal.startswith("layers.2.mlp: its shares do not add up")


def test_quantised_heads_that_straddle_a_group_stay_whole(tiny: ModuleType) -> None:
    config = tiny.llama(num_attention_heads=4, num_key_value_heads=4, head_dim=24, hidden_size=64)
    lazy = tiny.build(config | {"quantization": {"group_size": 32, "bits": 4}})
    (unit, *_), _ = mixer_units(0, "self_attn", lazy.layers[0].self_attn)
    assert unit.division.edges == (0, 4)  # 4 x 24 inputs in groups of 32: only all four heads end on a group


def test_more_ranks_than_kv_heads_copy_only_what_they_need(tiny: ModuleType, simulator: ModuleType) -> None:
    config = tiny.llama(num_key_value_heads=2, num_attention_heads=8)
    error, shards = _run(tiny, simulator, config, [1, 1, 1])
    assert error < TOLERANCE
    attention = [shard.model.layers[0].self_attn for shard in shards]
    # The middle rank's heads belong to both KV heads and do not divide evenly: each head has a copy.
    assert [(a.n_heads, a.n_kv_heads) for a in attention] == [(3, 1), (3, 3), (2, 1)]


def test_a_wrong_sum_is_found_before_serving(tiny: ModuleType, simulator: ModuleType) -> None:
    placement = tiny.slices(6, [1, 1])

    def body(rank: int, exchange: Any) -> None:
        shard = shard_model(tiny.build(tiny.llama()), placement, rank, exchange, tiny.ignore_progress)
        honest = exchange.all_sum
        exchange.all_sum = lambda x: honest(x) + mx.ones_like(x)
        check_cuts(shard, exchange)

    with pytest.raises(BringUpError, match=r"Rank [01] got a wrong sum"):
        simulator.Simulator(2).run(body)


def test_more_value_heads_than_key_heads_divide_by_key_heads(tiny: ModuleType, simulator: ModuleType) -> None:
    for kind in ("qwen3_next", "qwen3_5"):
        config = json.loads(json.dumps(tiny.CONFIGS[kind]))
        part = config.get("text_config", config)
        part |= {"linear_num_value_heads": 8, "linear_num_key_heads": 4}
        error, shards = _run(tiny, simulator, config, [2, 1])
        assert error < TOLERANCE
        assert not shards[0].whole_parts
        mixer = shards[1].model.layers[0].linear_attn
        assert (mixer.num_v_heads, mixer.num_k_heads) == (2, 1)
