"""How many pixels of a picture are decoded for good, and what of a prompt's pictures can never fit."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

TILED_PIXELS = 8 * 1024 * 1024
"""More are no use to processors that cut pictures into a few tiles of a fixed size: the most of them look at
two or three million. A larger picture is made smaller first, so that many of them do not fill the memory."""

_SCALING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")
"""Families whose processors in mlx-vlm scale pictures to the pixels that a call asks for."""

_ROOM = 4
"""Those get so many times the pixels that they scale to: they are better at it."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """`asked`: arguments for the processor, if it scales. `opened`: the most pixels of a picture that it
    gets; `edge`: pixels on a side of what is a token."""

    asked: dict[str, int]
    opened: int
    edge: int


def scales_itself(model_type: str) -> bool:
    """Whether the family's processor takes `min_pixels` and `max_pixels`."""
    return model_type in _SCALING


def picture_pixels_per_token(processor: Any) -> int:
    """Of families whose pictures have as many tokens as they have pixels for; 0 = they have not, or nobody
    says."""
    scaler = getattr(processor, "image_processor", None)
    for owner, edge, factor in (
        (scaler, "patch_size", "merge_size"),
        (scaler, "patch_size", "merge_kernel_size"),
        (scaler, "encoder_patch_size", "downsample_factor"),
        (processor, "patch_size", "spatial_merge_size"),
    ):
        size, times = getattr(owner, edge, None), getattr(owner, factor, None)
        if isinstance(times, (list, tuple)) and len(times) == 2:
            times = math.sqrt(times[0] * times[1])
        if isinstance(size, int) and isinstance(times, (int, float)):
            return round((size * times) ** 2)
    return 0


def own_most(processor: Any) -> int:
    """Pixels that a processor of Qwen's kind makes of a picture at most, when nothing else is asked for; 0 =
    unknown."""
    scaler = getattr(processor, "image_processor", None)
    if not isinstance(getattr(scaler, "merge_size", None), int):
        return 0  # the longest edge of others is one
    size = getattr(scaler, "size", None)
    longest = size.get("longest_edge") if isinstance(size, Mapping) else None
    found = (getattr(scaler, "max_pixels", None), longest)
    return next((value for value in found if isinstance(value, int)), 0)


def least_tokens(files: tuple[bytes, ...], per_token: int, least: int, most: int) -> int:
    """Tokens that these pictures have at least when each is scaled to between `least` and `most` pixels: by
    the sizes in their headers, nothing is decoded. Files without a readable header count as none."""
    from PIL import Image

    total = 0
    for file in files:
        try:
            with Image.open(io.BytesIO(file)) as image:
                pixels = image.width * image.height
        except Exception:  # decoding it says what is wrong with it
            continue
        total += max(least, min(pixels, most) if most else pixels) // (2 * per_token)  # edges are rounded
    return total


def opened(file: bytes, most: int, edge: int = 1) -> Any:
    """The picture, decoded and upright, with about `most` pixels at most but no edge below `edge`; `most` 0 =
    as it is. Raises whatever the reader of its format raises."""
    from mlx_vlm.utils import load_image
    from PIL import Image

    image = load_image(io.BytesIO(file))
    pixels = image.width * image.height
    if not most or pixels <= most:
        return image
    factor = math.sqrt(most / pixels)
    size = max(edge, int(image.width * factor)), max(edge, int(image.height * factor))
    return image.resize(size, Image.Resampling.BICUBIC, reducing_gap=3.0)


def most_opened(scales: bool, bound: int) -> int:
    """Pixels to keep of a picture. `bound`: what it is scaled to at most, 0 = unknown."""
    if scales and bound:
        return _ROOM * bound
    return min(bound, TILED_PIXELS) if bound else TILED_PIXELS
