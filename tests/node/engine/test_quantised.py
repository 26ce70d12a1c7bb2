"""Quantised models are divided at the edges of quantisation groups, whatever the mode."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from mlx_mesh.node.engine.probe import divisible_units
from mlx_mesh.node.engine.shard import shard_model
from mlx_mesh.node.engine.trace import trace_model

LLAMA = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 64, "hidden_size": 128}
WIDE = {"intermediate_size": 384, "num_hidden_layers": 2}
MODES: dict[str, dict[str, Any]] = {
    "4 bit, 32": {"bits": 4, "group_size": 32},
    "4 bit, 64": {"bits": 4, "group_size": 64},
    "8 bit, 32": {"bits": 8, "group_size": 32},
    "8 bit, 64": {"bits": 8, "group_size": 64},
    "mxfp4": {"bits": 4, "group_size": 32, "mode": "mxfp4"},
}


def _config(tiny: ModuleType, kind: str) -> dict[str, Any]:
    if kind == "llama":
        return dict(tiny.llama(**LLAMA, **WIDE))
    if kind == "qwen3_moe":
        changes = {"moe_intermediate_size": 192, "hidden_size": 128, "num_hidden_layers": 2}
        return dict(tiny.CONFIGS[kind] | LLAMA | changes)
    changes = {"intermediate_size": 192, "hidden_size": 128, "num_hidden_layers": 2}
    return dict(
        tiny.CONFIGS[kind] | LLAMA | changes | {"layer_types": ["sliding_attention", "full_attention"]}
    )


def _build(tiny: ModuleType, config: dict[str, Any], mode: dict[str, Any], mixed: bool) -> Any:
    lazy = tiny.build(config)

    def choose(path: str, module: Any) -> Any:
        if not hasattr(module, "to_quantized") or "router" in path or path.endswith("mlp.gate"):
            return False
        if mixed and ("down_proj" in path or path.startswith("model.layers.1.")):
            return {"bits": 8, "group_size": 64}
        return True

    nn.quantize(lazy.model, **mode, class_predicate=choose)
    mx.eval(lazy.model.parameters())
    return dataclasses.replace(lazy)


@pytest.mark.parametrize("mode", list(MODES))
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
def test_a_quantised_model_is_divided_between_groups(
    tiny: ModuleType, simulator: ModuleType, kind: str, mode: str
) -> None:
    config, mixed = _config(tiny, kind), mode == "4 bit, 32"
    lazy = _build(tiny, config, MODES[mode], mixed)
    reference = [lazy.model((mx.arange(7)[None] * 5 + 3) % 97)]
    proposal = divisible_units(lazy, trace_model(lazy.model))
    assert {unit.kind for unit in proposal.units} == {"attention", "mlp"}
    assert not proposal.refusals
    for weights in ([2, 1], [1, 1, 1]):
        placement = tiny.slices(2, weights)

        def body(rank: int, exchange: Any, placement: Any = placement) -> Any:
            mine = _build(tiny, config, MODES[mode], mixed)
            shard = shard_model(mine, placement, rank, exchange, tiny.ignore_progress, proposal=proposal)
            return [shard.model((mx.arange(7)[None] * 5 + 3) % 97)]

        outputs = simulator.Simulator(len(weights)).run(body)[0]
        assert tiny.gap(outputs, reference) < 1e-4
