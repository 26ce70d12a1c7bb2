"""`mlx-mesh verify`: two meshes after one another, their answers compared, and a model from the hub."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _hub() -> ModuleType:
    path = Path(__file__).parents[1] / "node" / "hub" / "conftest.py"
    spec = importlib.util.spec_from_file_location("stand_in_hub", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stand_in_hub"] = module
    spec.loader.exec_module(module)
    return module


def verify(model: str, *arguments: str, environment: dict[str, str]) -> Any:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "mlx_mesh.launcher", "verify", model, *arguments, "--json"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout[done.stdout.index("{") :])


@pytest.mark.two_rank
def test_a_hub_model_gives_the_same_tokens_on_one_rank_and_on_two(tiny_llama: Path, tmp_path: Path) -> None:
    hub = _hub()
    with hub.serve() as served:
        served.folders["org/tiny"] = tiny_llama
        environment = {
            "HF_ENDPOINT": served.url,
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "XDG_STATE_HOME": str(tmp_path / "state"),
            "HF_HUB_DISABLE_XET": "1",
        }
        found = verify("org/tiny", "--sharding", "pipeline", environment=environment)
        assert len(found["prompts"]) == 4
        for prompt in found["prompts"]:
            assert prompt["differs_at"] == -1 and prompt["largest_gap"] < 1e-4
        size = (tiny_llama / "model.safetensors").stat().st_size
        assert served.sent("model.safetensors") < 2 * size  # fetched once, beside its header


@pytest.mark.two_rank
@pytest.mark.long
def test_a_mesh_with_an_adapter_is_compared_layer_by_layer(
    tiny_llama: Path, tiny_adapters: dict[str, Path], tmp_path: Path
) -> None:
    words = ("--sharding", "tensor", "--layer-by-layer", "--adapter-path", str(tiny_adapters["lora"]))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    found = verify(str(tiny_llama), *words, environment=environment)
    assert found["reference"].startswith("local layer by layer")
    for prompt in found["prompts"]:
        assert prompt["differs_at"] == -1 and prompt["largest_gap"] < 1e-4


@pytest.mark.two_rank
@pytest.mark.long
@pytest.mark.parametrize("words", [("pipeline",), ("tensor", "--layer-by-layer")])
def test_the_text_of_a_vision_model_is_compared(
    words: tuple[str, ...], tiny_vlm_folder: Path, tmp_path: Path
) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "XDG_STATE_HOME": str(tmp_path / "state")}
    found = verify(str(tiny_vlm_folder), "--sharding", *words, environment=environment)
    assert ("layer by layer" in found["reference"]) is ("--layer-by-layer" in words)
    assert len(found["prompts"]) == 4
    for prompt in found["prompts"]:
        assert prompt["differs_at"] == -1 and prompt["largest_gap"] < 1e-4
