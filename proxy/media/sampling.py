"""Which frames of a video the model is shown, by mlx-vlm's rule: so many a second, evenly over the whole of
it, within bounds, and as many as the model joins at a time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_mesh.proxy.media.limits import MAX_FRAMES


@dataclass(frozen=True, slots=True)
class Sampling:
    """`factor`: how many frames the model joins; it gets a multiple of that. The numbers are mlx-vlm's own
    defaults."""

    fps: float = 2.0
    num_frames: int = 0  # 0 = by `fps`
    min_frames: int = 4
    max_frames: int = MAX_FRAMES
    factor: int = 2

    def choose(self, total: int, fps: float) -> list[int]:
        """Indices into a video of `total` frames at `fps`, rising. Raises ValueError when it is too short."""
        if total < self.factor:
            raise ValueError(f"has {total} frames; this model needs at least {self.factor}")
        most = self._floor(min(self.max_frames, total)) or self.factor
        if self.num_frames:
            wanted = round(self.num_frames / self.factor) * self.factor
            count = min(max(wanted, self.factor), most)
        else:
            least = -(-self.min_frames // self.factor) * self.factor
            count = self._floor(min(max(total / fps * self.fps, least), most)) or self.factor
        if count == 1:
            return [0]
        step = (total - 1) / (count - 1)
        return [round(place * step) for place in range(count)]

    def _floor(self, count: float) -> int:
        return int(count // self.factor) * self.factor
