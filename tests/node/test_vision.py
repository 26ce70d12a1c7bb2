"""Whether pictures are possible is decided from the config and from what is installed, without MLX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.types import STILLS, VisionMode
from mlx_mesh.node import vision

BOTH = {"vision_config": {"depth": 1}, "audio_config": {"layers": 1}}
SEEING = {"model_type": "qwen2_vl", "vision_config": {"depth": 2}}


def folder_of(tmp_path: Path, config: dict[str, Any]) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("config", "mode", "expected"),
    [
        (SEEING, VisionMode.AUTO, (True, "")),
        (SEEING, VisionMode.ON, (True, "")),
        (SEEING, VisionMode.OFF, (False, "the server was started with --no-vision")),
        ({"model_type": "llama"}, VisionMode.AUTO, (False, "")),
        ({"model_type": "qwen3_5", "vision_config": None}, VisionMode.AUTO, (False, "")),
        (SEEING | {"model_type": "llava_qwen2"}, VisionMode.AUTO, (True, "")),  # fastvlm, by its other name
    ],
)
def test_a_model_is_served_with_its_towers_when_it_has_some_and_it_is_allowed(
    tmp_path: Path, config: dict[str, Any], mode: VisionMode, expected: tuple[bool, str]
) -> None:
    assert vision.choose_vision(folder_of(tmp_path, config), mode) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SEEING | {"model_type": "nobody_knows"}, "no model of type 'nobody_knows'"),
        (SEEING | {"model_type": "phi3_v"}, "negative token ids"),
        (SEEING | {"model_type": "phi4mm"}, "weights of its layers"),
    ],
)
def test_what_is_not_possible_is_said_and_an_error_when_it_was_asked_for(
    tmp_path: Path, config: dict[str, Any], words: str
) -> None:
    folder = folder_of(tmp_path, config)
    is_served, reason = vision.choose_vision(folder, VisionMode.AUTO)
    assert not is_served and words in reason
    with pytest.raises(SettingsError, match=words):
        vision.choose_vision(folder, VisionMode.ON)


def test_pictures_are_asked_of_a_text_model_or_with_an_adapter_in_vain(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="has no vision tower"):
        vision.choose_vision(folder_of(tmp_path, {"model_type": "llama"}), VisionMode.ON)
    folder = folder_of(tmp_path, SEEING)
    assert "adapter" in vision.choose_vision(folder, VisionMode.AUTO, has_adapter=True)[1]


def test_without_the_library_the_reason_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vision, "is_installed", lambda: False)
    assert vision.choose_vision(folder_of(tmp_path, SEEING), VisionMode.AUTO) == (False, vision.MISSING)


def test_the_decision_loads_no_mlx(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from mlx_mesh.node.vision import choose_vision, VisionMode;"
        "print(choose_vision(pathlib.Path(sys.argv[1]), VisionMode.AUTO), 'mlx.core' in sys.modules)"
    )
    folder = folder_of(tmp_path, SEEING)
    told = subprocess.run(
        [sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True
    )
    assert told.stdout.strip() == "(True, '') False"


@pytest.mark.parametrize(
    ("config", "kinds", "why"),
    [
        (SEEING, ("image",), "models of type 'qwen2_vl' take no audio"),
        (
            {"model_type": "gemma4", **BOTH},
            ("image", "audio"),
            "",
        ),
        (
            {"model_type": "gemma4", "vision_config": {"a": 1}, "audio_config": None},
            ("image",),
            "no part for",
        ),
        ({"model_type": "gemma4_unified", "vision_config": None, "audio_config": {"b": 1}}, ("audio",), ""),
        (
            {
                "model_type": "qwen3_omni_moe",
                "thinker_config": BOTH,
            },
            ("image", "audio"),
            "",
        ),
        (
            {"model_type": "mimo_v2", **BOTH},
            ("image",),
            "second",
        ),
    ],
)
def test_a_model_takes_audio_when_its_family_does_and_it_has_the_part(
    tmp_path: Path, config: dict[str, Any], kinds: tuple[str, ...], why: str
) -> None:
    assert vision.choose_vision(folder_of(tmp_path, config), VisionMode.AUTO) == (True, "")
    taken, refusals = vision.media_kinds(config)
    assert tuple(kind for kind in taken if kind not in ("video", STILLS)) == kinds
    assert ("audio" in refusals) == bool(why) and why in refusals.get("audio", "")
    told = {"video" if kind == STILLS else kind for kind in taken}
    assert told | refusals.keys() == {"image", "audio", "video"} and not told & refusals.keys()


@pytest.mark.parametrize(
    ("family", "text", "is_whole", "is_alone"),
    [
        ("paligemma", "gemma", True, True),
        ("paligemma", "gemma2", False, False),
        ("gemma3n", "gemma3n_text", True, False),
        ("gemma4", "gemma4_text", False, False),
        ("mistral3", "ministral3", False, True),
    ],
)
def test_what_reads_prompts_in_one_piece_and_what_has_one_row(
    family: str, text: str, is_whole: bool, is_alone: bool
) -> None:
    config = SEEING | {"model_type": family, "text_config": {"model_type": text}}
    assert vision.why_no_vision(config) == ""
    assert (bool(vision.why_whole(config)), bool(vision.why_alone(config))) == (is_whole, is_alone)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (SEEING, ""),
        (SEEING | {"model_type": "gemma4", "video_token_id": 991}, ""),
        (SEEING | {"model_type": "gemma4"}, "its config names no video_token_id"),
        (SEEING | {"model_type": "glm4v"}, "type 'glm4v' have no input for video"),
    ],
)
def test_video_is_taken_where_mlx_vlm_makes_something_of_it(config: dict[str, Any], words: str) -> None:
    why = vision.why_no_video(config)
    assert words in why and bool(words) == bool(why)
    taken, refusals = vision.media_kinds(config)
    assert ("video" in taken, STILLS in taken) == (not why, bool(why))
    assert "video" not in refusals


def test_frames_are_shown_as_pictures_where_a_prompt_may_have_several() -> None:
    assert vision.media_kinds(SEEING | {"model_type": "llava"})[0] == ("image", STILLS)
    taken, refusals = vision.media_kinds(SEEING | {"model_type": "molmo"})
    assert taken == ("image",) and "one picture only" in refusals["video"]
    hears = {"model_type": "gemma4_unified", "vision_config": None, "audio_config": {"b": 1}}
    assert vision.media_kinds(hears)[0] == ("audio",)


def test_families_that_were_compared_have_a_small_model_and_others_are_said_to_be_untried() -> None:
    folder = Path(__file__).parent / "engine"
    names: set[str] = set()
    for file in ("tiny_vlm_configs.json", "tiny_audio_configs.json"):
        names |= {name.partition("#")[0] for name in json.loads((folder / file).read_text(encoding="utf-8"))}
    refused = {family for family, _ in vision.NEVER} | set(vision.NO_AUDIO)
    assert names - refused == vision.TRIED
    assert vision.why_untried({"model_type": "qwen2_vl"}) == ""
    assert "molmo2 models make of media was never compared" in vision.why_untried({"model_type": "molmo2"})
