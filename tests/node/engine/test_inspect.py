"""The footprint tells a model's sizes, cuts and units without reading a weight."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.capacity import HostCapacity, PlacementRequest
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.placement import plan_placement
from mlx_mesh.mesh.types import Sharding
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.inspect import inspect_model, main
from mlx_mesh.node.engine.loader import read_headers
from mlx_mesh.node.engine.shard import load_shard, shard_model


def _punch(folder: Path) -> None:
    """Cut all weights out of the files but keep their size, so that reading one gives zeros."""
    for file in {tensor.path for tensor in read_headers(folder).values()}:
        first = min(tensor.offset for tensor in read_headers(folder).values() if tensor.path == file)
        size = file.stat().st_size
        with file.open("r+b") as stream:
            stream.truncate(first)
            stream.truncate(size)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"attention_bias": True}])
def test_a_footprint_counts_every_byte_once(
    tiny: ModuleType, tmp_path: Path, changes: dict[str, Any]
) -> None:
    config = tiny.llama(**changes)
    folder = tiny.save(config, tmp_path)
    _punch(folder)
    footprint = inspect_model(str(folder))
    assert footprint.weights_bytes == sum(x.nbytes for x in tiny.parameters(config).values())
    assert footprint.tied_embedding == config["tie_word_embeddings"]
    assert footprint.embedding_bytes == 101 * 96 * 4
    assert footprint.legal_cuts == (1, 2, 3, 4, 5) and footprint.cut_reason == ""
    assert footprint.hidden_bytes_per_token == 96 * 4
    assert footprint.vocab_size == 101
    tensor = footprint.tensor
    assert (tensor.attention_units, tensor.mlp_units, tensor.kv_groups, tensor.reason) == (9, 10, 3, "")
    in_layers, outside = tensor.attention_bytes + tensor.mlp_bytes, tensor.vocabulary_bytes
    assert in_layers + outside + tensor.replicated_bytes == footprint.weights_bytes
    assert outside == 101 * 96 * 4 * (1 if config["tie_word_embeddings"] else 2)


def test_kv_bytes_are_what_the_cache_allocates(tiny: ModuleType) -> None:
    lazy = tiny.build(tiny.llama())
    footprint = measure(lazy, "")
    cache = make_prompt_cache(lazy.model)
    mx.eval(lazy.model(mx.zeros((1, 256), dtype=mx.uint32), cache=cache))
    assert [layer.kv_bytes_per_token * 256 for layer in footprint.layers] == [c.nbytes for c in cache]


def test_windows_and_fixed_states_are_told_apart(tiny: ModuleType) -> None:
    windows = measure(tiny.build(tiny.llama(**tiny.SLIDING)), "").layers
    assert [layer.kv_window for layer in windows] == [8, 8, 0, 8, 8, 0]
    recurrent = measure(tiny.build(tiny.CONFIGS["mamba2"]), "").layers
    assert all(layer.fixed_state_bytes > 0 and layer.kv_bytes_per_token == 0 for layer in recurrent)


def test_illegal_cuts_come_with_the_reason(tiny: ModuleType) -> None:
    footprint = measure(tiny.build(tiny.CONFIGS["afm7"]), "")
    assert footprint.legal_cuts == (1, 2, 3, 4, 5, 6, 7)
    assert "no cut before layer 8-15" in footprint.cut_reason
    parts = measure(tiny.build(tiny.CONFIGS["iquestloopcoder"]), "")
    assert parts.legal_cuts == () and "never calls its layers" in parts.cut_reason


@pytest.mark.parametrize("sharding", [Sharding.PIPELINE, Sharding.TENSOR])
@pytest.mark.parametrize("tied", [True, False])
def test_each_rank_holds_what_the_plan_says(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path, sharding: Sharding, tied: bool
) -> None:
    folder = tiny.save(tiny.llama(tie_word_embeddings=tied), tmp_path)
    hosts = [HostCapacity(name="a", slots=3, usable_memory_bytes=8 << 30)]
    footprint = inspect_model(str(folder))
    placement = plan_placement(footprint, hosts, PlacementRequest(sharding=sharding))

    def body(rank: int, exchange: Any) -> int:
        loaded = load_shard(str(folder), placement, rank, exchange, tiny.ignore_progress).weights_bytes
        return int(loaded)

    held = simulator.Simulator(3).run(body)
    assert held == [shard.weights_bytes for shard in placement.shards]


def test_a_mixed_model_says_what_stays_whole(tiny: ModuleType) -> None:
    config = tiny.CONFIGS["gemma3n"] | {"vocab_size": 300, "vocab_size_per_layer_input": 300}
    parts = measure(tiny.build(config), "").tensor.replicated_parts
    assert any("self_attn: layers share a KV cache" in part and "in 6 layers" in part for part in parts)


@pytest.mark.parametrize(
    "kind", ["deepseek_v3", "nemotron_h", "qwen3_5_moe", "gemma4_text", "openelm", "4bit"]
)
def test_tensor_bytes_are_predicted_to_the_byte_for_layers_that_differ(
    tiny: ModuleType, simulator: ModuleType, kind: str
) -> None:
    quantised = tiny.llama(quantization={"group_size": 32, "bits": 4}, head_dim=32)
    config = quantised if kind == "4bit" else tiny.CONFIGS[kind]
    lazy = tiny.build(config)
    footprint = measure(lazy, "")
    held = [sum(x.nbytes for _, x in tree_flatten(layer.parameters())) for layer in lazy.layers]
    assert sum(layer.weights_bytes for layer in footprint.layers) == sum(held)
    for weights in ([1, 1], [2, 1], [1, 1, 1]):
        placement = tiny.slices(len(lazy.layers), weights)

        def body(rank: int, exchange: Any, placement: Any = placement) -> int:
            shard = shard_model(tiny.build(config), placement, rank, exchange, tiny.ignore_progress)
            return int(shard.weights_bytes)

        planned = [footprint.tensor.weights_bytes(weights, rank) for rank in range(len(weights))]
        assert simulator.Simulator(len(weights)).run(body) == planned


def test_measuring_leaves_the_model_as_it_was(tiny: ModuleType, simulator: ModuleType) -> None:
    lazy = tiny.build(tiny.llama())
    kinds = [type(module) for module in lazy.model.modules()]
    measure(lazy, "")
    assert [type(module) for module in lazy.model.modules()] == kinds
    exchange = simulator.Simulator(1).exchange(0)
    model = shard_model(lazy, tiny.whole(6), 0, exchange, tiny.ignore_progress).model
    assert tiny.gap(tiny.forward(model), tiny.forward(tiny.build(tiny.llama()).model)) == 0.0


def _command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-m", "mlx_mesh.node.engine.inspect", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_command_prints_one_json_object(tiny: ModuleType, tmp_path: Path) -> None:
    folder = tiny.save(tiny.llama(), tmp_path)
    done = _command(str(folder), "--json")
    assert done.returncode == 0, done.stderr
    assert msgspec.json.decode(done.stdout, type=ModelFootprint) == inspect_model(str(folder))


def test_the_command_names_a_bad_folder_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    (tmp_path / "model.safetensors").write_bytes(b"\2\0\0\0\0\0\0\0{}")
    for folder, words, status in (
        (tmp_path, "unheard_of not supported", 2),
        (tmp_path / "gone", "does not exist", 3),
    ):
        done = _command(str(folder))
        assert done.returncode == status and done.stdout == ""
        assert words in done.stderr and done.stderr.count("\n") == 1


def test_a_command_without_a_model_says_how_to_use_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ")
