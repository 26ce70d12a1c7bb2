"""Turns with pictures as the model's chat template reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.marks import ImageMark
from mlx_mesh.proxy.media.picture import Picture, image_part, pictures_of, text_part

Turn = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Placed:
    """`pictures` in the order of their marks in the prompt."""

    turns: list[Turn]
    pictures: list[Picture]


def place(turns: list[Turn], mark: ImageMark) -> Placed:
    """Each picture at its place; no text of a user can be taken for one."""
    if not mark.in_tool_turns:
        turns = _out_of_tool_turns(turns)
    placed: list[Turn] = []
    num_before = 0
    for turn in turns:
        others = mark.harmless({name: value for name, value in turn.items() if name != "content"})
        content = turn.get("content")
        if isinstance(content, list):
            num_here = len(pictures_of([turn]))
            content = _content(content, mark, num_before)
            num_before += num_here
        else:
            content = mark.harmless(content)
        placed.append({**others, "content": content} if "content" in turn else others)
    return Placed(placed, pictures_of(turns))


def check_count(prompt: str, mark: ImageMark, pictures: list[Picture]) -> None:
    """Raises ApiError 400 unless the prompt has a mark for every picture, and no other."""
    found = mark.count(prompt)
    if found is None or found == len(pictures):
        return
    param = pictures[0].param if pictures else "messages"
    raise invalid(
        f"The model's chat template shows {found} of {len(pictures)} images of this conversation. Give "
        "images in the user's turns only, or another template with --chat-template.",
        param=param,
        code="chat_template_error",
    )


def _content(parts: list[dict[str, Any]], mark: ImageMark, num_before: int) -> str | list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    number = num_before
    for part in parts:
        if "picture" not in part:
            text = mark.harmless(part["text"])
            shown.append({"type": "text", "text": text, "content": text})  # some read the one, some the other
            continue
        number += 1
        shown.append(dict(mark.part) if mark.part is not None else text_part(mark.write(number)))
    if mark.part is not None:
        return shown
    return "".join(part["text"] for part in shown)


def _out_of_tool_turns(turns: list[Turn]) -> list[Turn]:
    """Pictures of tool results go to the beginning of the user's next turn, or into one of their own."""
    moved: list[Turn] = []
    waiting: list[Picture] = []
    for turn in turns:
        if turn["role"] == "tool" and (pictures := pictures_of([turn])):
            texts = [part["text"] for part in turn["content"] if "picture" not in part]
            moved.append({**turn, "content": "\n".join(texts)})
            waiting += pictures
            continue
        if waiting and turn["role"] != "tool":
            parts = [image_part(picture) for picture in waiting]
            waiting = []
            if turn["role"] == "user":
                own = turn["content"]
                turn = {**turn, "content": [*parts, *(own if isinstance(own, list) else [text_part(own)])]}
            else:
                moved.append({"role": "user", "content": parts})
        moved.append(turn)
    return [*moved, {"role": "user", "content": [image_part(one) for one in waiting]}] if waiting else moved
