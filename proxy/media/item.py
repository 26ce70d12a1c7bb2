"""One picture, audio or video of a prompt, from the request's part to what the engine gets."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from mlx_mesh.mesh.messages import Media, Video
from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.media.frame_wish import NO_WISH, FrameWish

NOUNS = {"image": "picture", "audio": "audio", "video": "video"}
"""By kind, for messages."""

_LIKE = {"image": "image/png", "audio": "audio/wav", "video": "video/mp4"}
_INDEX = re.compile(r"(image|audio|video)s\[(\d+)\]")


class Item:
    """Stands in a turn's content as `{"type": kind, "item": ...}`. `source` is an http(s) or data URL, or
    bare base64 when `is_url` is false; it is given up once the file is read. `param` names the request's
    part, for errors. `media_type` is what the client says that it is, '' = nothing; `format` the same in
    OpenAI's word. `inline`: how the dialect takes files inside a request, where that is not a data URL, for
    errors. What the engine gets is in `file`, or in `video`."""

    __slots__ = (
        "detail",
        "file",
        "format",
        "inline",
        "is_url",
        "kind",
        "media_type",
        "param",
        "pixels",
        "seconds",
        "source",
        "video",
        "wish",
    )

    def __init__(
        self,
        source: str,
        param: str,
        *,
        kind: str = "image",
        is_url: bool = True,
        media_type: str = "",
        detail: str = "auto",
        format: str = "",
        inline: str = "",
        wish: FrameWish = NO_WISH,
    ) -> None:
        self.source = source
        self.param = param
        self.kind = kind
        self.is_url = is_url
        self.media_type = media_type
        self.detail = detail
        self.format = format
        self.inline = inline or f"data URLs ({like(kind)})"
        self.wish = wish
        self.file = b""
        self.video: Video | None = None
        self.seconds = 0.0
        self.pixels = 0  # of a picture

    @property
    def is_read(self) -> bool:
        return bool(self.file) or self.video is not None

    @property
    def num_bytes(self) -> int:
        """Of what the engine gets."""
        return len(self.file) + (sum(map(len, self.video.frames)) if self.video is not None else 0)

    def __repr__(self) -> str:
        """Never the data: this may reach a log."""
        return f"Item({self.kind}, {self.param}, {self.num_bytes} bytes)"


def like(kind: str) -> str:
    """A data URL of this kind, for messages."""
    return f"data:{_LIKE[kind]};base64,…"


def items_of(turns: Iterable[dict[str, Any]]) -> list[Item]:
    """In the order of the prompt."""
    return [
        part["item"]
        for turn in turns
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
        if isinstance(part.get("item"), Item)
    ]


def of_kind(items: Iterable[Item], kind: str) -> list[Item]:
    return [item for item in items if item.kind == kind]


def media_of(items: Sequence[Item], text: str, min_pixels: int, max_pixels: int) -> Media | None:
    """What the engine gets of items that are read, with the prompt's text. None without any."""
    if not items:
        return None
    return Media(
        text=text,
        images=tuple(item.file for item in of_kind(items, "image")),
        min_pixels=min_pixels,
        max_pixels=max_pixels,
        audios=tuple(item.file for item in of_kind(items, "audio")),
        videos=tuple(item.video for item in items if item.video is not None),
    )


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def item_part(item: Item) -> dict[str, Any]:
    return {"type": item.kind, "item": item}


def joined(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A turn's content: text as one string, a line each; with items a list, in the order given, in which only
    texts side by side are joined."""
    merged: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and merged and merged[-1]["type"] == "text":
            merged[-1] = text_part(f"{merged[-1]['text']}\n{part['text']}")
        else:
            merged.append(part)
    if all(part["type"] == "text" for part in merged):
        return merged[0]["text"] if merged else ""
    return merged


def broken(item: Item, why: str, code: str = "") -> ApiError:
    """A 400 that names the part. `code`: the end of the error's, behind the kind, like "too_large"; '' = it
    is invalid."""
    full = f"{item.kind}_{code}" if code else f"invalid_{item.kind}"
    return invalid(f"'{item.param}' {why}", param=item.param, code=full)


Params = Mapping[str, Sequence[str]]
"""By kind, the request's parts that are of it, in the order of the prompt."""


def params_of(items: Iterable[Item]) -> dict[str, tuple[str, ...]]:
    items = list(items)
    return {kind: tuple(one.param for one in of_kind(items, kind)) for kind in NOUNS}


def blamed(param: str, params: Params) -> str:
    """The request's part that the engine means: it says `images[2]`, or nothing. '' = not known."""
    if found := _INDEX.fullmatch(param):
        of_its_kind, index = params.get(found[1], ()), int(found[2])
        return of_its_kind[index] if index < len(of_its_kind) else ""
    all_of_them = [one for some in params.values() for one in some]
    return all_of_them[0] if len(all_of_them) == 1 else ""


def told(message: str, param: str, params: Params) -> str:
    """What the engine says of an item, which it names like `images[2]`, with the request's part instead."""
    named = blamed(param, params)
    return (
        f"'{named}'{message.removeprefix(param)}"
        if named and param and message.startswith(param)
        else message
    )
