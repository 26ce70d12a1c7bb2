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
from mlx_mesh.node.vision import VIDEO, why_alone

NUM_DECODED = 5
NO_RUN = {
    "phi3_v": "its pictures have negative ids and 336 pixels a side, 300 million parameters",
}
QUICK = ("qwen2_vl", "qwen3_vl", "gemma4", "glm4v", "llava_next", "mllama")
"""Positions; features added between layers; inputs per layer; positions left on the model; more embeddings
than ids; states that every step reads."""
QUICK_VIDEO = ("qwen3_vl_moe", "both")
"""Patches of both kinds in one pass, positions, features added between layers, and words between frames."""
BOUND = 1e-5
ROUNDED = {"qwen3_5_moe": 3e-5}
"""Whose recurrence rounds more: mlx-vlm's own chunks of a text are 1.3e-5 from its own whole."""


def lazy_of(tiny_vlm: ModuleType, family: str, *, is_blind: bool = False) -> tuple[Any, LazyModel]:
    whole = tiny_vlm.build(family, is_blind=is_blind)
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


def with_videos() -> list[Any]:
    """Family and what is shown: a video, or a picture beside it."""
    return [
        pytest.param(name, kind, marks=[] if (name, kind) == QUICK_VIDEO else [pytest.mark.long])
        for name in VIDEO
        for kind in ("video", "both")
    ]


@pytest.mark.parametrize("family", families())
def test_a_picture_gives_mlx_vlms_logits_over_every_split(
    tiny: ModuleType, tiny_vlm: ModuleType, simulator: ModuleType, family: str
) -> None:
    check_every_split(tiny, tiny_vlm, simulator, family, "picture")


@pytest.mark.parametrize(("family", "kind"), with_videos())
def test_a_video_gives_mlx_vlms_logits_over_every_split(
    tiny: ModuleType, tiny_vlm: ModuleType, simulator: ModuleType, family: str, kind: str
) -> None:
    check_every_split(tiny, tiny_vlm, simulator, family, kind)


def check_every_split(
    tiny: ModuleType, tiny_vlm: ModuleType, simulator: ModuleType, family: str, kind: str
) -> None:
    whole, lazy = lazy_of(tiny_vlm, family)
    prompt = tiny_vlm.SHOWN[kind](family)
    expected, tokens = tiny_vlm.reference(whole, family, NUM_DECODED, prompt=prompt)
    ids, features = tiny_vlm.features_in(whole, family, prompt)

    alone = tiny_vlm.forward(lazy.model, ids, features, tiny_vlm.chunks_of(features.length), tokens)
    bound = ROUNDED.get(family, BOUND)
    assert tiny.gap(alone, expected) <= bound

    proposal = certify(lazy, trace_model(lazy.model)).proposal
    for name, placement in plans(tiny, lazy).items():

        def body(rank: int, exchange: Any, name: str = name, placement: Placement = placement) -> Any:
            own, mine = lazy_of(tiny_vlm, family, is_blind=family in tiny_vlm.LARGE_TOWERS)
            if rank:
                tiny_vlm.poison_tower(own)
            units = proposal if "tensor" in name else None
            trace = trace_model(mine.model)
            part = shard_model(
                mine, placement, rank, exchange, tiny.ignore_progress, proposal=units, trace=trace
            ).model
            return tiny_vlm.forward(part, ids, features, tiny_vlm.chunks_of(features.length), tokens)

        logits = simulator.Simulator(placement.world_size).run(body)[0]
        assert tiny.gap(logits, expected) <= bound, name
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


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.long) for name in VIDEO])
def test_rows_of_videos_pictures_and_text_share_a_batch(tiny_vlm: ModuleType, family: str) -> None:
    whole = tiny_vlm.build(family)
    part = LanguagePart(whole.language_model)
    shown = (("video", 1), ("picture", 1), ("both", 2), ("video", 2))

    def expected(kind: str, seed: int) -> list[int]:
        tokens: list[int] = tiny_vlm.reference(whole, family, 12, prompt=tiny_vlm.SHOWN[kind](family, seed))[
            1
        ]
        return tokens

    prompts = tiny_vlm.prompts_of(whole, family, shown)
    alone = {name: tiny_vlm.generate(part, {name: prompt}, 12)[name] for name, prompt in prompts.items()}
    for kind, seed in shown:
        assert alone[f"{kind} {seed}"] == expected(kind, seed), kind
    assert tiny_vlm.generate(part, prompts, 12) == alone


def test_a_field_that_no_rule_cuts_is_an_error_that_names_it() -> None:
    with pytest.raises(UnknownFeatureError, match="`pos_hw`"):
        features_of({"inputs_embeds": mx.zeros((1, 3, 4)), "pos_hw": mx.zeros((1, 3))}, object())
