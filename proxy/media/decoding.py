"""What the front end and the process that decodes for it say to each other, and how both open a file."""

from __future__ import annotations

import io
import struct
from typing import TYPE_CHECKING

import msgspec

from mlx_mesh.mesh.messages import Video
from mlx_mesh.proxy.media.containers import DECODERS
from mlx_mesh.proxy.media.limits import MAX_FRAME_PIXELS
from mlx_mesh.proxy.media.sampling import Sampling

if TYPE_CHECKING:
    from av.container import InputContainer

LENGTH = struct.Struct(">Q")

TICKS_PER_S = 1_000_000
"""FFmpeg's own, in which it gives the length of a file."""

READY = b"+"
"""Said before the file is looked at: what goes wrong earlier is not the file's fault."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """`demuxer`: FFmpeg's, see `containers`. `rate`: Hz, of the audio that the model takes."""

    kind: str  # audio or video
    demuxer: str
    rate: int = 0
    max_seconds: float = 0.0
    sampling: Sampling = Sampling()
    max_bytes: int = 0  # of what is made; 0 = as many as there are, of audio


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """`problem`: what stands behind the part's name in the error, '' = there is none. `code` is the end of
    that error's, behind "audio_" or "video_"; '' = it is invalid."""

    problem: str = ""
    code: str = ""
    wav: bytes = b""
    video: Video | None = None
    seconds: float = 0.0


class Undecodable(Exception):
    """The message stands behind the part's name."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


def open_container(data: bytes, demuxer: str) -> InputContainer:
    """The file behind its own demuxer, which may open no other file, and only decoders that are on the list.
    Raises av.FFmpegError."""
    import av

    decoders = ",".join((*DECODERS["audio"], *DECODERS["video"]))
    return av.open(
        io.BytesIO(data),
        "r",
        format=demuxer,
        container_options={
            "protocol_whitelist": "none",  # there is no protocol of this name
            "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,wav,mp3,flac,ogg,aac,aiff",
            "codec_whitelist": decoders,
            "max_streams": "16",
        },
        stream_options=[],
        options={"max_pixels": str(MAX_FRAME_PIXELS)},
        metadata_errors="replace",
    )
