"""From a video to the frames of it that the model is shown. Runs in the process that decodes.

First all packets are looked at without decoding any: how many frames there are, when, and behind which one a
decoder can begin. Then only what lies between such a beginning and a chosen frame is decoded.
"""

from __future__ import annotations

import bisect
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mlx_mesh.mesh.messages import Video
from mlx_mesh.proxy.media.containers import DECODERS
from mlx_mesh.proxy.media.decoding import TICKS_PER_S, Outcome, Task, Undecodable, open_container
from mlx_mesh.proxy.media.limits import MAX_FRAME_PIXELS, MAX_PACKETS, MAX_PNG_PIXELS, MAX_VIDEO_PIXELS

if TYPE_CHECKING:
    import av
    from av.container import InputContainer
    from av.video.codeccontext import VideoCodecContext
    from av.video.stream import VideoStream
    from PIL import Image

_JPEG_QUALITY = 95
_FPS = (0.01, 1000.0)
_DEFAULT_FPS = 1.0  # of a video that says nothing, and has no times
_SLACK_S = 1.0
_THREADS = 2


@dataclass(frozen=True, slots=True)
class Timeline:
    """`ticks`: of each frame, in units of the stream's time base, rising; () = frames have no times.
    `beginnings`: those of them where a decoder can begin. `fps`: of the whole."""

    num_frames: int
    ticks: tuple[int, ...]
    beginnings: tuple[int, ...]
    fps: float
    seconds_per_tick: float

    def beginning(self, index: int) -> int:
        """The frame from which on this one can be decoded, -1 = not known."""
        if not self.beginnings or not self.ticks:
            return -1
        place = bisect.bisect_right(self.beginnings, self.ticks[index])
        return bisect.bisect_left(self.ticks, self.beginnings[place - 1]) if place else -1

    def index_of(self, frame: av.VideoFrame, otherwise: int) -> int:
        """Which one a decoded frame is."""
        if not self.ticks or frame.pts is None:
            return otherwise
        return max(0, bisect.bisect_right(self.ticks, frame.pts) - 1)

    def seconds(self, index: int) -> float:
        """From the first frame on."""
        if self.ticks:
            return (self.ticks[index] - self.ticks[0]) * self.seconds_per_tick
        return index / self.fps


def decode_video(task: Task, data: bytes) -> Outcome:
    """Raises Undecodable and av.FFmpegError."""
    with open_container(data, task.demuxer) as container:
        stream = _stream(container)
        timeline = _timeline(container, stream)
    try:
        indices = task.sampling.choose(timeline.num_frames, timeline.fps)
    except ValueError as error:
        raise Undecodable(str(error)) from error
    with open_container(data, task.demuxer) as container:
        stream = _stream(container)
        stream.codec_context.thread_count = _THREADS
        files = []
        num_bytes = 0
        size = None
        for frame in _chosen(container, stream, timeline, indices):
            _check_size(frame.width, frame.height)
            picture, size = _picture(frame, len(indices), size)
            files.append(_encoded(picture, len(indices)))
            num_bytes += len(files[-1])
            if num_bytes > task.max_bytes:
                raise Undecodable(
                    f"has {len(indices)} frames to show, and {len(files)} of them have {num_bytes} bytes; "
                    f"{task.max_bytes} may be. Ask for fewer (fps, max_frames)",
                    "too_large",
                )
    times = tuple(timeline.seconds(index) for index in indices)
    fps = len(indices) / timeline.num_frames * timeline.fps
    length = timeline.num_frames / timeline.fps
    return Outcome(video=Video(frames=tuple(files), fps=fps, times=times), seconds=length)


def _stream(container: InputContainer) -> VideoStream:
    from av.video.stream import VideoStream

    stream = container.streams.best("video")
    if not isinstance(stream, VideoStream):
        raise Undecodable("has no pictures")
    codec: VideoCodecContext | None = stream.codec_context  # PyAV's types know nothing of None
    if codec is None:
        raise Undecodable("has pictures of a kind that nothing here knows")
    if codec.name not in DECODERS["video"]:
        raise Undecodable(f"has pictures of kind {codec.name[:40]}, which is not taken")
    _check_size(codec.width, codec.height)
    return stream


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1:
        raise Undecodable(f"has frames without a size, or with more than {MAX_FRAME_PIXELS} pixels")
    if width * height > MAX_FRAME_PIXELS:
        raise Undecodable(
            f"is too large: {width} by {height} pixels; a frame may have {MAX_FRAME_PIXELS}", "too_large"
        )


# ---------------------------------------------------------------- what there is


def _timeline(container: InputContainer, stream: VideoStream) -> Timeline:
    ticks: list[int] = []
    beginnings: list[int] = []
    num_frames = 0
    end_s = 0.0
    for number, packet in enumerate(container.demux()):
        if number > MAX_PACKETS:
            raise Undecodable(f"has more than {MAX_PACKETS} packets", "too_long")
        if packet.size == 0:
            continue
        if packet.pts is not None and packet.time_base is not None:
            end_s = max(end_s, float((packet.pts + (packet.duration or 0)) * packet.time_base))
        if packet.stream_index != stream.index or packet.is_discard:
            continue
        num_frames += 1
        if packet.pts is not None:
            ticks.append(packet.pts)
            if packet.is_keyframe:
                beginnings.append(packet.pts)
    if num_frames == 0:
        raise Undecodable("has no frames")
    _check_end(container, stream, num_frames, end_s)
    per_tick = float(stream.time_base) if stream.time_base else 0.0
    ticks.sort()
    is_timed = len(set(ticks)) == num_frames and per_tick > 0
    if is_timed and (ticks[-1] - ticks[0]) * per_tick * _FPS[0] > num_frames:
        apart_s = (ticks[-1] - ticks[0]) * per_tick / num_frames
        raise Undecodable(f"is broken: it says that its frames are {apart_s:.3g} s apart")
    return Timeline(
        num_frames=num_frames,
        ticks=tuple(ticks) if is_timed else (),
        beginnings=tuple(sorted(beginnings)) if is_timed else (),
        fps=_fps(stream, ticks if is_timed else (), per_tick),
        seconds_per_tick=per_tick,
    )


def _fps(stream: VideoStream, ticks: Sequence[int], per_tick: float) -> float:
    """As the file says, or as its frames lie, whichever is a number."""
    lasts = (ticks[-1] - ticks[0]) * per_tick if len(ticks) > 1 else 0.0
    for rate in (stream.average_rate, stream.guessed_rate, (len(ticks) - 1) / lasts if lasts else None):
        fps = float(rate) if rate else math.nan
        if _FPS[0] <= fps <= _FPS[1]:
            return fps
    return _DEFAULT_FPS


def _check_end(container: InputContainer, stream: VideoStream, num_frames: int, end_s: float) -> None:
    """A file that ends before its own header says was cut off, or lies."""
    if stream.frames > num_frames:
        raise Undecodable(f"is cut off: it says that it has {stream.frames} frames, and has {num_frames}")
    said = container.duration / TICKS_PER_S if container.duration is not None else None
    if said is not None and said - end_s > max(_SLACK_S, 0.05 * end_s):
        raise Undecodable(f"is cut off: it says that it has {said:.1f} s, and ends after {end_s:.1f} s")


# ---------------------------------------------------------------- what is shown


def _chosen(
    container: InputContainer,
    stream: VideoStream,
    timeline: Timeline,
    indices: Sequence[int],
) -> Iterator[av.VideoFrame]:
    """A frame for each index, in order."""
    frames = container.decode(stream)
    at, last = -1, None
    for index in indices:
        if timeline.beginning(index) > at + 1:
            container.seek(timeline.ticks[timeline.beginning(index)], stream=stream)
            frames = container.decode(stream)
        while at < index and (frame := next(frames, None)) is not None:
            at, last = timeline.index_of(frame, at + 1), frame
        if last is None:
            raise Undecodable("has no frame that can be decoded")
        if at < index and timeline.seconds(index) - timeline.seconds(max(at, 0)) > _SLACK_S:
            raise Undecodable(f"is broken: it cannot be decoded beyond {timeline.seconds(max(at, 0)):.1f} s")
        yield last  # decoders swallow the last frames of some files: then it is the one before


def _picture(
    frame: av.VideoFrame, num_frames: int, size: tuple[int, int] | None
) -> tuple[Image.Image, tuple[int, int]]:
    """The frame upright, in colour, and in the size of the first one, which is what all together may have."""
    from PIL import Image

    if size is None:
        share = min(1.0, MAX_VIDEO_PIXELS / num_frames / (frame.width * frame.height)) ** 0.5
        size = max(1, int(frame.width * share)), max(1, int(frame.height * share))
    rgb = frame.reformat(width=size[0], height=size[1], format="rgb24", interpolation="AREA")
    turned = int(frame.rotation) % 360  # against the clock; phones write films as the sensor lies
    picture = Image.fromarray(rgb.to_ndarray())
    return (picture.rotate(turned, expand=True) if turned % 90 == 0 and turned else picture), size


def _encoded(picture: Image.Image, num_frames: int) -> bytes:
    file = io.BytesIO()
    if picture.width * picture.height * num_frames <= MAX_PNG_PIXELS:
        picture.save(file, "PNG", compress_level=1)
    else:
        picture.save(file, "JPEG", quality=_JPEG_QUALITY, subsampling=0)
    return file.getvalue()
