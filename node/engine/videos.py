"""Videos of a prompt as mlx-vlm's processors take them, and one pass for pictures and videos where mlx-vlm
has one for either.

The front end chose the frames; a processor that chose again would see them at other times than they have.
"""

from __future__ import annotations

import hashlib
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mesh.mesh.messages import Video


@dataclass(frozen=True, slots=True)
class Sampled:
    """What mlx-vlm's processors ask of a video beside its frames, by the names of its `VideoMetadata`. They
    divide a frame's index by the frames per second of the file to know its time: here times are given."""

    frames_indices: tuple[float, ...]
    sampled_fps: float
    width: int
    height: int
    fps: float = 1.0

    @property
    def timestamps(self) -> tuple[float, ...]:
        return self.frames_indices

    @property
    def total_num_frames(self) -> int:
        return len(self.frames_indices)

    @property
    def duration(self) -> float:
        return len(self.frames_indices) / self.sampled_fps


def frames_of(video: Video, max_pixels: int = 0) -> tuple[Any, Sampled]:
    """A video's frames as numbers (frames, 3, height, width) from 0 to 255, and when they are. `max_pixels`:
    of a frame, 0 = as many as it has; processors know a bound for all frames of a video only. Raises
    ValueError, or whatever Pillow raises over a file that is no picture."""
    from PIL import Image

    if not video.frames or len(video.times) != len(video.frames) or not video.fps > 0:
        raise ValueError(
            f"it has {len(video.frames)} frames, {len(video.times)} times and {video.fps:g} frames per second"
        )
    frames = []
    for file in video.frames:
        with Image.open(io.BytesIO(file)) as image:
            frames.append(np.asarray(_within(image.convert("RGB"), max_pixels)))
    sizes = {frame.shape for frame in frames}
    if len(sizes) > 1:
        raise ValueError(f"its frames have {len(sizes)} sizes")
    height, width, _ = frames[0].shape
    return np.stack(frames).transpose(0, 3, 1, 2), Sampled(video.times, video.fps, width, height)


def pixels_per_token(processor: Any) -> int:
    """How many pixels of a video are a token, all its frames counted, where its processor scales to a number
    of pixels; 0 where it does not say."""
    component = getattr(processor, "video_processor", None)
    names = ("patch_size", "merge_size", "temporal_patch_size", "max_pixels")
    patch, merge, temporal, most = (getattr(component, name, None) for name in names)
    numbers = (patch, merge, temporal, most)
    if not all(isinstance(number, int) for number in numbers):
        return 0
    assert isinstance(patch, int) and isinstance(merge, int) and isinstance(temporal, int)
    return (patch * merge) ** 2 * temporal


def most_frames(processor: Any) -> int:
    """Frames of a video of which the processor leaves none out; 0 = it says of no bound. Those that have one
    also take the frames that are left for the first of their kind: the times that they write are wrong."""
    component = getattr(processor, "video_processor", None)
    found = [getattr(component, name, None) for name in ("num_frames", "max_num_frames")]
    return min((bound for bound in found if isinstance(bound, int) and bound > 0), default=0)


def _within(image: Any, max_pixels: int) -> Any:
    width, height = image.size
    if not max_pixels or width * height <= max_pixels:
        return image
    scale = math.sqrt(max_pixels / (width * height))
    return image.resize((max(1, int(width * scale)), max(1, int(height * scale))))


def content_of(video: Video) -> bytes:
    """A digest of the frames and of when they are."""
    digest = hashlib.blake2b(repr((video.fps, video.times)).encode(), digest_size=16)
    for frame in video.frames:
        digest.update(b"%d " % len(frame) + frame)
    return digest.digest()


def joined(
    ids: Sequence[int],
    inputs: dict[str, Any],
    pictures: frozenset[int],
    videos: frozenset[int],
    *,
    merge: int,
) -> tuple[list[int], dict[str, Any]]:
    """The ids and inputs of a prompt with both kinds, of families that cut both into patches with a grid
    (frames, rows, columns) each, as if videos were pictures of several frames: all patches and grids in the
    order of the prompt, and the picture's mark everywhere. Towers and positions compute both kinds alike, but
    most of these models read only one of them in a pass. `pictures` and `videos` are the ids of the marks;
    `merge`: so many by so many patches are a token. Raises ValueError when marks and grids are not of one
    prompt."""
    of_pictures = _Patches(inputs["pixel_values"], inputs["image_grid_thw"])
    of_videos = _Patches(inputs["pixel_values_videos"], inputs["video_grid_thw"])
    kinds = {**dict.fromkeys(pictures, of_pictures), **dict.fromkeys(videos, of_videos)}
    pixels, grids, at = [], [], 0
    while at < len(ids):
        if ids[at] not in kinds:
            at += 1
            continue
        mark = ids[at]
        run = next((i for i, token in enumerate(ids[at:]) if token != mark), len(ids) - at)
        part, grid = kinds[mark].take(run * merge**2)
        pixels.append(part)
        grids.append(grid)
        at += grid[0] * grid[1] * grid[2] // merge**2
    if of_pictures.num_left or of_videos.num_left:
        raise ValueError("the prompt has fewer marks than its pictures and videos have patches")
    mark = next(token for token in ids if token in pictures)
    rest = {name: value for name, value in inputs.items() if name not in _OF_VIDEOS}
    return [mark if token in videos else token for token in ids], {
        **rest,
        "pixel_values": mx.concatenate(pixels),
        "image_grid_thw": mx.array(grids),
    }


_OF_VIDEOS = ("pixel_values_videos", "video_grid_thw")


class _Patches:
    """Of one kind, taken from the front."""

    def __init__(self, pixels: Any, grids: Any) -> None:
        self._pixels = pixels  # (patches, numbers)
        self._grids = [tuple(int(n) for n in grid) for grid in np.array(grids).tolist()]
        self._at = 0

    @property
    def num_left(self) -> int:
        return int(self._pixels.shape[0]) - self._at

    def take(self, room: int) -> tuple[Any, tuple[int, int, int]]:
        """The patches and the grid of the next item that fits into a run of marks for `room` patches: all its
        frames, or one where each frame has marks of its own."""
        if not self._grids:
            raise ValueError("the prompt has more marks than pictures or videos")
        frames, rows, columns = self._grids.pop(0)
        taken = frames if frames * rows * columns <= room else 1
        if taken < frames:
            self._grids.insert(0, (frames - taken, rows, columns))
        first, self._at = self._at, self._at + taken * rows * columns
        return self._pixels[first : self._at], (taken, rows, columns)
