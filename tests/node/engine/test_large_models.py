"""Ten well-known large models by their published shapes: what the plan says is what they would weigh."""

from __future__ import annotations

import json
import math
import os
import resource
import struct
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.memory import kv_bytes
from mlx_mesh.mesh.speed import active_bytes
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.inspect import inspect_model
from mlx_mesh.node.engine.loader import _DTYPES

LARGE: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "large_configs.json").read_text(encoding="utf-8")
)
NAMES = {mlx: name for name, (_, mlx) in _DTYPES.items()}

# Billions of parameters: of all, and of what one token is multiplied with, as published.
PUBLISHED = {
    "Llama-3.3-70B": (70.6, 70.6),
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235.1, 22.2),
    "DeepSeek-V3": (671.0, 37.0),
    "gpt-oss-120b": (116.8, 5.1),
    "GLM-4.5-Air": (106.0, 12.0),
    "Mistral-Large-2411": (122.6, 122.6),
    "Kimi-K2": (1026.0, 32.0),
    "Llama-4-Scout": (107.0, 17.0),
    "Gemma-3-27B": (27.0, 27.0),
}


def lazy_parameters(config: dict[str, Any]) -> dict[str, Any]:
    """All parameters of the model in bfloat16, quantised as the config says; none is evaluated."""
    model_class, args_class = mlx_lm.utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if how := config.get("quantization"):

        def is_quantized(path: str, module: Any) -> bool:
            if not hasattr(module, "to_quantized") or module.weight.shape[-1] % how["group_size"]:
                return False
            return how.get("mode", "affine") == "affine" or "experts" in path

        nn.quantize(model, class_predicate=is_quantized, **how)
    parameters = dict(tree_flatten(model.parameters()))
    if config["model_type"] == "gemma3":  # its head is its embedding, which the files say by leaving it out
        parameters = {name: array for name, array in parameters.items() if "lm_head" not in name}
    return parameters


def hollow_folder(config: dict[str, Any], folder: Path) -> int:
    """A model folder whose weight file is its header and nothing else; returns the bytes it would have."""
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    at = 0
    for name, array in lazy_parameters(config).items():
        size = int(array.nbytes)
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return at


FIRST_SIGHT_S = 15.0
"""A model that was never seen is proven and measured in this time, whatever its size."""

QUICK = ("gpt-oss-120b", "DeepSeek-V3")
CASES = [
    pytest.param(
        name,
        is_quantized,
        id=f"{name}-{'quantised' if is_quantized else 'plain'}",
        marks=[] if not is_quantized or name in QUICK else [pytest.mark.long],
    )
    for name in sorted(LARGE)
    for is_quantized in (False, True)
]


@pytest.mark.parametrize(("name", "is_quantized"), CASES)
def test_the_planned_weights_are_the_lazily_built_models_to_the_byte(
    name: str, is_quantized: bool, tmp_path: Path
) -> None:
    config = dict(LARGE[name])
    if is_quantized:
        how = {"group_size": 64, "bits": 4, "mode": "affine"}
        if name == "gpt-oss-120b":
            how = {"group_size": 32, "bits": 4, "mode": "mxfp4"}
        config["quantization"] = how
    size = hollow_folder(config, tmp_path)
    began = time.process_time()  # of this process alone, however busy the host is
    footprint = inspect_model(str(tmp_path))
    assert time.process_time() - began < FIRST_SIGHT_S
    assert footprint.weights_bytes == size
    total, active = PUBLISHED[name]
    if is_quantized:
        assert footprint.quantization.startswith("4 bit")
        assert size < 0.32 * total * 2e9
    else:
        assert math.isclose(size / 2e9, total, rel_tol=0.02)
        embedding = footprint.embedding_bytes + footprint.head_bytes
        read = sum(map(active_bytes, footprint.layers)) + embedding
        assert math.isclose(read / 2e9, active, rel_tol=0.12), read / 2e9
        multiplied = sum(layer.active_parameters for layer in footprint.layers)
        assert math.isclose(2 * multiplied, sum(map(active_bytes, footprint.layers)), rel_tol=0.02)
    assert footprint.num_layers == len(footprint.layers) > 30
    assert len(footprint.legal_cuts) == footprint.num_layers - 1
    assert footprint.tensor.reason == ""


def test_large_caches_are_what_their_papers_say(tmp_path: Path) -> None:
    """DeepSeek keeps one latent of 512 + 64 numbers a layer and token, Llama 2 x 8 heads of 128."""
    sizes = {}
    for name in ("DeepSeek-V3", "Llama-3.3-70B"):
        (tmp_path / name).mkdir()
        hollow_folder(LARGE[name], tmp_path / name)
        sizes[name] = inspect_model(str(tmp_path / name)).kv_bytes_per_token
    assert sizes == {"DeepSeek-V3": 61 * 576 * 2, "Llama-3.3-70B": 80 * 2 * 8 * 128 * 2}


FIRST_REFUSAL_S, NEXT_REFUSAL_S = 15.0, 2.0


@pytest.mark.long
@pytest.mark.parametrize("name", ["Llama-3.3-70B", "DeepSeek-V3"])
def test_what_cannot_fit_is_refused_in_seconds_and_soon_when_the_model_is_known(
    name: str, tmp_path: Path
) -> None:
    """By processor time, which a loaded machine does not stretch."""
    hollow_folder(LARGE[name], tmp_path)
    words = ["plan", str(tmp_path), "--nodes", "3", "--memory", "48GB", "--chip", "M4 Max", "--link", "wifi"]
    for limit_s in (FIRST_REFUSAL_S, NEXT_REFUSAL_S):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-I", "-m", "mlx_mesh.launcher", *words],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
            env={**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 4 and "GB are missing" in done.stdout, done.stderr
        assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < limit_s


FAMILIES = ("llama", "qwen3_moe", "deepseek_v3", "glm4_moe", "gemma2", "phi3", "mamba2")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planned_kv_is_what_the_cache_allocates(tiny: ModuleType, family: str) -> None:
    lazy = tiny.build(tiny.CONFIGS[family])
    layers = measure(lazy, "").layers
    cache = make_prompt_cache(lazy.model)
    mx.eval(lazy.model((mx.arange(256) % 90)[None], cache=cache))
    mx.eval([entry.state for entry in cache])
    assert len(cache) == len(layers)
    for layer, entry in zip(layers, cache, strict=True):
        if layer.kv_window:  # a first chunk is kept whole until the next token comes
            assert kv_bytes(layer, 256, 1) <= entry.nbytes
        else:
            assert kv_bytes(layer, 256, 1) == entry.nbytes
