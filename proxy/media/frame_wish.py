"""Which frames of a video a request wants, in the words of mlx-vlm, vLLM and Qwen's own tools."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.limits import MAX_FRAMES
from mlx_mesh.proxy.media.sampling import Sampling

MAX_FPS = 60.0

_COUNTS = {
    "num_frames": "num_frames",
    "nframes": "num_frames",
    "min_frames": "min_frames",
    "max_frames": "max_frames",
}
FRAME_NAMES = ("fps", *_COUNTS)
"""As mlx-vlm, vLLM and Qwen's own tools call them."""

_IO_NAMES = ("fps", "num_frames")


class _Fields(Protocol):
    @property
    def mm_processor_kwargs(self) -> dict[str, Any] | None: ...
    @property
    def media_io_kwargs(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class FrameWish:
    """What a request, a part of it or a model's files say; None = nothing."""

    fps: float | None = None
    num_frames: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None

    @classmethod
    def of(cls, body: _Fields) -> FrameWish:
        """From vLLM's two objects for it. Raises ApiError 400."""
        given = body.mm_processor_kwargs or {}
        wish = cls.read({name: given[name] for name in FRAME_NAMES if name in given}, "mm_processor_kwargs")
        for kind, options in (body.media_io_kwargs or {}).items():
            param = f"media_io_kwargs.{kind[:40]}"
            for name in options if isinstance(options, dict) else (None,):
                if kind != "video" or name not in _IO_NAMES:
                    param = param if name is None else f"{param}.{name[:40]}"
                    raise invalid(
                        f"'{param}' is not supported here; {' and '.join(_IO_NAMES)} of 'video' are.",
                        param=param,
                        code="unsupported_parameter",
                    )
            wish = wish.over(cls.read(options, param))
        return wish

    @classmethod
    def read(cls, given: Mapping[str, Any], param: str) -> FrameWish:
        """Of FRAME_NAMES; others are left alone. Raises ApiError 400 naming the field."""
        found: dict[str, Any] = {}
        for name in FRAME_NAMES:
            value = given.get(name)
            if value is None:
                continue
            here = f"{param}.{name}"
            if name == "fps":
                # NaN is in no range.
                if type(value) not in (int, float) or not 0 < value <= MAX_FPS:
                    raise invalid(f"Invalid '{here}': a number above 0, up to {MAX_FPS:g}.", param=here)
                value = float(value)
            elif type(value) is not int or not 1 <= value <= MAX_FRAMES:
                raise invalid(f"Invalid '{here}': a whole number, 1 to {MAX_FRAMES}.", param=here)
            field = _COUNTS.get(name, name)
            if found.setdefault(field, value) != value:
                raise invalid(f"'{here}' and '{param}.{field}' differ; give one of them.", param=here)
        wish = cls(**found)
        if wish.num_frames is not None and wish.fps is not None:
            raise invalid(
                f"'{param}' has both a number of frames and 'fps'; give one of them.", param=f"{param}.fps"
            )
        if wish.min_frames and wish.max_frames and wish.min_frames > wish.max_frames:
            raise invalid(
                f"'{param}.min_frames' ({wish.min_frames}) is above 'max_frames' ({wish.max_frames}).",
                param=f"{param}.min_frames",
            )
        return wish

    def over(self, other: FrameWish) -> FrameWish:
        """This one, and what it leaves open from the other. A rate takes the place of a number, and the other
        way round."""
        is_said = self.fps is not None or self.num_frames is not None
        return FrameWish(
            fps=self.fps if is_said else other.fps,
            num_frames=self.num_frames if is_said else other.num_frames,
            min_frames=other.min_frames if self.min_frames is None else self.min_frames,
            max_frames=other.max_frames if self.max_frames is None else self.max_frames,
        )

    def on(self, own: Sampling) -> Sampling:
        """It comes before what the model's files say."""
        max_frames = min(self.max_frames or own.max_frames, MAX_FRAMES)
        # Who wants few gets few: the least is the model's own taste, not what it needs.
        min_frames = self.min_frames or min(own.min_frames, max_frames)
        num_frames = 0 if self.fps else (self.num_frames or own.num_frames)
        return Sampling(self.fps or own.fps, num_frames, min_frames, max(max_frames, min_frames), own.factor)


NO_WISH = FrameWish()
