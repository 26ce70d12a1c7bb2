"""From a file with sound to a WAV file as the model reads it. Runs in the process that decodes."""

from __future__ import annotations

import io
import wave
from typing import TYPE_CHECKING

from mlx_mesh.proxy.media.containers import DECODERS
from mlx_mesh.proxy.media.decoding import TICKS_PER_S, Outcome, Task, Undecodable, open_container
from mlx_mesh.proxy.media.limits import MAX_PACKETS

if TYPE_CHECKING:
    import av
    from av.audio.codeccontext import AudioCodecContext
    from av.audio.stream import AudioStream
    from av.container import InputContainer

_SAMPLE_BYTES = 2
_SLACK_S = 0.25  # encoders put silence around it, and say so or not
_MAX_CHANNELS = 16
_SOURCE_RATES = range(1000, 768001)


def decode_audio(task: Task, data: bytes) -> Outcome:
    """Mono, 16 bit, `task.rate` Hz. Raises Undecodable and av.FFmpegError."""
    from av.audio.stream import AudioStream

    with open_container(data, task.demuxer) as container:
        stream = container.streams.best("audio")
        if not isinstance(stream, AudioStream):
            raise Undecodable("has no sound")
        _check(stream)
        pcm = _decoded(container, stream, task)
        seconds = len(pcm) / _SAMPLE_BYTES / task.rate
        if not pcm:
            raise Undecodable(
                f"is empty: not one sample of it is left at {task.rate} Hz, which the model takes"
            )
        _check_end(container, stream, task, data, seconds)
    return Outcome(wav=wav_of(bytes(pcm), task.rate), seconds=seconds)


def wav_of(pcm: bytes, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(_SAMPLE_BYTES)
        writer.setframerate(rate)
        writer.writeframes(pcm)
    return file.getvalue()


def _check(stream: AudioStream) -> None:
    codec: AudioCodecContext | None = stream.codec_context  # PyAV's types know nothing of None
    if codec is None:
        raise Undecodable("has sound of a kind that nothing here knows")
    if codec.name not in DECODERS["audio"]:
        raise Undecodable(f"has sound of kind {codec.name[:40]}, which is not taken")
    if codec.sample_rate not in _SOURCE_RATES:
        raise Undecodable(f"says that it has {codec.sample_rate} samples a second")
    if not 1 <= codec.channels <= _MAX_CHANNELS:
        raise Undecodable(f"says that it has {codec.channels} channels; at most {_MAX_CHANNELS} are taken")


def _decoded(container: InputContainer, stream: AudioStream, task: Task) -> bytearray:
    from av.audio.resampler import AudioResampler

    most = int(task.max_seconds * task.rate) * _SAMPLE_BYTES
    resampler = AudioResampler(format="s16", layout="mono", rate=task.rate)
    pcm = bytearray()
    for number, packet in enumerate(container.demux(stream)):
        if number > MAX_PACKETS:
            raise Undecodable(f"has more than {MAX_PACKETS} packets", "too_long")
        for frame in packet.decode():
            for part in resampler.resample(frame):
                pcm += _samples(part)
        if len(pcm) > most:
            raise Undecodable(f"is longer than {task.max_seconds:g} s", "too_long")
        if task.max_bytes and len(pcm) > task.max_bytes:
            raise Undecodable(
                f"has more than {task.max_bytes} bytes once it is decoded, which is what there is room for",
                "too_large",
            )
    for part in resampler.resample(None):
        pcm += _samples(part)
    return pcm


def _samples(frame: av.AudioFrame) -> bytes:
    return bytes(frame.planes[0])[: frame.samples * _SAMPLE_BYTES]


def _check_end(
    container: InputContainer, stream: AudioStream, task: Task, data: bytes, seconds: float
) -> None:
    """A file that ends before its own header says was cut off, or lies."""
    if task.demuxer == "aac" or (task.demuxer == "mp3" and not _has_length(data)):
        return  # FFmpeg guesses a length from the first few frames
    said = None
    if stream.duration is not None and stream.time_base is not None:
        said = float(stream.duration * stream.time_base)
    elif container.duration is not None and len(container.streams) == 1:
        said = container.duration / TICKS_PER_S
    if said is not None and said - seconds > max(_SLACK_S, 0.02 * seconds):
        raise Undecodable(f"is cut off: it says that it has {said:.1f} s, and ends after {seconds:.1f} s")


def _has_length(data: bytes) -> bool:
    """Whether an MP3 file's first frame says how long it is; behind the picture that many have in front."""
    start = data.find(b"\xff", 10 if data[:3] == b"ID3" else 0)
    return any(
        tag in data[start : start + 65536] or tag in data[:4096] for tag in (b"Xing", b"Info", b"VBRI")
    )
