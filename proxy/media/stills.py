"""Videos for a model that takes pictures but no video: some of the frames as pictures in the video's place,
as mlx-vlm does it. Pure."""

from __future__ import annotations

from typing import Any

from mlx_mesh.proxy.media.item import Item, item_part, items_of, of_kind

MAX_STILLS = 16
"""Of all videos of a prompt. mlx-vlm's number: shown more, models describe a mixture of them."""


def with_stills(turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turns whose videos, which are read, are pictures: each an equal share of what a prompt may have, evenly
    over its length. Errors of a picture name the video's part."""
    videos = of_kind(items_of(turns), "video")
    if not videos:
        return turns
    share = max(1, MAX_STILLS // len(videos))
    return [
        {**turn, "content": [shown for part in turn["content"] for shown in _shown(part, share)]}
        if isinstance(turn.get("content"), list)
        else turn
        for turn in turns
    ]


def _shown(part: dict[str, Any], share: int) -> list[dict[str, Any]]:
    item = part.get("item")
    if not isinstance(item, Item) or item.video is None:
        return [part]
    frames = item.video.frames
    if len(frames) > share:
        step = (len(frames) - 1) / max(1, share - 1)
        frames = tuple(frames[round(place * step)] for place in range(share))
    return [item_part(_still(frame, item)) for frame in frames]


def _still(frame: bytes, video: Item) -> Item:
    still = Item("", video.param)
    still.file = frame
    return still
