"""A model's divisions are proven once, and the verdict is kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mesh.node.engine import certificate, footprints
from mlx_mesh.node.engine.certificate import certify
from mlx_mesh.node.engine.features import Features
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.rehearsal import Rehearsal
from mlx_mesh.node.engine.small import small_configs
from mlx_mesh.node.engine.small_vision import forward_rows, made_up
from mlx_mesh.node.engine.trace import trace_model
from mlx_mesh.node.vision import why_alone

ENGINE = Path(certificate.__file__).parent
EXCEPTIONS: dict[str, str] = {}
"""Model types that the pipeline and tensor code may name, each with the reason: none."""


def test_a_verdict_is_kept_until_config_or_parameters_change(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = tiny.build(tiny.llama())
    made = certify(lazy, trace_model(lazy.model), tmp_path)
    assert not made.note and not made.bad_cuts and len(made.units) == 12
    with monkeypatch.context() as patch:
        patch.setattr(certificate, "_certify", lambda *_: pytest.fail("it was in the cache"))
        assert certify(lazy, None, tmp_path) == made
    other = tiny.build(tiny.llama(num_key_value_heads=9))
    assert certify(other, trace_model(other.model), tmp_path) != made
    assert len(list(tmp_path.iterdir())) == 2


def test_a_broken_cache_file_is_made_again(tiny: ModuleType, tmp_path: Path) -> None:
    lazy = tiny.build(tiny.llama(num_hidden_layers=2))
    made = certify(lazy, trace_model(lazy.model), tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(b"{")
    assert certify(lazy, trace_model(lazy.model), tmp_path) == made


def test_cuts_and_units_that_change_the_logits_are_dropped_and_the_footprint_says_so(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = tiny.build(tiny.llama(num_hidden_layers=4))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(certificate, "_pipeline_gap", lambda small, cuts, ref: 0.5 * (3 in cuts))
    monkeypatch.setattr(certificate, "_tensor_gap", lambda *_: 0.5)
    footprint = footprints.measure_certified(lazy, "")
    assert footprint.legal_cuts == (1, 2)
    assert "no cut before layer 3" in footprint.cut_reason
    assert "whole model differs" in footprint.tensor.reason


def test_mixers_that_differ_together_are_cut_linear_by_linear(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = tiny.build(tiny.llama(num_hidden_layers=2))

    def gap(small: Any, proposal: Any, reference: Any) -> float:
        return 0.0 if all(unit.kind == "gathered" for unit in proposal.units) else 1.0

    monkeypatch.setattr(certificate, "_tensor_gap", gap)
    made = certify(lazy, trace_model(lazy.model), tmp_path)
    assert made.units and all(unit.kind == "gathered" for unit in made.units)
    assert "by heads and columns the whole model differs" in made.note


@pytest.mark.parametrize("kind", ["deepseek_v3", "falcon_h1", "gemma3n", "qwen3_5_moe", "mamba2"])
def test_a_small_model_keeps_heads_experts_and_layers(tiny: ModuleType, kind: str) -> None:
    config = tiny.CONFIGS[kind]
    lazy = tiny.build(config)
    small = certificate._small_model(lazy)
    assert small is not None
    made = small()
    assert len(made.layers) == len(lazy.layers)

    def counts(part: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in part.items() if key.startswith("num_") or "experts" in key}

    assert counts(made.config) == counts(config)
    assert next(iter(small_configs(config))) != config


# ---------------------------------------------------------------- vision models

FAMILIES = json.loads((Path(__file__).parent / "tiny_vlm_configs.json").read_text(encoding="utf-8"))
UNTRIED = ("phi3_v", "gemma3n")  # the one is refused, the other's tower takes minutes to make
PICTURES = {
    "qwen3_vl": {"deepstack_visual_embeds", "inputs_embeds", "position_ids", "visual_pos_masks"},
    "mllama": {
        "cross_attention_mask",
        "cross_attention_states",
        "full_text_row_masked_out_mask",
        "inputs_embeds",
    },
    "glm4v": {"inputs_embeds", "position_ids"},
}


def vision_lazy(tiny_vlm: ModuleType, family: str) -> LazyModel:
    config = tiny_vlm.CONFIGS[family]
    part = LanguagePart(tiny_vlm.build(family).language_model, is_for_one_row=bool(why_alone(config)))
    return LazyModel(Path(family), part, config, {})


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "qwen3_vl" else [pytest.mark.long])
        for name in FAMILIES
        if name not in UNTRIED
    ],
)
def test_a_vision_models_splits_are_tried_with_a_picture_beside_text(
    tiny_vlm: ModuleType, family: str, tmp_path: Path
) -> None:
    lazy = vision_lazy(tiny_vlm, family)
    made = certify(lazy, trace_model(lazy.model), tmp_path)
    assert made.units and not made.note and not made.bad_cuts
    picture = made_up(lazy.model, lazy.config)
    assert picture is not None and picture.fields.keys() == PICTURES.get(family, picture.fields.keys())
    small = certificate._small_model(lazy)
    assert small is not None and small().model.is_for_one_row == bool(why_alone(lazy.config))
    with_text = forward_rows(small().model, None)
    assert bool(mx.array_equal(with_text[-1], small.reference[-1])), "text behind a picture is as alone"
    assert not bool(mx.allclose(with_text[0][:, -1], small.reference[2][:, -1]))


def test_a_rank_that_lacks_a_pictures_positions_is_found_and_the_split_not_offered(
    tiny_vlm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = vision_lazy(tiny_vlm, "glm4v")
    calls = []

    def forgetful(part: Any, picture: Features) -> list[Any]:
        """After the undivided run rank 1 comes first, and then every second time."""
        calls.append(part)
        if len(calls) % 2 == 0:
            fields = {name: value for name, value in picture.fields.items() if name != "position_ids"}
            picture = Features(picture.length, fields)
        return forward_rows(part, picture)

    monkeypatch.setattr(certificate, "forward_rows", forgetful)
    monkeypatch.setattr(certificate, "_tensor_gap", lambda *_: 0.0)
    made = certify(lazy, trace_model(lazy.model), tmp_path)
    assert made.bad_cuts == (1, 2, 3, 4, 5)
    assert made.note == "a pipeline cut at some layers differs from the whole model"


@pytest.mark.long
def test_where_no_picture_can_be_made_up_splits_are_tried_with_text_and_the_verdict_says_so(
    tiny_vlm: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lazy = vision_lazy(tiny_vlm, "llava")
    monkeypatch.setattr(certificate, "_tensor_gap", lambda *_: 0.0)
    monkeypatch.setattr(
        certificate, "made_up", lambda *_: Features(11, {"inputs_embeds": mx.zeros((1, 11, 3))})
    )
    made = certify(lazy, trace_model(lazy.model), tmp_path)
    assert made.units and not made.bad_cuts
    assert made.note.startswith("tried with text alone: a made-up picture is not accepted (ValueError: ")


def test_ranks_that_wait_for_each_other_are_found() -> None:
    with pytest.raises(RuntimeError, match="wait for each other"):
        Rehearsal(2).run(lambda rank, exchange: exchange.recv((1,), None, 1 - rank))


def test_no_model_type_is_named_in_the_code_that_divides(tiny: ModuleType) -> None:
    names = {name for name in tiny.CONFIGS if name not in EXCEPTIONS}
    files = [
        ENGINE / f"{name}.py"
        for name in (
            *certificate._SOURCES,
            "shard",
            "pipeline",
            "ghosts",
            "caches",
            "dependencies",
            "hooks",
            "footprints",
            "loader",
            "tree",
        )
    ]
    files += (ENGINE.parent.parent / "mesh").glob("*.py")
    assert len(files) > 30
    for file in files:
        text = file.read_text(encoding="utf-8")
        named = [name for name in names if f'"{name}"' in text or f"'{name}'" in text]
        assert not named, f"{file.name} names {named}"
