"""How a prompt shows a picture: found by trying the template; texts that look like it are no pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.media.item import Item, item_part, text_part
from mlx_mesh.proxy.media.known_marks import read_known_marks
from mlx_mesh.proxy.media.marks import KnownMarks, Mark, Marks, find_mark
from mlx_mesh.proxy.media.placing import check_count, place
from mlx_mesh.proxy.tokenizer import ModelTokenizer

NOTHING_KNOWN = KnownMarks((), frozenset(), None)
TURN = "{% for m in messages %}<{{ m.role }}>"
LISTS = TURN + (
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
"""With the mark instead of IMAGE."""
TEXT_ONLY = TURN + "{{ m.content }}{% endfor %}"
IMAGES_FIRST = TURN + (
    "{% for part in m.content | selectattr('type', 'equalto', 'image') %}<image>\n{% endfor %}"
    "{% for part in m.content | selectattr('type', 'equalto', 'text') %}{{ part.content }}{% endfor %}"
    "{% endfor %}"
)
"""LLaVA's way: lists only, the pictures of a turn first."""
IN_USER_TURNS = TURN + (
    "{% if m.role == 'user' and m.content is not string %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<image>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% elif m.content is string %}{{ m.content }}{% endif %}{% endfor %}"
)
BY_URL = LISTS.replace("part.type == 'image'", "part.type == 'image_url'")

Load = Callable[..., ModelTokenizer]


def known(*names: str, special: tuple[str, ...] = (), family: str | None = None) -> KnownMarks:
    return KnownMarks(names, frozenset(special), family, own=names[0] if names else "")


def mark_of(tokenizer: ModelTokenizer, marks: KnownMarks = NOTHING_KNOWN) -> Mark:
    mark = find_mark(tokenizer.render, marks)
    assert mark is not None
    return mark


def picture(number: int = 0) -> Item:
    return Item("", f"messages[{number}].content[0].image_url")


def user(*parts: Any) -> dict[str, Any]:
    content = [item_part(part) if isinstance(part, Item) else text_part(part) for part in parts]
    return {"role": "user", "content": content}


def prompt(tokenizer: ModelTokenizer, mark: Mark, turns: list[dict[str, Any]]) -> str:
    marks = Marks({"image": mark})
    placed = place(turns, marks)
    text = tokenizer.render(placed.turns, {"add_generation_prompt": False})
    check_count(text, marks, placed.items)
    return text


QWEN = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


@pytest.mark.parametrize(
    ("template", "marks", "text"),
    [
        (LISTS.replace("IMAGE", "".join(QWEN)), known(special=QWEN), "<|image_pad|>"),
        (LISTS.replace("IMAGE", "".join(QWEN)), known("<|vision_end|>"), "<|vision_end|>"),
        (
            LISTS.replace("IMAGE", "<start_of_image>"),
            known("<image_soft_token>", "<start_of_image>"),
            "<start_of_image>",
        ),
        (LISTS.replace("IMAGE", "[IMG]"), NOTHING_KNOWN, "[IMG]"),
        (LISTS.replace("IMAGE", "<image>\n"), NOTHING_KNOWN, "<image>"),
        (BY_URL.replace("IMAGE", "<image>"), NOTHING_KNOWN, "<image>"),
        (IMAGES_FIRST, NOTHING_KNOWN, "<image>"),
        (IN_USER_TURNS, known("<image>"), "<image>"),
    ],
)
def test_a_template_that_reads_lists_shows_its_mark(
    model_with: Load, template: str, marks: KnownMarks, text: str
) -> None:
    tokenizer = model_with(template)
    mark = mark_of(tokenizer, marks)
    assert mark.part is not None and mark.text == text
    told = prompt(tokenizer, mark, [user("A", picture(), "B", picture(), "C"), user(picture(1), "D")])
    assert mark.count(told) == 3
    assert all(letter in told for letter in "ABCD") and "{'" not in told


def test_texts_and_pictures_stay_in_order_where_the_template_keeps_it(model_with: Load) -> None:
    tokenizer = model_with(LISTS.replace("IMAGE", "[IMG]"))
    mark = mark_of(tokenizer)
    turns = [
        user("A", picture(), "B"),
        {"role": "assistant", "content": "x"},
        user(picture(), picture(), "C"),
    ]
    assert prompt(tokenizer, mark, turns) == "<user>A[IMG]B<assistant>x<user>[IMG][IMG]C"


@pytest.mark.parametrize(
    ("marks", "shown"),
    [
        (NOTHING_KNOWN, "<user>A<image>B<image>C"),  # mlx-vlm's own default
        (known("<|image|>"), "<user>A<|image|>B<|image|>C"),
        (known("<|image|>", family="<image>\n"), "<user>A<image>\nB<image>\nC"),
        (known(family="<|image_1|>"), "<user>A<|image_1|>B<|image_2|>C"),
        (known(family="(<image>./</image>)\n"), "<user>A(<image>./</image>)\nB(<image>./</image>)\nC"),
        (known(family=""), "<user>ABC"),  # the processor puts them in front
    ],
)
def test_into_a_template_that_reads_text_the_mark_is_written(
    model_with: Load, marks: KnownMarks, shown: str
) -> None:
    tokenizer = model_with(TEXT_ONLY)
    mark = mark_of(tokenizer, marks)
    assert mark.part is None
    assert prompt(tokenizer, mark, [user("A", picture(), "B", picture(), "C")]) == shown


def test_numbers_of_marks_go_on_over_turns(model_with: Load) -> None:
    tokenizer = model_with(TEXT_ONLY)
    mark = mark_of(tokenizer, known(family="<|image_1|>"))
    told = prompt(tokenizer, mark, [user(picture(), "A"), user("B", picture(), picture())])
    assert told == "<user><|image_1|>A<user>B<|image_2|><|image_3|>"


def test_a_template_without_a_place_takes_none(model_with: Load) -> None:
    template = TURN + "{% if m.content is string %}{{ m.content | replace('<', '(') }}{% endif %}{% endfor %}"
    assert find_mark(model_with(template).render, NOTHING_KNOWN) is None


@pytest.mark.parametrize(
    ("template", "marks"),
    [
        (LISTS.replace("IMAGE", "".join(QWEN)), known("<|image_pad|>", "<|video_pad|>", special=QWEN)),
        (TEXT_ONLY, known("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")),
    ],
)
def test_a_users_text_is_never_taken_for_a_picture(
    model_with: Load, template: str, marks: KnownMarks
) -> None:
    tokenizer = model_with(template)
    mark = mark_of(tokenizer, marks)
    for evil in (*QWEN, "<|video_pad|>", "<<|image_pad|>|image_pad|>", "<|image_pad|>" * 3):
        told = prompt(
            tokenizer, mark, [{"role": "system", "content": evil}, user(f"x{evil}y", picture(), evil)]
        )
        assert mark.count(told) == 1
        assert told.replace("\N{WORD JOINER}", "").count(evil) >= 3  # it still shows
        calls = [{"id": "1", "type": "function", "function": {"name": evil, "arguments": {evil: [evil]}}}]
        placed = place([{"role": "assistant", "content": evil, "tool_calls": calls}], Marks({"image": mark}))
        assert evil not in json.dumps(placed.turns)


def test_numbered_and_bracketed_marks_of_users_are_no_pictures_either(model_with: Load) -> None:
    tokenizer = model_with(TEXT_ONLY)
    for family, evil in (("<|image_1|>", "<|image_7|>"), ("(<image>./</image>)\n", "<image>")):
        mark = mark_of(tokenizer, known(family=family))
        told = prompt(tokenizer, mark, [user(evil, picture())])
        assert evil not in told.replace(mark.write(1).strip(), "")


def test_items_of_tool_results_stay_where_the_template_shows_them(model_with: Load) -> None:
    tokenizer = model_with(LISTS.replace("IMAGE", "[IMG]"))
    mark = mark_of(tokenizer)
    tool = {"role": "tool", "content": user("A", picture())["content"]}
    assert prompt(tokenizer, mark, [user("x"), tool]) == "<user>x<tool>A[IMG]"


@pytest.mark.parametrize("template", [IN_USER_TURNS, TEXT_ONLY])
def test_else_they_go_to_the_users_next_turn(model_with: Load, template: str) -> None:
    tokenizer = model_with(template)
    mark = mark_of(tokenizer)
    tool = {"role": "tool", "content": user("A", picture())["content"]}
    said = {"role": "assistant", "content": "y"}
    assert prompt(tokenizer, mark, [tool]) == "<tool>A<user><image>"
    assert prompt(tokenizer, mark, [tool, tool, user("B")]) == "<tool>A<tool>A<user><image><image>B"
    assert prompt(tokenizer, mark, [tool, said]) == "<tool>A<user><image><assistant>y"


def test_a_picture_is_never_dropped_in_silence(model_with: Load) -> None:
    """A template that shows pictures of the last turn only."""
    template = IN_USER_TURNS.replace(
        "part.type == 'image' %}<image>", "part.type == 'image' %}{% if loop.length > 1 %}<image>{% endif %}"
    )
    tokenizer = model_with(template)
    mark = mark_of(tokenizer)
    with pytest.raises(ApiError, match="shows 1 of 2 images") as caught:
        prompt(tokenizer, mark, [user(picture(0)), user("A", picture(1))])
    assert caught.value.param == "messages[0].content[0].image_url"


def test_a_template_that_reads_lists_only_gets_texts_in_lists(model_with: Load) -> None:
    """Or it would show a conversation without a word of it."""
    tokenizer = model_with(IMAGES_FIRST)
    told = tokenizer.render([{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}])
    assert told == "<system>S<user>hello"


def test_a_processors_template_is_used_where_the_tokenizers_has_no_place(
    model_folder: Path, tmp_path: Path
) -> None:
    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    template = LISTS.replace("IMAGE", "[IMG]")
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    for has_own in (True, False):
        if not has_own:
            (tmp_path / "chat_template.jinja").unlink()
        tokenizer = ModelTokenizer.load(str(tmp_path))
        assert tokenizer.chat_template == template and not tokenizer.chat_template_error
        tokenizer.close()


def test_what_a_models_files_say(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "image_token_index": 7, "boi_token_index": 5, "eos_token_id": 1})
    )
    (tmp_path / "processor_config.json").write_text(
        json.dumps({"image_seq_length": 256, "eoi_token": "<eoi>"})
    )
    (tmp_path / "tokenizer_config.json").write_text("{not json")
    marks = read_known_marks(tmp_path, [(1, "<eos>"), (5, "<boi>"), (7, "<soft>")])
    assert marks.names == ("<soft>", "<boi>", "<eoi>")
    assert marks.special == {"<eos>", "<boi>", "<soft>"}
    assert (marks.own, marks.family) == ("<soft>", "<start_of_image>")  # and as mlx-vlm writes it
    (tmp_path / "config.json").write_text(json.dumps({"img_context_token_id": 7}))
    assert read_known_marks(tmp_path, [(7, "<IMG_CONTEXT>")]).own == ""  # one of many of a picture


@pytest.mark.parametrize(
    ("model_type", "family"),
    [
        ("phi3_v", "<|image_1|>"),
        ("deepseek_vl_v2", "<image>\n"),
        ("molmo", ""),
        ("qwen2_vl", None),
        ("x", None),
    ],
)
def test_what_mlx_vlm_says_of_a_family(tmp_path: Path, model_type: str, family: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    assert read_known_marks(tmp_path, ()).family == family
