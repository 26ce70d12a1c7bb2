"""A tensor rank's caches are what the plan says: divided by KV heads, whole where they are latents."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.kv_options import KvOptions, with_kv_options
from mlx_mesh.mesh.memory import ModelMemory
from mlx_mesh.mesh.tensor_plan import tensor_needs
from mlx_mesh.node.engine.footprints import measure
from mlx_mesh.node.engine.shard import shard_model

TOKENS = 256  # caches grow by so many

CASES = {  # KV heads are copied where there are fewer than ranks, or where a share ends inside a group
    "qwen3_moe": [[2, 1], [1, 1, 1]],
    "deepseek_v3": [[2, 1]],  # one latent for all heads
    "falcon_h1": [[1, 1, 1]],  # keys and values beside Mamba states, with other heads
    "kimi_linear": [[1, 1]],  # latents, KDA states and convolutions
}


@pytest.mark.parametrize(
    ("kind", "weights", "bits"),
    [*((kind, w, 0) for kind in CASES for w in CASES[kind]), ("qwen3_moe", [2, 1], 4)],
    ids=str,
)
def test_the_caches_of_a_tensor_rank_are_as_large_as_planned(
    tiny: ModuleType, simulator: ModuleType, kind: str, weights: list[int], bits: int
) -> None:
    options = KvOptions(bits=bits, group_size=32)
    footprint = with_kv_options(measure(tiny.build(tiny.CONFIGS[kind]), ""), options)
    placement = tiny.slices(footprint.num_layers, weights)

    def body(rank: int, exchange: Any) -> int:
        lazy = tiny.build(tiny.CONFIGS[kind])
        shard = shard_model(lazy, placement, rank, exchange, tiny.ignore_progress, kv=options)
        model = shard.model
        cache = shard.new_caches() if shard.new_caches is not None else make_prompt_cache(model)
        mx.eval(model((mx.arange(TOKENS) % 90)[None], cache=cache))
        mx.eval([entry.state for entry in cache])
        return sum(entry.nbytes for entry in cache)

    needs = tensor_needs(ModelMemory.of(footprint, TOKENS, 1), weights)
    assert simulator.Simulator(len(weights)).run(body) == [need.kv for need in needs]
