"""Which kind of file audio and video come in: decided by the first bytes, never by a name. Pure.

A file that is none of these reaches no demuxer, and each goes to its own: FFmpeg never guesses. So playlists
and the formats that read other files or hosts (HLS, DASH, concat) are not to be had at all.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Container:
    """`demuxer`: FFmpeg's name of it. `audio` and `video`: the media types under which it comes as that, its
    own first, () = not taken as that. `words`: what OpenAI's `format` calls it."""

    name: str
    demuxer: str
    audio: tuple[str, ...] = ()
    video: tuple[str, ...] = ()
    words: tuple[str, ...] = ()

    def types_as(self, kind: str) -> tuple[str, ...]:
        return self.audio if kind == "audio" else self.video


WAV = Container(
    "WAV", "wav", ("audio/wav", "audio/x-wav", "audio/wave", "audio/vnd.wave"), (), ("wav", "wave")
)
MP3 = Container("MP3", "mp3", ("audio/mpeg", "audio/mp3", "audio/x-mp3"), (), ("mp3", "mpeg", "mpga"))
FLAC = Container("FLAC", "flac", ("audio/flac", "audio/x-flac"), (), ("flac",))
OGG = Container(
    "Ogg", "ogg", ("audio/ogg", "audio/opus", "audio/vorbis", "application/ogg"), (), ("ogg", "opus", "oga")
)
AAC = Container("AAC", "aac", ("audio/aac", "audio/aacp", "audio/x-aac", "audio/vnd.dlna.adts"), (), ("aac",))
AIFF = Container("AIFF", "aiff", ("audio/aiff", "audio/x-aiff"), (), ("aiff", "aif"))
MP4 = Container(
    "MP4",
    "mov",
    ("audio/mp4", "audio/m4a", "audio/x-m4a", "audio/mp4a-latm", "audio/aac", "video/mp4", "video/quicktime"),
    ("video/mp4", "video/quicktime", "video/x-m4v", "video/3gpp"),
    ("m4a", "mp4", "aac"),
)
MATROSKA = Container(
    "Matroska",
    "matroska",
    ("audio/webm", "audio/x-matroska", "video/webm", "video/x-matroska"),
    ("video/webm", "video/x-matroska", "video/matroska"),
    ("webm", "mka", "mkv"),
)
AVI = Container("AVI", "avi", (), ("video/x-msvideo", "video/avi", "video/vnd.avi", "video/msvideo"))

CONTAINERS = (WAV, MP3, FLAC, OGG, AAC, AIFF, MP4, MATROSKA, AVI)

DECODERS = {
    "audio": (
        "aac", "alac", "flac", "mp3", "mp3float", "opus", "libopus", "vorbis", "libvorbis", "pcm_alaw",
        "pcm_mulaw", "pcm_u8", "pcm_s8", "pcm_s16le", "pcm_s16be", "pcm_s24le", "pcm_s24be", "pcm_s32le",
        "pcm_s32be", "pcm_f32le", "pcm_f32be", "pcm_f64le", "pcm_f64be",
    ),
    "video": (
        "h264", "hevc", "av1", "libdav1d", "libaom-av1", "vp8", "vp9", "libvpx", "libvpx-vp9", "mpeg4",
        "mjpeg",
    ),
}  # fmt: skip
"""FFmpeg's names of the decoders that may run; none of the hundreds of others is opened, not even to look."""

_STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1")
_OPEN_ENDED = 0x7FFFFFFF  # sizes from here on, and 0, are of writers that did not know them
_ID3_HEAD = 10


def kinds(kind: str) -> list[Container]:
    """Those that are taken as audio, or as video."""
    return [one for one in CONTAINERS if one.types_as(kind)]


def container_of(data: bytes) -> Container | None:
    """None when the bytes begin like none of them."""
    head = data[:12]
    match head[:4], head[8:12]:
        case b"RIFF", b"WAVE":
            return WAV
        case b"RIFF", b"AVI ":
            return AVI
        case b"FORM", b"AIFF" | b"AIFC":
            return AIFF
        case b"fLaC", _:
            return FLAC
        case b"OggS", _:
            return OGG
        case b"\x1aE\xdf\xa3", _:
            return MATROSKA
    if head[4:8] == b"ftyp":
        return None if head[8:12] in _STILL_BRANDS else MP4
    if head[4:8] in (b"moov", b"mdat", b"wide", b"free", b"skip"):  # QuickTime without a brand
        return MP4
    return _bare_frames(data[_id3_length(data) :])


def _bare_frames(data: bytes) -> Container | None:
    """MP3 and AAC have no header of their own: a frame begins with eleven or twelve set bits."""
    if len(data) < 4 or data[0] != 0xFF or data[1] & 0xE0 != 0xE0:
        return None
    if data[1] & 0xF6 == 0xF0:
        return AAC
    is_layer_3 = data[1] & 0x06 == 0x02
    has_rate = data[2] & 0xF0 not in (0x00, 0xF0) and data[2] & 0x0C != 0x0C
    return MP3 if is_layer_3 and has_rate and data[1] & 0x18 != 0x08 else None


def _id3_length(data: bytes) -> int:
    if data[:3] != b"ID3" or len(data) < _ID3_HEAD:
        return 0
    size = 0
    for byte in data[6:_ID3_HEAD]:
        size = size << 7 | byte & 0x7F
    return _ID3_HEAD + size + (_ID3_HEAD if data[5] & 0x10 else 0)


def missing_bytes(data: bytes, container: Container) -> int:
    """How many bytes of a file are not there, as far as its first lines tell."""
    if container not in (WAV, AVI, AIFF):
        return 0
    size: int = struct.unpack(">I" if container is AIFF else "<I", data[4:8])[0]
    if not 0 < size < _OPEN_ENDED:
        return 0
    return max(0, size + 8 - len(data) - 1)  # some leave out the byte that makes sizes even
