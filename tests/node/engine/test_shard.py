"""A rank reads its own bytes and no others."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mesh.mesh.errors import PlacementError, SettingsError
from mlx_mesh.mesh.types import Placement
from mlx_mesh.node.engine.loader import RangeReader, StoredTensor, open_lazy, read_headers
from mlx_mesh.node.engine.shard import load_shard


def _forward(
    tiny: ModuleType, simulator: ModuleType, folders: list[Path], placement: Placement
) -> tuple[list[Any], list[Any]]:
    shards: list[Any] = [None] * len(folders)

    def body(rank: int, exchange: Any) -> Any:
        folder = str(folders[rank])
        shards[rank] = load_shard(folder, placement, rank, exchange, tiny.ignore_progress)
        return tiny.forward(shards[rank].model)

    return simulator.Simulator(len(folders)).run(body)[0], shards


def _poison(folder: Path, keep: Any) -> None:
    """Overwrite with NaN every stored tensor (or part) that `keep(name, array)` does not name."""
    for name, tensor in read_headers(folder).items():
        with tensor.path.open("r+b") as file:
            file.seek(tensor.offset)
            count = int(np.prod(tensor.shape))
            array = np.frombuffer(file.read(4 * count), dtype=np.float32).reshape(tensor.shape).copy()
            wanted = keep(name, array)
            array[~wanted] = np.nan
            file.seek(tensor.offset)
            file.write(array.tobytes())


@pytest.mark.parametrize("num_files", [1, 3])
def test_a_stage_reads_no_tensor_of_another_stage(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path, num_files: int
) -> None:
    config = tiny.llama(tie_word_embeddings=False)
    reference = tiny.forward(tiny.build(config).model)
    own = {
        0: ("layers.4.", "layers.5.", "model.norm", "lm_head"),
        1: ("layers.2.", "layers.3."),
        2: ("layers.0.", "layers.1.", "embed_tokens"),
    }
    folders = []
    for rank, names in own.items():
        (tmp_path / str(rank)).mkdir()
        folder = tiny.save(config, tmp_path / str(rank), num_files)
        _poison(folder, lambda name, a, names=names: np.full(a.shape, any(n in name for n in names)))
        folders.append(folder)
    outputs, shards = _forward(tiny, simulator, folders, tiny.stages(6, [2, 4]))
    assert tiny.gap(outputs, reference) == 0.0
    layer = sum(x.nbytes for name, x in tiny.parameters(config).items() if ".layers.0." in name)
    assert [shard.layer_bytes for shard in shards] == [(layer, layer)] * 3
    assert shards[1].weights_bytes == 2 * layer
    assert shards[2].weights_bytes == 2 * layer + 101 * 96 * 4


def test_a_tensor_rank_reads_only_its_rows_and_columns(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path
) -> None:
    config = tiny.llama(tie_word_embeddings=False)
    reference = tiny.forward(tiny.build(config).model)
    heads = {0: slice(0, 96), 1: slice(96, 144)}  # 6 and 3 heads of 16
    groups = {0: slice(0, 32), 1: slice(32, 48)}
    rows = {0: slice(0, 51), 1: slice(51, 101)}  # of 101 tokens
    inner = {0: slice(0, 80), 1: slice(80, 160)}
    folders = []
    for rank in range(2):

        def keep(name: str, array: Any, rank: int = rank) -> Any:
            wanted = np.zeros(array.shape, dtype=bool)
            if "q_proj" in name:
                wanted[heads[rank]] = True
            elif "k_proj" in name or "v_proj" in name:
                wanted[groups[rank]] = True
            elif "o_proj" in name:
                wanted[:, heads[rank]] = True
            elif "gate_proj" in name or "up_proj" in name:
                wanted[inner[rank]] = True
            elif "down_proj" in name:
                wanted[:, inner[rank]] = True
            elif "lm_head" in name or "embed" in name:
                wanted[rows[rank]] = True
            else:
                wanted[:] = True
            return wanted

        (tmp_path / str(rank)).mkdir()
        folder = tiny.save(config, tmp_path / str(rank))
        _poison(folder, keep)
        folders.append(folder)
    outputs, shards = _forward(tiny, simulator, folders, tiny.slices(6, [1, 1]))
    assert tiny.gap(outputs, reference) < 1e-4
    whole = sum(x.nbytes for x in tiny.parameters(config).values())
    assert shards[0].weights_bytes < 0.58 * whole
    assert shards[1].weights_bytes < 0.44 * whole


def test_loading_reports_each_layer_and_running_reports_each_local_one(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path
) -> None:
    folder = tiny.save(tiny.llama(), tmp_path)
    loaded: dict[int, list[tuple[int, int]]] = {0: [], 1: []}
    entered: dict[int, list[int]] = {0: [], 1: []}

    def body(rank: int, exchange: Any) -> None:
        shard = load_shard(
            str(folder),
            tiny.stages(6, [2]),
            rank,
            exchange,
            lambda done, total: loaded[rank].append((done, total)),
            entered[rank].append,
        )
        mx.eval(shard.model(mx.zeros((1, 2), dtype=mx.uint32)))

    simulator.Simulator(2).run(body)
    assert loaded == {0: [(i, 5) for i in range(1, 6)], 1: [(i, 3) for i in range(1, 4)]}
    assert entered == {0: [2, 3, 4, 5], 1: [0, 1]}


def test_world_size_one_is_the_plain_model(tiny: ModuleType, simulator: ModuleType, tmp_path: Path) -> None:
    config = tiny.llama()
    outputs, shards = _forward(tiny, simulator, [tiny.save(config, tmp_path)], tiny.whole(6))
    assert tiny.gap(outputs, tiny.forward(tiny.build(config).model)) == 0.0
    assert shards[0].weights_bytes == sum(x.nbytes for x in tiny.parameters(config).values())


def test_a_placement_for_another_model_is_refused(
    tiny: ModuleType, simulator: ModuleType, tmp_path: Path
) -> None:
    folder = tiny.save(tiny.llama(), tmp_path)
    with pytest.raises(PlacementError, match=r"for 7 layers, .* has 6"):
        _forward(tiny, simulator, [folder, folder], tiny.stages(7, [2]))


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.uint32])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_the_range_reader_returns_what_slicing_would(tmp_path: Path, dtype: Any, axis: int) -> None:
    array = (mx.arange(3 * 40 * 50).reshape(3, 40, 50) % 251).astype(dtype)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"pad": mx.zeros((5,)), "x": array})
    tensor = read_headers(tmp_path)["x"]
    with RangeReader() as reader:
        part = reader.read(tensor, axis, [(1, 2), (2, 3)])
        assert reader.bytes_kept == part.nbytes
    index = [slice(None)] * 3
    index[axis] = slice(1, 3)
    assert part.dtype == dtype
    assert mx.array_equal(part, array[tuple(index)]).item()


def test_rows_are_read_without_touching_the_others(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(np.arange(1000, dtype=np.float32).tobytes())
    with RangeReader() as reader:
        part = reader.read(StoredTensor(file, 0, (100, 10), "F32"), 0, [(20, 30)])
        assert reader.bytes_read == reader.bytes_kept == 400
    assert part[0, 0].item() == 200


def _folder(tmp_path: Path, config: Any, weights: bytes | None) -> Path:
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights is not None:
        (tmp_path / "model.safetensors").write_bytes(weights)
    return tmp_path


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"model_type": "llama"}, None, "no model.*safetensors"),
        ("{", b"", "cannot be read as JSON"),
        ({}, b"", "no model_type"),
        ({"model_type": "nothing_like_it"}, b"\2\0\0\0\0\0\0\0{}", "nothing_like_it not supported"),
        ({"model_type": "llama", "model_file": "x.py"}, b"\2\0\0\0\0\0\0\0{}", "own code"),
        ({"model_type": "llama"}, b"\0\0\0\0\0\0\0\7", "not a usable safetensors file"),
        ({"model_type": "llama"}, b"", "it has only 0 bytes; download or copy it again"),
        ({"model_type": "llama", "num_hidden_layers": -3}, b"x", "says `num_hidden_layers: -3`, which must"),
        ({"model_type": "llama", "hidden_size": "x"}, b"x", "says `hidden_size: x`, which must"),
    ],
)
def test_an_unusable_folder_is_named_with_the_reason(
    tmp_path: Path, config: Any, weights: bytes | None, message: str
) -> None:
    with pytest.raises(SettingsError, match=message) as caught:
        open_lazy(_folder(tmp_path, config, weights))
    assert str(tmp_path) in str(caught.value)


def test_a_file_that_ends_early_is_named(tiny: ModuleType, tmp_path: Path) -> None:
    file = tiny.save(tiny.llama(), tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(SettingsError, match="ends early"):
        open_lazy(tmp_path)
