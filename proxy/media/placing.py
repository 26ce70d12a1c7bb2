"""Turns with pictures, audio and video as the model's chat template reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.item import Item, item_part, items_of, of_kind, text_part
from mlx_mesh.proxy.media.marks import Marks

Turn = dict[str, Any]

_PLURALS = {"image": "images", "audio": "audios", "video": "videos"}


@dataclass(frozen=True, slots=True)
class Placed:
    """`items` of each kind in the order of their marks in the prompt."""

    turns: list[Turn]
    items: list[Item]


def place(turns: list[Turn], marks: Marks) -> Placed:
    """Each item at its place; no text of a user can be taken for one."""
    turns = _out_of_tool_turns(turns, marks)
    placed: list[Turn] = []
    numbers = dict.fromkeys(marks.of, 0)
    for turn in turns:
        others = marks.harmless({name: value for name, value in turn.items() if name != "content"})
        content = turn.get("content")
        if isinstance(content, list):
            shown: Any = _content(content, marks, numbers)
        else:
            shown = marks.harmless(content)
        placed.append({**others, "content": shown} if "content" in turn else others)
    return Placed(placed, items_of(turns))


def check_count(prompt: str, marks: Marks, items: Sequence[Item]) -> None:
    """Raises ApiError 400 unless the prompt has a mark for every item, and no other."""
    for kind, mark in marks.of.items():
        found, here = mark.count(prompt), of_kind(items, kind)
        if found is None or found == len(here):
            continue
        raise invalid(
            f"The model's chat template shows {found} of {len(here)} {_PLURALS[kind]} of this "
            "conversation. Give "
            f"{_PLURALS[kind]} in the user's turns only, or another template with --chat-template.",
            param=here[0].param if here else "messages",
            code="chat_template_error",
        )


def _content(
    parts: list[dict[str, Any]], marks: Marks, numbers: dict[str, int]
) -> str | list[dict[str, Any]]:
    """`numbers`: by kind, how many items stand before; counted on."""
    shown: list[dict[str, Any]] = []
    for part in parts:
        if "item" not in part:
            shown.append(_both(marks.harmless(part["text"])))
            continue
        kind = part["item"].kind
        numbers[kind] += 1
        mark = marks.of[kind]
        shown.append(dict(mark.part) if mark.part is not None else _both(mark.write(numbers[kind])))
    if marks.reads_lists:
        return shown
    return "".join(part["text"] for part in shown)


def _both(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "content": text}  # some templates read the one, some the other


def _out_of_tool_turns(turns: list[Turn], marks: Marks) -> list[Turn]:
    """Items of tool results that the template does not show there go to the beginning of the user's next
    turn, or into one of their own."""
    moved: list[Turn] = []
    waiting: list[Item] = []
    for turn in turns:
        hidden = [item for item in items_of([turn]) if not marks.of[item.kind].in_tool_turns]
        if turn["role"] == "tool" and hidden:
            left = [part for part in turn["content"] if part.get("item") not in hidden]
            only_text = all("item" not in part for part in left)
            moved.append({**turn, "content": "\n".join(part["text"] for part in left) if only_text else left})
            waiting += hidden
            continue
        if waiting and turn["role"] != "tool":
            parts = [item_part(item) for item in waiting]
            waiting = []
            if turn["role"] == "user":
                own = turn["content"]
                turn = {**turn, "content": [*parts, *(own if isinstance(own, list) else [text_part(own)])]}
            else:
                moved.append({"role": "user", "content": parts})
        moved.append(turn)
    return [*moved, {"role": "user", "content": [item_part(one) for one in waiting]}] if waiting else moved
