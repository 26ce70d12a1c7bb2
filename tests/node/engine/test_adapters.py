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
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.node.engine import inspect
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.shard import load_shard

KEYS = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
QUANTISED = {"quantization": {"group_size": 32, "bits": 4}, "head_dim": 32}


def _adapter(tiny: ModuleType, config: dict[str, Any], folder: Path, kind: str, *more_keys: str) -> Path:
    """An adapter of the last four layers with random matrices, so that it matters."""
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.1, "keys": [*KEYS, *more_keys]}
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


# The embedding, which is the output head as well here, has an adapter too.
@pytest.mark.parametrize(("kind", "changes"), [("lora", {}), ("dora", {}), ("lora", QUANTISED)])
def test_an_adapter_gives_the_same_logits_however_it_is_divided(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path, kind: str, changes: dict[str, Any]
) -> None:
    config = tiny.llama(**changes)
    (tmp_path / "model").mkdir()
    folder = tiny.save(config, tmp_path / "model")
    adapter = str(_adapter(tiny, config, tmp_path / "adapter", kind, "model.embed_tokens"))

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
    words = r"no adapter of this model: model\.layers\.\d\.\S+ adapter shape \(.*\); and \d+ more tensors"
    with pytest.raises(SettingsError, match=words):
        open_lazy(folder, other)


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_adapters_bytes_are_planned_without_reading_a_weight(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    (tmp_path / "model").mkdir()
    folder = tiny.save(tiny.llama(), tmp_path / "model")
    adapter = _adapter(tiny, tiny.llama(), tmp_path / "adapter", kind)

    def measured(folder: Path, digest: str, added: Path | str = "", *_: object) -> ModelFootprint:
        return measure(open_lazy(folder, added), digest)  # without proving anything

    monkeypatch.setattr(inspect, "measure_folder", measured)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    plain, tensors = inspect.kept_footprint(str(folder)), mx.load(str(adapter / "adapters.safetensors"))
    size = sum(array.nbytes for array in tensors.values())
    for file in (folder / "model.safetensors", adapter / "adapters.safetensors"):
        _hollow(file)
    footprint = inspect.kept_footprint(str(folder), str(adapter))  # not mistaken for the plain model's
    assert footprint.weights_bytes == plain.weights_bytes + size
    gained = [b.weights_bytes - a.weights_bytes for a, b in zip(plain.layers, footprint.layers, strict=True)]
    assert gained[:2] == [0, 0] and min(gained[2:]) > 0 and sum(gained) == size
    tensor = footprint.tensor
    assert tensor.weights_bytes([1], 0) == footprint.weights_bytes
    halves = [tensor.weights_bytes([1, 1], rank) for rank in (0, 1)]
    assert all(half < 0.7 * footprint.weights_bytes for half in halves)
    assert inspect.kept_footprint(str(folder)) == plain


def _hollow(file: Path) -> None:
    """Leave the header, and zeros for the rest: reading a tensor would give other numbers."""
    size, head = file.stat().st_size, int.from_bytes(file.read_bytes()[:8], "little")
    with file.open("r+b") as stream:
        stream.truncate(8 + head)
        stream.truncate(size)
