"""Base64 in requests, taken strictly: what is not base64 to the letter is no file."""

from __future__ import annotations

import base64
import binascii
import re

from mlx_mesh.proxy.media.item import Item, broken, like
from mlx_mesh.proxy.media.limits import MAX_FILE_BYTES

_HEAD = re.compile(r"data:([\w.+-]+/[\w.+-]+)?((?:;[\w.+-]+=[^;,]*)*)(;base64)?", re.ASCII)
_MAX_HEAD_CHARS = 200


def is_data_url(url: str) -> bool:
    return url[:5].lower() == "data:"


def read_data_url(item: Item) -> bytes:
    """The file; `item.media_type` is set to what the URL says. Raises ApiError 400."""
    comma = item.source.find(",", 0, _MAX_HEAD_CHARS)
    head = _HEAD.fullmatch("data:" + item.source[5 : max(comma, 5)]) if comma >= 0 else None
    if head is None:
        raise broken(item, f"is no data URL: {like(item.kind)} is expected.")
    if head[3] is None:
        raise broken(item, "is a data URL that is not base64; only base64 is taken.")
    item.media_type = (head[1] or "").lower()
    return _decoded(item, item.source[comma + 1 :])


def read_base64(item: Item) -> bytes:
    """The file of a source without a URL's head. Raises ApiError 400."""
    return _decoded(item, item.source)


def _decoded(item: Item, text: str) -> bytes:
    most = MAX_FILE_BYTES[item.kind]
    if len(text) > (most + 2) // 3 * 4:
        raise broken(
            item,
            f"is too large: {len(text)} characters of base64; a file may have {most} bytes.",
            code="too_large",
        )
    try:
        data = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, ValueError) as error:
        raise broken(item, f"has broken base64 ({_reason(error)}).") from error
    if not data:
        raise broken(item, "is empty.")
    return data


def _reason(error: Exception) -> str:
    """Never the text itself, which is the file."""
    if isinstance(error, UnicodeEncodeError):
        return "characters that base64 does not have"
    return str(error)
