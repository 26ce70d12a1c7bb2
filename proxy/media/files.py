"""Whether bytes are a picture that can be used, before any engine sees them.

Size comes from the header, and is checked before anything is decoded: a file of kilobytes may claim
gigapixels. Then the picture is decoded once, because a file that ends early shows only there.
"""

from __future__ import annotations

import importlib.util
import io
import re
from dataclasses import dataclass

from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.media.item import Item, broken
from mlx_mesh.proxy.media.limits import MAX_PIXELS, MAX_TOTAL_PIXELS

FORMATS = {
    "PNG": ("image/png",),
    "JPEG": ("image/jpeg", "image/jpg", "image/pjpeg"),
    "WEBP": ("image/webp",),
    "GIF": ("image/gif",),
    "BMP": ("image/bmp", "image/x-bmp", "image/x-ms-bmp"),
}
"""As Pillow names them, and the media types under which they come; the first one is theirs."""

_ALSO = {"MPO": "JPEG"}  # cameras put a second picture behind the first one
_SIZE = re.compile(r"\((\d+) pixels\)")
_PREVIEW = (64, 64)  # JPEG can be decoded small; all of its data is read nevertheless


@dataclass(frozen=True, slots=True)
class PictureFacts:
    format: str
    width: int
    height: int


def can_read() -> bool:
    """Whether Pillow is installed, which the extra `vision` brings."""
    return importlib.util.find_spec("PIL") is not None


def check_file(item: Item, data: bytes, before: int = 0) -> PictureFacts:
    """`before`: pixels of the request's other pictures. Raises ApiError 400 naming the part: not a picture,
    of a kind that is not taken, not what the client says it is, too many pixels, or broken. Needs Pillow."""
    from PIL import Image, UnidentifiedImageError

    too_many: tuple[type[Exception], ...] = (Image.DecompressionBombError, Image.DecompressionBombWarning)
    try:
        with Image.open(io.BytesIO(data), formats=[*FORMATS]) as image:
            name = _ALSO.get(image.format or "", image.format or "")
            facts = PictureFacts(name, *image.size)
            _check_size(item, facts, before)
            _check_type(item, name)
            image.draft(None, _PREVIEW)
            image.load()
    except ApiError:
        raise
    except too_many as error:
        size = _SIZE.search(str(error))
        raise _too_large(item, f"{size[1]} pixels" if size else "too many pixels") from error
    except UnidentifiedImageError as error:
        raise broken(item, f"is no picture that can be read: {_kinds()} are.") from error
    except MemoryError as error:
        raise _too_large(item, "more pixels than memory") from error
    except Exception as error:  # readers of formats raise anything, from struct.error to SyntaxError
        # Pillow's own words name what is wrong; they hold no data of the file.
        raise broken(item, f"is broken: {str(error)[:200] or type(error).__name__}.") from error
    return facts


def _check_size(item: Item, facts: PictureFacts, before: int) -> None:
    if facts.width < 1 or facts.height < 1:
        raise broken(item, f"has no pixels ({facts.width} by {facts.height}).")
    if facts.width * facts.height > MAX_PIXELS:
        raise _too_large(item, f"{facts.width} by {facts.height} pixels")
    if before + facts.width * facts.height > MAX_TOTAL_PIXELS:
        raise broken(
            item,
            f"is too much: with its {facts.width} by {facts.height} pixels the pictures of this request have "
            f"more than {MAX_TOTAL_PIXELS} together.",
            code="too_large",
        )


def _check_type(item: Item, name: str) -> None:
    declared = item.media_type
    if declared and declared not in FORMATS[name]:
        raise broken(item, f"is said to be {declared[:40]}, and its data are {FORMATS[name][0]}.")


def _too_large(item: Item, seen: str) -> ApiError:
    return broken(item, f"is too large: {seen}; at most {MAX_PIXELS} are taken.", code="too_large")


def _kinds() -> str:
    *most, last = FORMATS
    return f"{', '.join(most)} and {last}"
