"""Base64 in requests, taken strictly: what is not base64 to the letter is no file."""

from __future__ import annotations

import base64
import binascii
import re

from mlx_mesh.proxy.media.limits import MAX_IMAGE_BYTES
from mlx_mesh.proxy.media.picture import Picture, broken

_HEAD = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?", re.ASCII)
_MAX_HEAD_CHARS = 200
_MAX_ENCODED = (MAX_IMAGE_BYTES + 2) // 3 * 4


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def read_data_url(picture: Picture) -> bytes:
    """The file; `picture.media_type` is set to what the URL says. Raises ApiError 400."""
    comma = picture.source.find(",", 0, _MAX_HEAD_CHARS)
    head = _HEAD.fullmatch("data:" + picture.source[5 : max(comma, 5)]) if comma >= 0 else None
    if head is None:
        raise broken(picture, "is no data URL: data:image/png;base64, and the data are expected.")
    if head[3] is None:
        raise broken(picture, "is a data URL that is not base64; only base64 is taken.")
    picture.media_type = (head[1] or "").lower()
    return _decoded(picture, picture.source[comma + 1 :])


def read_base64(picture: Picture) -> bytes:
    """The file of a source without a URL's head. Raises ApiError 400."""
    return _decoded(picture, picture.source)


def _decoded(picture: Picture, text: str) -> bytes:
    if len(text) > _MAX_ENCODED:
        raise broken(
            picture,
            f"is too large: {len(text)} characters of base64; a file may have {MAX_IMAGE_BYTES} bytes.",
            code="image_too_large",
        )
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise broken(picture, f"has broken base64 ({_reason(error)}).") from error
    if not data:
        raise broken(picture, "is empty.")
    return data


def _reason(error: Exception) -> str:
    """Never the text itself, which is the picture."""
    if isinstance(error, UnicodeEncodeError):
        return "characters that base64 does not have"
    return str(error)
