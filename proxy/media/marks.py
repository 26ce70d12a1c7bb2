"""How a model's prompt shows a picture: found by trying its chat template, not by the model's name.

A template that reads lists puts the model's own mark where an image part stands. Into one that reads text
only, the mark is written in front of, or between, the texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from mlx_mesh.mesh.errors import MeshError

Turn = dict[str, Any]
Render = Callable[[list[Turn]], str]
"""Renders turns; raises MeshError when the template refuses them."""

_A, _B, _C = "quill amber", "slate nine", "fjord tulip"  # words that stand in no template
_WORD_JOINER = "\N{WORD JOINER}"
_TOOL_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {}}}


@dataclass(frozen=True, slots=True)
class ImageMark:
    """`part`: what stands for a picture in a content list, None when the template reads no lists: then `text`
    is written. `text` is '' when the model's processor puts pictures in front by itself. `counted` finds one
    mark in a prompt; `reserved` finds whatever of a user's text could be taken for one."""

    part: dict[str, str] | None
    text: str
    counted: re.Pattern[str] | None
    reserved: re.Pattern[str] | None
    in_tool_turns: bool = False

    def write(self, number: int) -> str:
        """The mark of the picture with this number, from 1 on, for templates that read text."""
        return re.sub(r"_1\|>", f"_{number}|>", self.text)

    def count(self, prompt: str) -> int | None:
        """Marks in a prompt; None when there are none to count."""
        return None if self.counted is None else len(self.counted.findall(prompt))

    def harmless(self, value: Any) -> Any:
        """`value`, all texts in it such that none can be taken for a mark: a word joiner, which does not
        show, goes behind the first character of what could."""
        if isinstance(value, str):
            return self._harmless(value)
        if isinstance(value, dict):
            return {self.harmless(key): self.harmless(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.harmless(one) for one in value]
        return value

    def _harmless(self, text: str) -> str:
        if self.reserved is None:
            return text
        while self.reserved.search(text):  # one may stand inside another
            text = self.reserved.sub(lambda found: found[0][:1] + _WORD_JOINER + found[0][1:], text)
        return text


@dataclass(frozen=True, slots=True)
class KnownMarks:
    """What the model's files and mlx-vlm say. `names`: its tokens for media, the picture's own first;
    `special`: all its added tokens; `family`: what mlx-vlm writes for a picture in a text, None = nothing is
    known, '' = it writes nothing, as the processor does; `own`: of `names`, the one for a whole picture."""

    names: tuple[str, ...]
    special: frozenset[str]
    family: str | None
    own: str = ""


def find_mark(render: Render, known: KnownMarks) -> ImageMark | None:
    """None when there is no place for a picture."""
    for part in ({"type": "image"}, {"type": "image_url"}):
        if (found := _in_lists(render, part, known)) is not None:
            return found
    text = known.family
    if text is None:
        text = known.own or "<image>"  # mlx-vlm's default
    if text == "":
        return ImageMark(None, "", None, _any_of(known.names))
    mark = text.strip()
    counted = re.compile(re.sub(r"_1(\\)?\|>", r"_\\d+\\|>", re.escape(mark)))
    if len(counted.findall(_tried(render, text + _A) or "")) != 1:
        return None
    reserved = _any_of(known.names, f"{counted.pattern}|{re.escape(_inner(mark))}")
    return ImageMark(None, text, counted, reserved)


def _in_lists(render: Render, part: dict[str, str], known: KnownMarks) -> ImageMark | None:
    none = _tried(render, [_text(_A), _text(_B), _text(_C)])
    one = _tried(render, [_text(_A), part, _text(_B), _text(_C)])
    two = _tried(render, [_text(_A), part, _text(_B), part, _text(_C)])
    if none is None or one is None or two is None or "{'" in one + two:
        return None
    if not all(word in prompt for word in (_A, _B, _C) for prompt in (none, one, two)):
        return None
    added = [token for token in known.special if _grows(token, none, one, two)]
    named = [token for token in known.names if _grows(token, none, one, two)]
    literal = _inserted(none, one).strip()
    candidates = [*named, *sorted(added, key=_rank), *([literal] if literal else [])]
    mark = next((token for token in candidates if _grows(token, none, one, two)), "")
    if not mark:
        return None
    counted = re.compile(re.escape(mark))
    return ImageMark(
        part=part,
        text=mark,
        counted=counted,
        reserved=_any_of([mark, *known.names, *added]),
        in_tool_turns=_shows_in_tool_turn(render, part, counted),
    )


def _shows_in_tool_turn(render: Render, part: dict[str, str], counted: re.Pattern[str]) -> bool:
    turns: list[Turn] = [
        {"role": "user", "content": _A},
        {"role": "assistant", "content": "", "tool_calls": [_TOOL_CALL]},
        {"role": "tool", "content": [_text(_B), part], "tool_call_id": "abcdefghi", "name": "look"},
    ]
    try:
        prompt = render(turns)
    except MeshError:
        return False
    return _B in prompt and "{'" not in prompt and len(counted.findall(prompt)) == 1


def _tried(render: Render, content: Any) -> str | None:
    try:
        return render([{"role": "user", "content": content}])
    except MeshError:
        return None


def _text(text: str) -> dict[str, str]:
    return {"type": "text", "text": text, "content": text}


def _grows(token: str, none: str, one: str, two: str) -> bool:
    """Each picture adds exactly one of it."""
    start = none.count(token)
    return one.count(token) == start + 1 and two.count(token) == start + 2


def _rank(token: str) -> tuple[bool, bool, str]:
    """Of several tokens that each picture adds, the picture's own first, then its frame's."""
    lower = token.lower()
    is_frame = any(word in lower for word in ("start", "end", "begin"))
    return not any(word in lower for word in ("image", "img", "media")), is_frame, token


def _inserted(none: str, one: str) -> str:
    """What stands in `one` and not in `none`, between what they have in common."""
    start = 0
    while start < min(len(none), len(one)) and none[start] == one[start]:
        start += 1
    end = 0
    while end < min(len(none), len(one)) - start and none[-1 - end] == one[-1 - end]:
        end += 1
    return one[start : len(one) - end]


def _inner(mark: str) -> str:
    """Of a mark in brackets, like (<image>./</image>), the tag alone: processors look for that, too."""
    found = re.search(r"<[^<>\s]+>", mark)
    return found[0] if found else mark


def _any_of(texts: Iterable[str], more: str = "") -> re.Pattern[str] | None:
    patterns = [re.escape(text) for text in dict.fromkeys(texts) if text]
    patterns += [more] if more else []
    return re.compile("|".join(patterns)) if patterns else None
