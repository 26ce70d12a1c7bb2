"""One picture of a prompt, from the request's part to the file's bytes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from mlx_mesh.proxy.errors import ApiError, invalid

_INDEX = re.compile(r"images\[(\d+)\]")


class Picture:
    """Stands in a turn's content as `{"type": "image", "picture": ...}`. `source` is an http(s) or data URL,
    or bare base64 when `is_url` is false; it is given up once `file` is read. `param` names the request's
    part, for errors. `media_type` is what the client says that it is, '' = nothing."""

    __slots__ = ("detail", "file", "is_url", "media_type", "param", "source")

    def __init__(
        self, source: str, param: str, *, is_url: bool = True, media_type: str = "", detail: str = "auto"
    ) -> None:
        self.source = source
        self.param = param
        self.is_url = is_url
        self.media_type = media_type
        self.detail = detail
        self.file = b""

    def __repr__(self) -> str:
        """Never the data: this may reach a log."""
        return f"Picture({self.param}, {len(self.file)} bytes)"


def pictures_of(turns: Iterable[dict[str, Any]]) -> list[Picture]:
    """In the order of the prompt."""
    return [
        part["picture"]
        for turn in turns
        if isinstance(turn.get("content"), list)
        for part in turn["content"]
        if isinstance(part.get("picture"), Picture)
    ]


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(picture: Picture) -> dict[str, Any]:
    return {"type": "image", "picture": picture}


def joined(parts: Sequence[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """A turn's content: text as one string, a line each; with pictures a list, in the order given, in which
    only texts side by side are joined."""
    merged: list[dict[str, Any]] = []
    for part in parts:
        if part["type"] == "text" and merged and merged[-1]["type"] == "text":
            merged[-1] = text_part(f"{merged[-1]['text']}\n{part['text']}")
        else:
            merged.append(part)
    if all(part["type"] == "text" for part in merged):
        return merged[0]["text"] if merged else ""
    return merged


def broken(picture: Picture, why: str, code: str = "invalid_image") -> ApiError:
    """A 400 that names the part."""
    return invalid(f"'{picture.param}' {why}", param=picture.param, code=code)


def blamed(param: str, params: Sequence[str]) -> str:
    """The request's part that the engine means: it says `images[2]`, or nothing. '' = not known."""
    if found := _INDEX.fullmatch(param):
        index = int(found[1])
        return params[index] if index < len(params) else ""
    return params[0] if len(params) == 1 else ""
