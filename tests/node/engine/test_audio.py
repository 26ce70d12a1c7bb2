"""A prompt with audio gives, over any split, the logits that mlx-vlm itself gives on one process."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mesh.mesh.types import Placement
from mlx_mesh.node.engine.certificate import certify
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.shard import shard_model
from mlx_mesh.node.engine.trace import trace_model

NUM_DECODED = 5
BOUND = 1e-5
NAMES = list(json.loads((Path(__file__).parent / "tiny_audio_configs.json").read_text(encoding="utf-8")))
FAMILIES = [
    pytest.param(name, marks=[] if name == "qwen3_omni_moe" else [pytest.mark.long]) for name in NAMES
]


def lazy_of(tiny_vlm: ModuleType, family: str) -> tuple[Any, LazyModel]:
    whole = tiny_vlm.build(family)
    return whole, LazyModel(Path(family), LanguagePart(whole.language_model), tiny_vlm.CONFIGS[family], {})


@pytest.mark.parametrize("family", FAMILIES)
def test_sounds_give_mlx_vlms_logits_over_every_split(
    tiny: ModuleType, tiny_vlm: ModuleType, simulator: ModuleType, family: str
) -> None:
    whole, lazy = lazy_of(tiny_vlm, family)
    trace = trace_model(lazy.model)
    cuts = [cut for cut in range(1, trace.num_layers) if not trace.why_not(cut)]
    proposal = certify(lazy, trace).proposal
    plans = {
        "pipeline 2": tiny.stages(trace.num_layers, [cuts[len(cuts) // 2]]),
        "pipeline 3 uneven": tiny.stages(trace.num_layers, [cuts[0], cuts[-1]]),
        "tensor 2": tiny.slices(trace.num_layers, [1, 1]),
    }
    asked = []
    for name, prompt in tiny_vlm.heard(family).items():
        expected, tokens = tiny_vlm.reference(whole, family, NUM_DECODED, prompt=prompt)
        ids, features = tiny_vlm.features_in(whole, family, prompt)
        chunks = tiny_vlm.chunks_of(features.length)
        alone = tiny_vlm.forward(lazy.model, ids, features, chunks, tokens)
        assert tiny.gap(alone, expected) <= BOUND, name
        asked.append((name, ids, features, chunks, tokens, expected))

    for plan, placement in plans.items():

        def body(rank: int, exchange: Any, plan: str = plan, placement: Placement = placement) -> Any:
            own, mine = lazy_of(tiny_vlm, family)
            if rank:
                tiny_vlm.poison_tower(own)
            units = proposal if "tensor" in plan else None
            trace = trace_model(mine.model)
            part = shard_model(
                mine, placement, rank, exchange, tiny.ignore_progress, proposal=units, trace=trace
            ).model
            return [tiny_vlm.forward(part, *one[1:5]) for one in asked]

        answers = simulator.Simulator(placement.world_size).run(body)[0]
        for (name, _, _, _, tokens, expected), logits in zip(asked, answers, strict=True):
            assert tiny.gap(logits, expected) <= BOUND, (plan, name)
            assert [int(mx.argmax(row).item()) for row in logits[:-1]] == tokens, (plan, name)


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_sounds_and_text_share_a_batch(tiny_vlm: ModuleType, family: str) -> None:
    whole = tiny_vlm.build(family)
    part = LanguagePart(whole.language_model)
    rows = tiny_vlm.rows_with_sounds(whole, family)
    alone = {name: tiny_vlm.generate(part, {name: row}, 12)[name] for name, row in rows.items()}
    for name, prompt in tiny_vlm.heard(family).items():
        assert alone[name] == tiny_vlm.reference(whole, family, 12, prompt=prompt)[1], name
    assert tiny_vlm.generate(part, rows, 12) == alone
