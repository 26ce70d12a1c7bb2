"""How a model's prompt shows a picture, audio or video: found by trying its chat template, not by the model's
name.

A template that reads lists puts the model's own mark where a part of that kind stands. Into one that reads
text only, or none of that kind, the mark is written in front of, or between, the texts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mlx_mesh.mesh.errors import MeshError

Turn = dict[str, Any]
Render = Callable[[list[Turn]], str]
"""Renders turns; raises MeshError when the template refuses them."""

_A, _B, _C = "quill amber", "slate nine", "fjord tulip"  # words that stand in no template
_WORD_JOINER = "\N{WORD JOINER}"
_TOOL_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "look", "arguments": {}}}


_PARTS = {
    "image": ({"type": "image"}, {"type": "image_url"}),
    "audio": ({"type": "audio"}, {"type": "audio_url"}, {"type": "input_audio"}),
    "video": ({"type": "video"}, {"type": "video_url"}),
}
"""By kind, what templates are tried with; the first that is shown counts."""

_WORDS = {"image": ("image", "img", "media"), "audio": ("audio", "sound"), "video": ("video",)}
"""Of a kind's own token, for templates that put others around it."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Of one kind. `part`: what stands for an item in a content list, None when the template reads no lists
    of them: then `text` is written. `text` is '' when the model's processor puts items in front by itself.
    `counted` finds one mark in a prompt; `reserved` finds whatever of a user's text could be taken for
    one."""

    part: dict[str, str] | None
    text: str
    counted: re.Pattern[str] | None
    reserved: re.Pattern[str] | None
    in_tool_turns: bool = False

    def write(self, number: int) -> str:
        """The mark of the item with this number, from 1 on, for templates that read text."""
        return re.sub(r"_1\|>", f"_{number}|>", self.text)

    def count(self, prompt: str) -> int | None:
        """Marks in a prompt; None when there are none to count."""
        return None if self.counted is None else len(self.counted.findall(prompt))


@dataclass(frozen=True, slots=True)
class Marks:
    """Of all kinds that the model takes."""

    of: Mapping[str, Mark]

    @property
    def reads_lists(self) -> bool:
        return any(mark.part is not None for mark in self.of.values())

    def count(self, prompt: str) -> int:
        return sum(mark.count(prompt) or 0 for mark in self.of.values())

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
        reserved = [mark.reserved for mark in self.of.values() if mark.reserved is not None]
        while any(one.search(text) for one in reserved):  # one may stand inside another
            for one in reserved:
                text = one.sub(lambda found: found[0][:1] + _WORD_JOINER + found[0][1:], text)
        return text


@dataclass(frozen=True, slots=True)
class KnownMarks:
    """What the model's files and mlx-vlm say, for one kind. `names`: its tokens for media, the kind's own
    first; `special`: all its added tokens; `family`: what mlx-vlm writes for an item in a text, None =
    nothing is known, '' = it writes nothing, as the processor does; `own`: of `names`, the one for a whole
    item."""

    names: tuple[str, ...]
    special: frozenset[str]
    family: str | None
    own: str = ""


def find_marks(render: Render, known: Mapping[str, KnownMarks]) -> Marks:
    """Of the kinds that have a place. A kind that a prompt shows like another one has none, and neither has
    one that a template leaves out which reads lists."""
    found: dict[str, Mark] = {}
    for kind in sorted(known, key=list(_PARTS).index):
        mark = find_mark(render, known[kind], kind)
        if mark is None or any(mark.text == other.text for other in found.values()):
            continue
        if mark.part is None and Marks(found).reads_lists:
            continue
        found[kind] = mark
    return Marks(found)


def find_mark(render: Render, known: KnownMarks, kind: str = "image") -> Mark | None:
    """None when there is no place for an item of this kind."""
    for part in _PARTS[kind]:
        if (found := _in_lists(render, part, known, kind)) is not None:
            return found
    text = known.family
    if text is None:
        text = known.own or ("<image>" if kind == "image" else None)  # mlx-vlm's default
    if text is None or (text == "" and kind != "image"):
        return None
    if text == "":
        return Mark(None, "", None, _any_of(known.names))
    mark = text.strip()
    counted = re.compile(re.sub(r"_1(\\)?\|>", r"_\\d+\\|>", re.escape(mark)))
    if len(counted.findall(_tried(render, text + _A) or "")) != 1:
        return None
    reserved = _any_of(known.names, f"{counted.pattern}|{re.escape(_inner(mark))}")
    return Mark(None, text, counted, reserved)


def _in_lists(render: Render, part: dict[str, str], known: KnownMarks, kind: str) -> Mark | None:
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
    candidates = [
        *named,
        *sorted(added, key=lambda token: _rank(token, kind)),
        *([literal] if literal else []),
    ]
    mark = next((token for token in candidates if _grows(token, none, one, two)), "")
    if not mark:
        return None
    counted = re.compile(re.escape(mark))
    return Mark(
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
    """Each item adds exactly one of it."""
    start = none.count(token)
    return one.count(token) == start + 1 and two.count(token) == start + 2


def _rank(token: str, kind: str) -> tuple[bool, bool, str]:
    """Of several tokens that each item adds, the item's own first, then its frame's."""
    lower = token.lower()
    is_frame = any(word in lower for word in ("start", "end", "begin", "bos", "eos"))
    return not any(word in lower for word in _WORDS[kind]), is_frame, token


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
