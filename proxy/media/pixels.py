"""How many pixels a request wants its pictures to have, for processors that scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.frame_wish import FRAME_NAMES
from mlx_mesh.proxy.media.item import Item
from mlx_mesh.proxy.media.limits import LOW_DETAIL_PIXELS, MAX_PIXELS

_NAMES = ("min_pixels", "max_pixels")


class _Fields(Protocol):
    @property
    def min_pixels(self) -> int | None: ...
    @property
    def max_pixels(self) -> int | None: ...
    @property
    def mm_processor_kwargs(self) -> dict[str, Any] | None: ...


@dataclass(frozen=True, slots=True)
class PixelBounds:
    """0 = the processor's own."""

    least: int = 0
    most: int = 0

    @classmethod
    def of(cls, body: _Fields) -> PixelBounds:
        """From the fields of a request, and vLLM's object for them. Raises ApiError 400."""
        given = {name: getattr(body, name) for name in _NAMES}
        for name, value in (body.mm_processor_kwargs or {}).items():
            param = f"mm_processor_kwargs.{name[:40]}"
            if name in FRAME_NAMES:
                continue
            if name not in _NAMES:
                raise invalid(
                    f"'{param}' is not supported here; {', '.join((*_NAMES, *FRAME_NAMES))} are.",
                    param=param,
                    code="unsupported_parameter",
                )
            if type(value) is not int or not 1 <= value <= MAX_PIXELS:
                raise invalid(f"Invalid '{param}': a whole number, 1 to {MAX_PIXELS}.", param=param)
            if given[name] not in (None, value):
                raise invalid(f"'{name}' and '{param}' differ; give one of them.", param=param)
            given[name] = value
        bounds = cls(given["min_pixels"] or 0, given["max_pixels"] or 0)
        if bounds.most and bounds.least > bounds.most:
            raise invalid(
                f"'min_pixels' ({bounds.least}) is above 'max_pixels' ({bounds.most}).", param="min_pixels"
            )
        return bounds

    def with_detail(self, pictures: Sequence[Item]) -> PixelBounds:
        """One bound holds for all pictures of a prompt, so `low` counts when all of them have it; numbers
        that were given come first."""
        if self.most or not pictures or any(picture.detail != "low" for picture in pictures):
            return self
        return PixelBounds(self.least, max(LOW_DETAIL_PIXELS, self.least))


NO_BOUNDS = PixelBounds()
