"""What the engines of a real run hold of a quantised model is what was planned, also by uneven shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model

from mlx_mesh.mesh.memory import ModelMemory
from mlx_mesh.mesh.types import Sharding
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.loader import open_lazy

pytestmark = pytest.mark.two_rank


@pytest.fixture(scope="module")
def quantised(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """tiny_llama in 4 bits, groups of 32; its tokenizer is not needed here."""
    folder = tmp_path_factory.mktemp("tiny-4bit")
    model, config = load_model(tiny_llama)
    nn.quantize(model, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    text = json.dumps(config | {"quantization": {"group_size": 32, "bits": 4}})
    (folder / "config.json").write_text(text)
    return folder


@pytest.mark.parametrize(
    ("sharding", "stages"),
    [(Sharding.TENSOR, [3, 1]), pytest.param(Sharding.PIPELINE, [1, 5], marks=pytest.mark.long)],
)
def test_each_rank_reads_the_planned_bytes(
    bench: Any, quantised: Path, sharding: Sharding, stages: list[int]
) -> None:
    footprint = measure(open_lazy(quantised), "")
    if sharding is Sharding.TENSOR:
        planned = [footprint.tensor.weights_bytes(stages, rank) for rank in (0, 1)]
        assert planned[0] > 1.8 * planned[1]
    else:
        memory = ModelMemory.of(footprint, 1, 1)
        planned = [memory.stage(1, 6).weights, memory.stage(0, 1).weights]
    with bench.mesh(2) as mesh:
        mesh.connect()
        mesh.load(quantised, bench.split(sharding, 6, stages))
        assert mesh.held() == planned
        assert mesh.stop() == [0, 0]
