"""Small files with sound and pictures, made by the libraries that the front end reads them with."""

from __future__ import annotations

import functools
import io
import math
import struct
import wave
from array import array

import av
import numpy as np


def samples(seconds: float, rate: int, pitch: float = 440.0) -> array[int]:
    return array(
        "h", (int(8000 * math.sin(2 * math.pi * pitch * t / rate)) for t in range(int(seconds * rate)))
    )


@functools.cache
def wav(seconds: float = 0.5, rate: int = 16000, channels: int = 1) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(channels)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(array("h", (x for x in samples(seconds, rate) for _ in range(channels))).tobytes())
    return file.getvalue()


@functools.cache
def sound(container: str, codec: str, seconds: float = 1.0, rate: int = 48000) -> bytes:
    """A tone in FFmpeg's container of that name."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = "mono"
        data = np.array(samples(seconds, rate), dtype="<i2")[None]
        frame = av.AudioFrame.from_ndarray(data, format="s16", layout="mono")
        frame.rate, frame.pts = rate, 0
        output.mux([*stream.encode(frame), *stream.encode(None)])
    return file.getvalue()


@functools.cache
def film(
    container: str = "mp4",
    codec: str = "libx264",
    num_frames: int = 60,
    rate: int = 10,
    size: tuple[int, int] = (64, 48),
    gop: int = 10,
    first: int = 0,
) -> bytes:
    """Its frame `i` is grey, as light as `shade(first + i)`."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=rate)
        assert isinstance(stream, av.VideoStream)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.gop_size = gop
        output.start_encoding()
        for number in range(num_frames):
            data = np.full((size[1], size[0], 3), shade(first + number), np.uint8)
            output.mux(stream.encode(av.VideoFrame.from_ndarray(data, format="rgb24")))
        output.mux(stream.encode(None))
    return file.getvalue()


def shade(number: int) -> int:
    return 20 + number * 3 % 220


def lasting(data: bytes, seconds: float) -> bytes:
    """A Matroska file that says that it is so long."""
    at = data.index(b"\x44\x89\x88") + 3
    return data[:at] + struct.pack(">d", seconds * 1000) + data[at + 8 :]


def patched(data: bytes, box: bytes, offset: int, value: int) -> bytes:
    """An MP4 file with another 32-bit number so many bytes behind the name of its first such box."""
    at = data.index(box) + len(box) + offset
    return data[:at] + struct.pack(">I", value) + data[at + 4 :]
