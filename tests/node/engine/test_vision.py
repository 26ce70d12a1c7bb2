"""A prompt with a picture gives, over any split, the logits that mlx-vlm itself gives on one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mesh.mesh.types import Placement
from mlx_mesh.node.engine.certificate import certify
from mlx_mesh.node.engine.features import UnknownFeatureError, features_of
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.shard import shard_model
from mlx_mesh.node.engine.trace import trace_model
from mlx_mesh.node.vision import why_alone

NUM_DECODED = 5
NO_RUN = {
    "phi3_v": "its pictures have negative ids and 336 pixels a side, 300 million parameters",
}
QUICK = ("qwen2_vl", "qwen3_vl", "gemma4", "glm4v", "llava_next", "mllama")
"""Positions; features added between layers; inputs per layer; positions left on the model; more embeddings
than ids; states that every step reads."""
BOUND = 1e-5


def lazy_of(tiny_vlm: ModuleType, family: str) -> tuple[Any, LazyModel]:
    whole = tiny_vlm.build(family)
    return whole, LazyModel(Path(family), LanguagePart(whole.language_model), tiny_vlm.CONFIGS[family], {})


def plans(tiny: ModuleType, lazy: LazyModel) -> dict[str, Placement]:
    num_layers = len(lazy.layers)
    trace = trace_model(lazy.model)
    cuts = [cut for cut in range(1, num_layers) if not trace.why_not(cut)]
    return {
        "pipeline 2": tiny.stages(num_layers, [cuts[len(cuts) // 2]]),
        "pipeline 3 uneven": tiny.stages(num_layers, [cuts[0], cuts[-1]]),
        "tensor 2": tiny.slices(num_layers, [1, 1]),
    }


def families() -> list[Any]:
    names = json.loads((Path(__file__).parent / "tiny_vlm_configs.json").read_text(encoding="utf-8"))
    return [
        pytest.param(name, marks=[] if name in QUICK else [pytest.mark.long])
        for name in names
        if name not in NO_RUN
    ]


@pytest.mark.parametrize("family", families())
def test_a_picture_gives_mlx_vlms_logits_over_every_split(
    tiny: ModuleType, tiny_vlm: ModuleType, simulator: ModuleType, family: str
) -> None:
    whole, lazy = lazy_of(tiny_vlm, family)
    expected, tokens = tiny_vlm.reference(whole, family, NUM_DECODED)
    ids, features = tiny_vlm.features_in(whole, family, tiny_vlm.picture(family))

    alone = tiny_vlm.forward(lazy.model, ids, features, tiny_vlm.chunks_of(features.length), tokens)
    assert tiny.gap(alone, expected) <= BOUND

    proposal = certify(lazy, trace_model(lazy.model)).proposal
    for name, placement in plans(tiny, lazy).items():

        def body(rank: int, exchange: Any, name: str = name, placement: Placement = placement) -> Any:
            own, mine = lazy_of(tiny_vlm, family)
            if rank:
                tiny_vlm.poison_tower(own)
            units = proposal if "tensor" in name else None
            trace = trace_model(mine.model)
            part = shard_model(
                mine, placement, rank, exchange, tiny.ignore_progress, proposal=units, trace=trace
            ).model
            return tiny_vlm.forward(part, ids, features, tiny_vlm.chunks_of(features.length), tokens)

        logits = simulator.Simulator(placement.world_size).run(body)[0]
        assert tiny.gap(logits, expected) <= BOUND, name
        assert [int(mx.argmax(row).item()) for row in logits[:-1]] == tokens, name


@pytest.mark.parametrize("family", families())
def test_rows_of_pictures_and_text_share_a_batch_or_come_one_by_one(
    tiny_vlm: ModuleType, family: str
) -> None:
    if tiny_vlm.refusal(family):
        pytest.skip(tiny_vlm.refusal(family))
    whole = tiny_vlm.build(family)
    is_alone = bool(why_alone(tiny_vlm.CONFIGS[family]))
    part = LanguagePart(whole.language_model, is_for_one_row=is_alone)
    prompts = tiny_vlm.prompts_of(whole, family)
    alone = {name: tiny_vlm.generate(part, {name: prompt}, 12)[name] for name, prompt in prompts.items()}
    for seed in (1, 2):
        expected = tiny_vlm.reference(whole, family, 12, seed)[1]
        assert alone[f"picture {seed}"] == expected, seed
    if not is_alone:
        assert tiny_vlm.generate(part, prompts, 12) == alone


def test_a_field_that_no_rule_cuts_is_an_error_that_names_it() -> None:
    with pytest.raises(UnknownFeatureError, match="`pos_hw`"):
        features_of({"inputs_embeds": mx.zeros((1, 3, 4)), "pos_hw": mx.zeros((1, 3))}, object())
