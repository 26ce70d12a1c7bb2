"""The parts of a message, in each dialect: text, or a picture that is still to be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.media.picture import Picture, image_part, joined, text_part

Content = str | list[dict[str, Any]]
"""Of a turn: text, or texts and pictures in order."""

DETAILS = ("auto", "low", "high", "original")
_TEXTS = ("text", "input_text", "output_text", "refusal")
_IMAGES = ("image_url", "input_image")


@dataclass(frozen=True, slots=True)
class PartReader:
    """`refusal`: why this mesh takes no pictures, '' = it does. Methods raise ApiError 400 that names the
    part."""

    refusal: str = "this model takes text only"

    def openai(
        self, content: str | Sequence[dict[str, Any]] | None, param: str, *, may_show: bool = True
    ) -> Content:
        """Content of chat completions and responses. `may_show`: the turn is one that may have pictures."""
        if content is None or isinstance(content, str):
            return content or ""
        parts = []
        for at, part in enumerate(content):
            here = f"{param}[{at}]"
            kind = part.get("type", "text")
            if kind in _IMAGES:
                self.require_image(here, kind, may_show)
                parts.append(image_part(_openai_image(part, kind, here)))
                continue
            if kind not in _TEXTS:
                raise self.unsupported(here, kind)
            text = part.get("refusal" if kind == "refusal" else "text")
            if text is not None and not isinstance(text, str):
                raise invalid(f"Invalid '{here}.text': it must be a string.", param=f"{here}.text")
            parts.append(text_part(text or ""))
        return joined(parts)

    def anthropic_image(self, block: dict[str, Any], param: str) -> Picture:
        """A block of type image."""
        self.require_image(param, "image", may_show=True)
        source = block.get("source")
        here = f"{param}.source"
        if not isinstance(source, dict):
            raise invalid(f"Invalid '{here}': it must be an object.", param=here, code="invalid_image")
        match source.get("type"):
            case "base64":
                media_type = source.get("media_type")
                if not isinstance(media_type, str) or not media_type:
                    raise invalid(f"Invalid '{here}.media_type': like image/png.", param=f"{here}.media_type")
                data = _text(source.get("data"), f"{here}.data")
                return Picture(data, here, is_url=False, media_type=media_type.lower())
            case "url":
                return Picture(_text(source.get("url"), f"{here}.url"), here)
        raise invalid(
            f"Invalid '{here}.type': base64 or url; no files are stored here.", param=f"{here}.type"
        )

    def ollama(self, text: str, images: Sequence[Any], param: str, *, may_show: bool = True) -> Content:
        """Ollama puts pictures beside the text; they stand before it."""
        if not images:
            return text
        self.require_image(param, "image", may_show)
        parts = []
        for at, data in enumerate(images):
            here = f"{param}[{at}]"
            parts.append(image_part(Picture(_text(data, here), here, is_url=False)))
        return joined([*parts, text_part(text)] if text else parts)

    def require_image(self, param: str, kind: Any, may_show: bool) -> None:
        if self.refusal:
            raise self.unsupported(param, kind)
        if not may_show:
            raise invalid(
                f"'{param}' is a picture; pictures stand in the user's turns and in tool results.",
                param=param,
                code="unsupported_media",
            )

    def unsupported(self, param: str, kind: Any) -> ApiError:
        """Of a part that is neither text nor, where they are taken, a picture."""
        takes = self.refusal or "this model takes text and images only"
        return invalid(
            f"'{param}' has type {str(kind)[:40]!r}; {takes}.", param=param, code="unsupported_media"
        )


def _openai_image(part: dict[str, Any], kind: str, param: str) -> Picture:
    """`image_url` is a URL or `{url, detail}`; of an input_image a URL, with `detail` beside it."""
    here = f"{param}.image_url"
    given = part.get("image_url")
    detail = part.get("detail")
    if kind == "input_image" and given is None and part.get("file_id") is not None:
        raise invalid(
            f"'{param}.file_id' is not supported here: no files are stored. Send the picture as a data URL.",
            param=f"{param}.file_id",
            code="unsupported_media",
        )
    if isinstance(given, dict):
        detail = given.get("detail", detail)
        given = given.get("url")
    if detail is None:
        detail = "auto"
    if detail not in DETAILS:
        raise invalid(f"Invalid '{here}.detail': {', '.join(DETAILS)}.", param=f"{here}.detail")
    return Picture(_text(given, here), here, detail=detail)


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(
            f"Invalid '{param}': the picture is missing; it must be a text.",
            param=param,
            code="invalid_image",
        )
    return value
