"""A LoRA or DoRA adapter is loaded and divided with its layers, at any world size."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.shard import load_shard

KEYS = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
QUANTISED = {"quantization": {"group_size": 32, "bits": 4}, "head_dim": 32}


def _adapter(tiny: ModuleType, config: dict[str, Any], folder: Path, kind: str) -> Path:
    """An adapter of the last four layers with random matrices, so that it matters."""
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.1, "keys": KEYS}
    model = tiny.build(config).model
    model.freeze()
    linear_to_lora_layers(model, 4, parameters, use_dora=kind == "dora")
    mx.random.seed(3)
    weights = {
        name: array + mx.random.normal(array.shape) * 0.05
        for name, array in tree_flatten(model.trainable_parameters())
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b", "m")
    }
    model.update(tree_unflatten(list(weights.items())))
    folder.mkdir()
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    text = json.dumps({"fine_tune_type": kind, "num_layers": 4, "lora_parameters": parameters})
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize(("kind", "changes"), [("lora", {}), ("dora", {}), ("lora", QUANTISED)])
def test_an_adapter_gives_the_same_logits_however_it_is_divided(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    config = tiny.llama(**changes)
    (tmp_path / "model").mkdir()
    folder = tiny.save(config, tmp_path / "model")
    adapter = str(_adapter(tiny, config, tmp_path / "adapter", kind))

    def run(placement: Any, adapter: str) -> list[Any]:
        def body(rank: int, exchange: Any) -> Any:
            shard = load_shard(str(folder), placement, rank, exchange, tiny.ignore_progress, adapter=adapter)
            return tiny.forward(shard.model)

        results: list[list[Any]] = simulator.Simulator(placement.world_size).run(body)
        return results[0]

    whole = run(tiny.whole(6), adapter)
    assert tiny.gap(run(tiny.whole(6), ""), whole) > 1e-3
    assert tiny.gap(run(tiny.stages(6, [1, 4]), adapter), whole) == 0.0
    for weights in ([1, 1], [2, 1]):
        assert tiny.gap(run(tiny.slices(6, weights), adapter), whole) < 1e-4


def test_a_lora_is_divided_by_heads_and_columns(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "model").mkdir()
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    adapter = str(_adapter(tiny, tiny.llama(), tmp_path / "adapter", "lora"))
    exchange = simulator.Simulator(3).exchange(1)
    shard = load_shard(
        str(folder), tiny.slices(6, [1, 1, 1]), 1, exchange, tiny.ignore_progress, adapter=adapter
    )
    attention = shard.model.layers[5].self_attn
    assert attention.q_proj.lora_b.shape == (4, 48) and attention.q_proj.lora_a.shape == (96, 4)
    assert attention.o_proj.lora_a.shape == (48, 4) and attention.o_proj.lora_b.shape == (4, 96)
    assert not shard.whole_parts


def test_what_is_no_adapter_of_the_model_is_named(tiny: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    with pytest.raises(SettingsError, match=r"no adapter_config\.json"):
        open_lazy(folder, tmp_path)
    other = _adapter(tiny, tiny.llama(hidden_size=64), tmp_path / "adapter", "lora")
    with pytest.raises(SettingsError, match="no adapter of this model"):
        open_lazy(folder, other)
