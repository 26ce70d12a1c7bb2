"""What is planned for every architecture is what the model weighs and what its cache takes, to the byte."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.kv_options import KvOptions, with_kv_options
from mlx_mesh.mesh.memory import kv_bytes
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.quantised_kv import quantised_caches
from mlx_mesh.node.engine.trace import trace_model

QUICK = ("gemma3_text", "deepseek_v41", "iquestloopcoder", "qwen3_next")
"""Windows; a cache of its own class; two caches a layer; recurrent layers."""

NO_RUN = {
    "bitnet": "its linears are a Metal kernel",
    "muse_spark": "its router is a Metal kernel",
    "phi3small": "MLX's block-sparse product writes outside its memory on a CPU at such lengths",
    "gear": "mlx-lm's own forward fails with a cache",
}
EXTRA = {"longcat_flash_ngram": 24}
"""Bytes of caches that belong to no layer: here the last tokens."""

STEPS = (511, 1)  # tokens of a prefill and of one decode step: caches grow in steps of 256, windows drop late


def lazy_model(config: dict[str, Any]) -> LazyModel:
    """Never evaluated."""
    model_class, args_class = mlx_lm.utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    model.eval()
    if how := config.get("quantization"):
        nn.quantize(model, how["group_size"], how["bits"])
    return LazyModel(Path(config["model_type"]), model, config, {})


def check(tiny: ModuleType, family: str, bits: int = 0) -> str:
    """What is wrong with this family's plan, with caches of so many bits if it can have them; '' nothing."""
    config = tiny.CONFIGS[family]
    lazy = lazy_model(config)
    arrays = {id(array): array for _, array in tree_flatten(lazy.model.parameters())}
    size = sum(array.nbytes for array in arrays.values())
    footprint = measure(lazy, "")
    groups = [layer.kv_group_size for layer in footprint.layers if layer.kv_group_size]
    options = KvOptions(bits=bits, group_size=min(groups, default=0))
    if bits and (footprint.kv_refusal or not groups):
        return ""
    footprint = with_kv_options(footprint, options)
    if footprint.weights_bytes != size:
        return f"{footprint.weights_bytes} bytes of weights planned, {size} built"
    if family in NO_RUN:
        return ""
    model = tiny.build(config).model
    layers = range(footprint.num_layers)
    cache = quantised_caches(model, trace_model(model), options, layers) if bits else make_prompt_cache(model)
    for num_tokens in STEPS:
        mx.eval(model((mx.arange(num_tokens) % 90)[None], cache=cache), [entry.state for entry in cache])
    planned = [kv_bytes(layer, 512, 1) for layer in footprint.layers]
    real = [entry.nbytes for entry in cache]
    if any(layer.kv_window for layer in footprint.layers):  # a window keeps up to one step more
        keeping = [
            layer for layer, size in zip(footprint.layers, planned, strict=True) if size
        ]  # others share
        rows = list(zip(filter(None, planned), filter(None, real), keeping, strict=True))
        wrong = [row[:2] for row in rows if (row[0] > row[1] if row[2].kv_window else row[0] != row[1])]
        return f"cache planned and real: {wrong}" if wrong else ""
    if sum(planned) + EXTRA.get(family, 0) != sum(real):
        return f"cache of {sum(planned)} bytes planned, {sum(real)} real"
    return ""


@pytest.mark.parametrize("family", QUICK)
def test_the_plan_of_an_architecture_is_exact(tiny: ModuleType, family: str) -> None:
    assert check(tiny, family) == ""


@pytest.mark.parametrize(("family", "bits"), [("exaone4", 5), ("hunyuan", 8)])
def test_the_plan_of_quantised_caches_is_exact(tiny: ModuleType, family: str, bits: int) -> None:
    """One full layer among windows; keys and values that layers share."""
    assert check(tiny, family, bits) == ""


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("bits", [0, 6])
def test_the_plan_of_every_architecture_is_exact(tiny: ModuleType, bits: int) -> None:
    faults = {}
    for family in sorted(tiny.CONFIGS):
        if problem := check(tiny, family, bits):
            faults[family] = problem
        mx.clear_cache()
    assert not faults
