"""Pipelines compute bit for bit what one process computes."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.mesh.errors import BringUpError, PlacementError
from mlx_mesh.node.engine.pipeline import plan_pipeline
from mlx_mesh.node.engine.shard import check_cuts, shard_model
from mlx_mesh.node.engine.trace import TraceError, trace_model

# Dense, MoE, MLA, hybrid, recurrent, looped, several values over a cut, masks from one layer's cache.
KINDS = [
    "apertus",
    "deepseek_v3",
    "falcon_h1",
    "gemma2",
    "hunyuan",
    "kimi_k3",
    "lfm2",
    "mamba2",
    "nanbeige",
    "nemotron_h",
    "qwen3_next",
    "rwkv7",
]


def _run(tiny: ModuleType, simulator: ModuleType, config: dict[str, Any], cuts: list[int]) -> float:
    reference = tiny.forward(tiny.build(config).model)
    num_layers = len(tiny.build(config).layers)
    placement = tiny.stages(num_layers, cuts)

    def body(rank: int, exchange: Any) -> Any:
        shard = shard_model(tiny.build(config), placement, rank, exchange, tiny.ignore_progress)
        check_cuts(shard, exchange)
        return tiny.forward(shard.model)

    results = simulator.Simulator(placement.world_size).run(body)
    for follower in results[1:]:
        assert [x.shape for x in follower] == [(*x.shape[:2], 1) for x in reference]
    return float(tiny.gap(results[0], reference))


SMALLER: dict[str, dict[str, Any]] = {
    "falcon_h1": {
        "hidden_size": 64,
        "head_dim": 16,
        "intermediate_size": 96,
        "mamba_d_head": 16,
        "mamba_d_ssm": 64,
        "mamba_d_state": 16,
        "mamba_n_heads": 4,
        "num_hidden_layers": 4,
        "vocab_size": 100,
    },
    "lfm2": {"block_dim": 64, "block_ff_dim": 96, "hidden_size": 64, "vocab_size": 100},
}
"""Changes to configs that are too large for a test of seconds."""


@pytest.mark.parametrize("cuts", [[3], [1, 2], [2, 5]])
def test_a_llama_pipeline_is_bit_identical(tiny: ModuleType, simulator: ModuleType, cuts: list[int]) -> None:
    assert _run(tiny, simulator, tiny.llama(), cuts) == 0.0


@pytest.mark.parametrize("cuts", [[2], [1, 3]])
def test_a_sliding_window_is_bit_identical_whichever_stage_has_the_full_layers(
    tiny: ModuleType, simulator: ModuleType, cuts: list[int]
) -> None:
    assert _run(tiny, simulator, tiny.llama(**tiny.SLIDING), cuts) == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_pipeline_of_another_kind_of_model_is_bit_identical(
    tiny: ModuleType, simulator: ModuleType, kind: str
) -> None:
    config = tiny.CONFIGS[kind] | SMALLER.get(kind, {})
    num_layers = len(tiny.build(config).layers)
    assert _run(tiny, simulator, config, [num_layers // 2]) == 0.0
    assert _run(tiny, simulator, config, [1, num_layers - 1]) == 0.0


def test_a_cut_inside_layers_that_read_each_others_keys_is_refused(tiny: ModuleType) -> None:
    lazy = tiny.build(tiny.CONFIGS["afm7"])
    trace = trace_model(lazy.model)
    legal = [cut for cut in range(1, trace.num_layers) if not trace.why_not(cut)]
    assert legal == [1, 2, 3, 4, 5, 6, 7]
    with pytest.raises(PlacementError, match=r"before layer 8: .*keys and values.*\[1, 2, 3, 4, 5, 6, 7\]"):
        plan_pipeline(trace, tiny.stages(16, [8]))


def test_a_model_that_uses_its_layers_in_parts_is_refused_with_the_reason(tiny: ModuleType) -> None:
    with pytest.raises(TraceError, match="never calls its layers"):
        trace_model(tiny.build(tiny.CONFIGS["iquestloopcoder"]).model)


@pytest.mark.parametrize("limits", [[0], [6], [3, 3]])
def test_a_stage_without_layers_is_refused(tiny: ModuleType, limits: list[int]) -> None:
    trace = trace_model(tiny.build(tiny.llama()).model)
    with pytest.raises(PlacementError):
        plan_pipeline(trace, tiny.stages(6, limits))


def test_a_follower_reads_neither_norm_nor_head_and_a_middle_stage_no_embedding(tiny: ModuleType) -> None:
    trace = trace_model(tiny.build(tiny.llama(tie_word_embeddings=False)).model)
    plan = plan_pipeline(trace, tiny.stages(6, [2, 4]))
    assert plan.parameters_of(2) == {"model.embed_tokens.weight"}
    assert plan.parameters_of(1) == set()
    assert plan.parameters_of(0) == {"model.norm.weight", "lm_head.weight"}


def test_per_layer_inputs_make_every_stage_read_their_embedding(tiny: ModuleType) -> None:
    config = tiny.CONFIGS["gemma3n"]
    trace = trace_model(tiny.build(config).model)
    last = len(trace.calls) - 1
    assert any("per_layer" in path for path in trace.parameters[last])


def test_a_link_that_swaps_messages_is_found_before_serving(tiny: ModuleType, simulator: ModuleType) -> None:
    placement = tiny.stages(6, [3])

    def body(rank: int, exchange: Any) -> None:
        shard = shard_model(tiny.build(tiny.llama()), placement, rank, exchange, tiny.ignore_progress)
        if rank == 1:
            honest = exchange.send
            exchange.send = lambda x, to: honest(mx.roll(x, 1), to)
        check_cuts(shard, exchange)

    with pytest.raises(BringUpError, match=r"Rank 0 received wrong values .* from rank 1"):
        simulator.Simulator(2).run(body)


def test_ghost_caches_keep_offsets_but_no_keys(tiny: ModuleType, simulator: ModuleType) -> None:
    placement = tiny.stages(6, [3])

    def body(rank: int, exchange: Any) -> Any:
        model = shard_model(tiny.build(tiny.llama()), placement, rank, exchange, tiny.ignore_progress).model
        cache = make_prompt_cache(model)
        mx.eval(model(mx.zeros((1, 40), dtype=mx.uint32), cache=cache))
        mx.eval([c.state for c in cache])
        return [(c.offset, c.nbytes) for c in cache]

    leader, follower = simulator.Simulator(2).run(body)
    assert [offset for offset, _ in leader] == [offset for offset, _ in follower] == [40] * 6
    ghosts, layers = follower[3:], leader[3:]
    assert max(size for _, size in ghosts) * 90 < min(size for _, size in layers)


@pytest.mark.parametrize("kind", ["llama", "sliding", "qwen3_next", "mamba2"])
def test_a_batch_that_grows_and_shrinks_gives_the_tokens_of_one_process(
    tiny: ModuleType, simulator: ModuleType, kind: str
) -> None:
    named = {"llama": tiny.llama(), "sliding": tiny.llama(**tiny.SLIDING)}
    config = named.get(kind) or tiny.CONFIGS[kind]
    num_layers = len(tiny.build(config).layers)
    placement = tiny.stages(num_layers, [1, num_layers - 1])
    alone = tiny.generate(tiny.build(config).model, None)

    def body(rank: int, exchange: Any) -> Any:
        shard = shard_model(tiny.build(config), placement, rank, exchange, tiny.ignore_progress)
        return tiny.generate(shard.model, exchange)

    for tokens in simulator.Simulator(3).run(body):
        assert tokens == alone
