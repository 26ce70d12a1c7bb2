"""Marks of audio and video beside those of pictures, and what a model's files say about both."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.media.frame_wish import FrameWish
from mlx_mesh.proxy.media.item import Item, item_part, text_part
from mlx_mesh.proxy.media.known_marks import read_known_marks
from mlx_mesh.proxy.media.marks import KnownMarks, Marks, find_marks
from mlx_mesh.proxy.media.model_files import read_sampling, read_sampling_rate
from mlx_mesh.proxy.media.placing import check_count, place
from mlx_mesh.proxy.media.sampling import Sampling
from mlx_mesh.proxy.tokenizer import ModelTokenizer

TURN = "{% for m in messages %}<{{ m.role }}>"
PARTS = (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "KINDS{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT_ONLY = TURN + "{{ m.content }}{% endfor %}"
EMPTY = KnownMarks((), frozenset(), None)

Load = Callable[..., ModelTokenizer]


def template(**shown: str) -> str:
    """Lists, with these texts for parts of these types."""
    cases = [f"if part.type == '{name}' %}}{text}{{% " for name, text in shown.items()]
    return TURN + PARTS.replace("KINDS", "{% " + "el".join(cases).removesuffix("{% "))


def marks_of(tokenizer: ModelTokenizer, *kinds: str, **known: KnownMarks) -> Marks:
    return find_marks(tokenizer.render, {kind: known.get(kind, EMPTY) for kind in kinds})


def item(kind: str, number: int = 0) -> Item:
    return Item("", f"messages[0].content[{number}].{kind}", kind=kind)


def user(*parts: Item | str) -> dict[str, Any]:
    content = [item_part(part) if isinstance(part, Item) else text_part(part) for part in parts]
    return {"role": "user", "content": content}


def prompt(tokenizer: ModelTokenizer, marks: Marks, turns: list[dict[str, Any]]) -> str:
    placed = place(turns, marks)
    text = tokenizer.render(placed.turns, {"add_generation_prompt": False})
    check_count(text, marks, placed.items)
    return text


def test_each_kind_has_its_own_mark_in_a_template_that_reads_lists(model_with: Load) -> None:
    frame = "<|vision_start|>{}<|vision_end|>"
    tokenizer = model_with(
        template(
            image=frame.format("<|image_pad|>"),
            video_url=frame.format("<|video_pad|>"),
            input_audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        ),
        ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<|audio_bos|>", "<|AUDIO|>",
         "<|audio_eos|>"),
    )  # fmt: skip
    special = frozenset(text for _, text in tokenizer.added_tokens)
    known = {kind: KnownMarks((), special, None) for kind in ("image", "audio", "video")}
    marks = find_marks(tokenizer.render, known)
    assert {kind: mark.text for kind, mark in marks.of.items()} == {
        "image": "<|image_pad|>",
        "audio": "<|AUDIO|>",
        "video": "<|video_pad|>",
    }
    assert marks.of["video"].part == {"type": "video_url"}
    told = prompt(tokenizer, marks, [user("A", item("audio"), "B", item("image"), item("video"), "C")])
    assert told.startswith("<user>A<|audio_bos|><|AUDIO|><|audio_eos|>B<|vision_start|><|image_pad|>")
    for evil in ("<|AUDIO|>", "<|video_pad|>", "<|image_pad|>", "<<|AUDIO|>|AUDIO|>"):
        told = prompt(tokenizer, marks, [user(evil, item("audio"), evil)])
        assert [mark.count(told) for mark in marks.of.values()] == [0, 1, 0]


def test_a_kind_that_the_template_leaves_out_has_no_place(model_with: Load) -> None:
    tokenizer = model_with(template(image="<image>"))
    own = KnownMarks(("<audio>",), frozenset(), None, own="<audio>")
    assert [*marks_of(tokenizer, "image", "audio", "video", audio=own).of] == ["image"]


def test_a_kind_that_is_shown_like_another_has_no_place(model_with: Load) -> None:
    tokenizer = model_with(template(image="<media>", audio="<sound>", video="<media>"))
    assert [*marks_of(tokenizer, "image", "audio", "video").of] == ["image", "audio"]
    assert [*marks_of(tokenizer, "video").of] == ["video"]


def test_into_a_template_that_reads_text_the_familys_marks_are_written(
    model_with: Load, tmp_path: Path
) -> None:
    tokenizer = model_with(TEXT_ONLY)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phi4mm"}))
    known = {kind: read_known_marks(tmp_path, (), kind) for kind in ("image", "audio", "video")}
    assert [known[kind].family for kind in known] == ["<|image_1|>", "<|audio_1|>", None]
    marks = find_marks(tokenizer.render, known)
    told = prompt(tokenizer, marks, [user("A", item("audio"), item("image"), "B"), user(item("audio"), "C")])
    assert told == "<user>A<|audio_1|><|image_1|>B<user><|audio_2|>C"
    assert [*marks.of] == ["image", "audio"]


def test_an_own_token_is_written_where_the_template_reads_text(model_with: Load) -> None:
    own = KnownMarks(("<|audio|>",), frozenset(), None, own="<|audio|>")
    tokenizer = model_with(TEXT_ONLY)
    marks = marks_of(tokenizer, "audio", "video", audio=own)
    assert prompt(tokenizer, marks, [user("A", item("audio"))]) == "<user>A<|audio|>"


def test_a_template_that_swallows_one_is_refused(model_with: Load) -> None:
    only_first = template(image="<image>", audio="{% if loop.index0 < 2 %}<audio>{% endif %}")
    tokenizer = model_with(only_first)
    marks = Marks(marks_of(model_with(template(image="<image>", audio="<audio>")), "image", "audio").of)
    with pytest.raises(ApiError, match="shows 1 of 2 audios") as caught:
        prompt(tokenizer, marks, [user(item("audio", 0), "x", "y", item("audio", 1))])
    assert (caught.value.code, caught.value.param) == ("chat_template_error", "messages[0].content[0].audio")


def test_out_of_tool_turns_each_kind_goes_as_its_template_wants(model_with: Load) -> None:
    """Pictures are shown there, sounds are not."""
    text = TURN + (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
        "{% if part.type == 'image' %}<image>{% elif part.type == 'audio' and m.role == 'user' %}<audio>"
        "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    tokenizer = model_with(text)
    marks = marks_of(tokenizer, "image", "audio")
    assert marks.of["image"].in_tool_turns and not marks.of["audio"].in_tool_turns
    result = {**user("T", item("image"), item("audio")), "role": "tool", "tool_call_id": "abcdefghi"}
    told = prompt(tokenizer, marks, [{"role": "user", "content": "?"}, result, user("B")])
    assert told == "<user>?<tool>T<image><user><audio>B"


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("files", "rate"),
    [
        ({}, 16000),
        ({"preprocessor_config.json": {"sampling_rate": 24000}}, 24000),
        ({"processor_config.json": {"feature_extractor": {"sampling_rate": 22050}}}, 22050),
        ({"processor_config.json": {"audio_sampling_rate": 32000}}, 32000),
        ({"preprocessor_config.json": {"sampling_rate": 0}}, 16000),
        ({"preprocessor_config.json": {"sampling_rate": "fast"}}, 16000),
        ({"preprocessor_config.json": [1]}, 16000),
    ],
)
def test_the_sampling_rate_that_a_model_takes(tmp_path: Path, files: dict[str, Any], rate: int) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_sampling_rate(tmp_path) == rate


@pytest.mark.parametrize(
    ("kind", "files", "sampling"),
    [
        ("qwen2_vl", {}, Sampling()),
        (
            "qwen3_vl",
            {"video_preprocessor_config.json": {"fps": 1, "min_frames": 6, "max_frames": 99999}},
            Sampling(fps=1.0, min_frames=6),
        ),
        ("x", {"preprocessor_config.json": {"video_processor": {"fps": 4}, "fps": 1}}, Sampling(fps=4.0)),
        ("x", {"video_preprocessor_config.json": {"fps": float("nan"), "max_frames": -1}}, Sampling()),
        ("gemma4", {}, Sampling(max_frames=32)),
        (
            "gemma4",
            {"processor_config.json": {"video_processor": {"num_frames": 16}}},
            Sampling(max_frames=16),
        ),
        ("minicpmv4_6", {"preprocessor_config.json": {"max_num_frames": 64}}, Sampling(max_frames=64)),
        ("mage_vl", {}, Sampling(min_frames=1, max_frames=32, factor=1)),
    ],
)
def test_the_frames_that_a_model_takes(
    tmp_path: Path, kind: str, files: dict[str, Any], sampling: Sampling
) -> None:
    for name, content in {**files, "config.json": {"model_type": kind}}.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert read_sampling(tmp_path) == sampling


def test_wishes_come_before_files() -> None:
    own = Sampling(fps=1.0, min_frames=8, max_frames=64)
    assert FrameWish().on(own) == own
    assert FrameWish(fps=3.0).on(own) == Sampling(fps=3.0, min_frames=8, max_frames=64)
    assert FrameWish(max_frames=4).on(own) == Sampling(fps=1.0, min_frames=4, max_frames=4)
    assert FrameWish(min_frames=100).on(own) == Sampling(fps=1.0, min_frames=100, max_frames=100)
    assert FrameWish(num_frames=9).over(FrameWish(fps=2.0, max_frames=5)) == FrameWish(
        num_frames=9, max_frames=5
    )
    assert FrameWish(min_frames=3).over(FrameWish(fps=2.0)) == FrameWish(fps=2.0, min_frames=3)
