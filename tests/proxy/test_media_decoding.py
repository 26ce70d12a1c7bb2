"""Files with sound and pictures as the model reads them; and files that are broken, cut off, or traps."""

from __future__ import annotations

import asyncio
import io
import struct
import sys
import wave
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pytest
from PIL import Image

from mlx_mesh.mesh.messages import Video
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.media import decode_video as decode_video_module
from mlx_mesh.proxy.media.containers import container_of, missing_bytes
from mlx_mesh.proxy.media.decode_audio import decode_audio
from mlx_mesh.proxy.media.decode_video import decode_video
from mlx_mesh.proxy.media.decoder import Decoder
from mlx_mesh.proxy.media.decoding import Outcome, Task, Undecodable, open_container
from mlx_mesh.proxy.media.limits import MAX_FRAME_PIXELS
from mlx_mesh.proxy.media.sampling import Sampling

BROKEN = (av.FFmpegError, Undecodable)


def demuxer_of(data: bytes) -> str:
    container = container_of(data)
    assert container is not None
    return container.demuxer


def heard(data: bytes, rate: int = 16000, max_seconds: float = 10.0) -> Outcome:
    task = Task(kind="audio", demuxer=demuxer_of(data), rate=rate, max_seconds=max_seconds)
    return decode_audio(task, data)


def seen(data: bytes, sampling: Sampling | None = None, max_bytes: int = 10**7) -> Video:
    task = Task(kind="video", demuxer=demuxer_of(data), sampling=sampling or Sampling(), max_bytes=max_bytes)
    video = decode_video(task, data).video
    assert video is not None
    return video


def shades(video: Video) -> list[int]:
    return [int(np.asarray(Image.open(io.BytesIO(frame)).convert("L")).mean()) for frame in video.frames]


def pcm(file: bytes) -> np.ndarray[Any, Any]:
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getnchannels(), reader.getsampwidth()) == (1, 2)
        return np.frombuffer(reader.readframes(reader.getnframes()), "<i2")


# ---------------------------------------------------------------- sound


@pytest.mark.parametrize(
    ("container", "codec", "name"),
    [
        ("mp3", "libmp3lame", "MP3"),
        ("flac", "flac", "FLAC"),
        ("ogg", "libopus", "Ogg"),
        ("ipod", "aac", "MP4"),
        ("webm", "libopus", "Matroska"),
        ("adts", "aac", "AAC"),
        ("aiff", "pcm_s16be", "AIFF"),
    ],
)
def test_sound_of_every_kind_becomes_what_the_model_hears(
    clips: Any, container: str, codec: str, name: str
) -> None:
    data = clips.sound(container, codec)
    found = container_of(data)
    assert found is not None and found.name == name
    outcome = heard(data, rate=24000)
    assert outcome.seconds == pytest.approx(1.0, abs=0.05)
    with wave.open(io.BytesIO(outcome.wav)) as reader:
        assert reader.getframerate() == 24000
    spectrum = np.abs(np.fft.rfft(pcm(outcome.wav).astype(float)))
    assert np.argmax(spectrum) / outcome.seconds == pytest.approx(440, abs=3)


def test_sound_that_is_as_the_model_wants_it_is_not_changed(clips: Any) -> None:
    assert heard(clips.wav(0.5, 16000)).wav == clips.wav(0.5, 16000)


def test_channels_are_mixed_and_the_rate_is_the_models(clips: Any) -> None:
    mixed = pcm(heard(clips.wav(0.5, 16000, channels=2)).wav)
    assert np.abs(mixed.astype(int) - pcm(clips.wav(0.5, 16000))).max() <= 1
    assert len(pcm(heard(clips.wav(0.5, 8000)).wav)) == pytest.approx(8000, abs=20)


def test_a_picture_in_front_of_the_sound_is_passed_over(clips: Any) -> None:
    """Programs put covers there, and sometimes a second tag."""
    bare = clips.sound("mp3", "libmp3lame")
    bare = bare[bare.index(b"\xff\xfb") :]
    tag = b"ID3\x04\x00\x00\x00\x00\x10\x00" + bytes(16 << 7)
    assert heard(tag + bare).seconds == pytest.approx(1.0, abs=0.05)


def test_sound_out_of_a_film(clips: Any) -> None:
    with pytest.raises(Undecodable, match="has no sound"):
        heard(clips.film())


def test_too_long_is_said_before_all_of_it_is_decoded(clips: Any) -> None:
    with pytest.raises(Undecodable, match=r"longer than 0\.3 s") as caught:
        heard(clips.wav(0.5), max_seconds=0.3)
    assert caught.value.code == "too_long"
    heard(clips.wav(0.5), max_seconds=0.5)


def test_what_becomes_too_large_is_said_so(clips: Any) -> None:
    task = Task(kind="audio", demuxer="wav", rate=16000, max_seconds=10.0, max_bytes=15000)
    with pytest.raises(Undecodable, match="more than 15000 bytes") as caught:
        decode_audio(task, clips.wav(0.5))
    assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    ("container", "codec"),
    [
        ("mp3", "libmp3lame"),
        ("flac", "flac"),
        ("ogg", "libopus"),
        ("ipod", "aac"),
        ("webm", "libopus"),
        ("adts", "aac"),
        ("aiff", "pcm_s16be"),
    ],
)
def test_sound_that_is_cut_off_is_broken(clips: Any, container: str, codec: str) -> None:
    data = clips.sound(container, codec)
    with pytest.raises(BROKEN):
        heard(data[: len(data) // 2])


def test_sizes_in_the_header_that_the_file_does_not_have(clips: Any) -> None:
    data = clips.wav(0.5)
    found = container_of(data)
    assert found is not None and missing_bytes(data, found) == 0
    assert missing_bytes(data[:-1000], found) == 999
    for size in (0, 0xFFFFFFFF, 0x7FFFFFFF + 36):  # of a writer that did not know it
        streamed = data[:4] + struct.pack("<I", size) + data[8:40] + struct.pack("<I", 0xFFFFFFFF) + data[44:]
        assert missing_bytes(streamed, found) == 0
        assert heard(streamed).seconds == pytest.approx(0.5)


def test_a_length_that_is_a_lie_is_one(clips: Any) -> None:
    """Of an hour, in front of a second."""
    with pytest.raises(Undecodable, match=r"says that it has 3600\.0 s, and ends after 1\.0 s"):
        heard(clips.lasting(clips.sound("webm", "libopus"), 3600))
    data = clips.sound("ipod", "aac")  # here it is not asked: FFmpeg counts
    assert heard(clips.patched(data, b"mdhd", 16, 48000 * 3600)).seconds == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("rate", [0, 1, 2**31 - 1])
def test_a_sampling_rate_that_is_none(clips: Any, rate: int) -> None:
    data = clips.wav(0.5)
    with pytest.raises(BROKEN):
        heard(data[:24] + struct.pack("<I", rate) + data[28:])


def test_a_file_without_a_sample_is_empty(clips: Any) -> None:
    with pytest.raises(BROKEN):
        heard(clips.wav(0.0))


def test_a_file_with_too_few_samples_for_the_models_rate_is_told_so(clips: Any) -> None:
    with pytest.raises(Undecodable, match="not one sample of it is left at 1000 Hz"):
        heard(clips.wav(3 / 48000, rate=48000), rate=1000)


# ---------------------------------------------------------------- videos


@pytest.mark.parametrize(
    ("container", "codec", "name"),
    [
        ("mp4", "libx264", "MP4"),
        ("mov", "mpeg4", "MP4"),
        ("matroska", "libx264", "Matroska"),
        ("webm", "libvpx-vp9", "Matroska"),
        ("avi", "mpeg4", "AVI"),
    ],
)
def test_frames_are_chosen_evenly_and_are_the_ones_that_are_meant(
    clips: Any, container: str, codec: str, name: str
) -> None:
    data = clips.film(container, codec)
    found = container_of(data)
    assert found is not None and found.name == name
    video = seen(data)
    indices = [round(place * 59 / 11) for place in range(12)]  # 6 s, two frames a second
    assert video.times == pytest.approx([index / 10 for index in indices], abs=0.002)
    assert video.fps == pytest.approx(2.0, abs=0.01)
    assert shades(video) == pytest.approx([clips.shade(index) for index in indices], abs=4)
    assert all(frame.startswith(b"\x89PNG") for frame in video.frames)


def test_what_is_chosen_is_what_mlx_vlm_chooses(clips: Any) -> None:
    """Its rule, as its `load_video` has it, for many lengths and rates."""
    for total in (2, 3, 7, 59, 300, 5000):
        for fps in (1.0, 10.0, 29.97, 60.0):
            for sampling in (
                Sampling(),
                Sampling(fps=0.5),
                Sampling(max_frames=9),
                Sampling(min_frames=1, factor=1, max_frames=3),
            ):
                factor = sampling.factor
                least = -(-sampling.min_frames // factor) * factor
                most = min(sampling.max_frames, total) // factor * factor
                count = int(min(max(total / fps * sampling.fps, least), most, total) // factor * factor)
                if count < factor:
                    continue  # there, it is refused
                expected = np.linspace(0, total - 1, count).round().astype(int).tolist()
                assert sampling.choose(total, fps) == expected


def test_a_number_of_frames(clips: Any) -> None:
    assert Sampling(num_frames=5).choose(100, 10.0) == [0, 33, 66, 99]
    assert len(Sampling(num_frames=8).choose(5, 10.0)) == 4
    assert Sampling(factor=1, min_frames=1, num_frames=1).choose(100, 10.0) == [0]
    with pytest.raises(ValueError, match="has 1 frames; this model needs at least 2"):
        Sampling().choose(1, 10.0)


def test_only_what_lies_before_a_chosen_frame_is_decoded(clips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A beginning every 10 frames, of 200: two frames need the first ten and the last ten."""
    numbers: list[int] = []
    ask = decode_video_module.Timeline.index_of

    def counting(self: Any, frame: Any, otherwise: int) -> int:
        numbers.append(ask(self, frame, otherwise))
        return numbers[-1]

    monkeypatch.setattr(decode_video_module.Timeline, "index_of", counting)
    video = seen(clips.film(num_frames=200), Sampling(num_frames=2))
    assert shades(video) == pytest.approx([clips.shade(0), clips.shade(199)], abs=4)
    assert len(numbers) <= 20


def test_frames_that_come_at_odd_times_keep_them(clips: Any) -> None:
    file = io.BytesIO()
    ticks = [0, 100, 150, 900, 950, 1000, 4000, 4001]
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("libx264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        stream.time_base = stream.codec_context.time_base = Fraction(1, 1000)
        for number, tick in enumerate(ticks):
            frame = av.VideoFrame.from_ndarray(
                np.full((48, 64, 3), clips.shade(number * 8), np.uint8), format="rgb24"
            )
            frame.pts, frame.time_base = tick, Fraction(1, 1000)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    video = seen(file.getvalue(), Sampling(num_frames=8))
    assert video.times == pytest.approx([tick / 1000 for tick in ticks])
    assert shades(video) == pytest.approx([clips.shade(number * 8) for number in range(8)], abs=4)


def test_films_that_phones_wrote_are_upright(clips: Any) -> None:
    data = clips.film(size=(64, 48))
    turn = struct.pack(">9i", 0, 65536, 0, -65536, 0, 0, 0, 0, 1 << 30)  # a quarter, with the clock
    at = data.index(b"tkhd") + 4 + 40
    video = seen(data[:at] + turn + data[at + 36 :], Sampling(num_frames=2))
    assert Image.open(io.BytesIO(video.frames[0])).size == (48, 64)


def test_large_frames_are_scaled_and_kept_as_jpeg(clips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_video_module, "MAX_VIDEO_PIXELS", 12 * 32 * 24)
    monkeypatch.setattr(decode_video_module, "MAX_PNG_PIXELS", 12 * 32 * 24 - 1)
    video = seen(clips.film())
    assert {Image.open(io.BytesIO(frame)).size for frame in video.frames} == {(32, 24)}
    assert all(frame.startswith(b"\xff\xd8") for frame in video.frames)


def test_what_the_engine_gets_is_bounded(clips: Any) -> None:
    with pytest.raises(Undecodable, match="Ask for fewer") as caught:
        seen(clips.film(), max_bytes=500)
    assert caught.value.code == "too_large"


@pytest.mark.parametrize(
    ("container", "codec"), [("mp4", "mpeg4"), ("matroska", "libx264"), ("avi", "mpeg4")]
)
def test_a_film_that_is_cut_off_is_broken(clips: Any, container: str, codec: str) -> None:
    data = clips.film(container, codec)
    with pytest.raises(BROKEN):
        seen(data[: len(data) // 2])


def test_a_film_that_lacks_a_few_frames_is_cut_off(clips: Any) -> None:
    data = clips.film("avi", "mpeg4")
    with pytest.raises(Undecodable, match=r"says that it has 60 frames, and has 5\d"):
        seen(data[: len(data) * 9 // 10])


def test_a_film_whose_frames_claim_to_be_years_apart_is_broken(clips: Any) -> None:
    data = clips.film("avi", "mpeg4", 12)
    rate = data.index(b"strh") + 8 + 20  # seconds of a frame, as a fraction
    with pytest.raises(Undecodable, match="says that its frames are"):
        seen(data[:rate] + struct.pack("<II", 2**31 - 1, 1) + data[rate + 8 :])


def test_a_film_of_frames_that_claims_hours(clips: Any) -> None:
    with pytest.raises(Undecodable, match="is cut off"):
        seen(clips.lasting(clips.film("matroska"), 3 * 3600))
    assert len(seen(clips.patched(clips.film(), b"mvhd", 16, 10**9)).frames) == 12  # here it is not asked


def test_a_file_of_kilobytes_that_unpacks_to_gigabytes(clips: Any) -> None:
    """One colour, so each frame of nine million pixels and more is a few bytes."""
    with pytest.raises(Undecodable, match="more than 9437184") as caught:
        seen(clips.film("avi", "mjpeg", num_frames=2, size=(8192, 1200)))
    assert not caught.value.code
    # A header that hides it: the frames themselves are as large.
    data = clips.film("avi", "mjpeg", num_frames=2, size=(8192, 1200))
    hidden = data.replace(struct.pack("<II", 8192, 1200), struct.pack("<II", 64, 64))
    assert hidden != data and MAX_FRAME_PIXELS < 8192 * 1200
    with pytest.raises(BROKEN):
        seen(hidden)


def test_frames_and_packets_are_bounded(clips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_video_module, "MAX_PACKETS", 59)
    with pytest.raises(Undecodable, match="more than 59 packets") as caught:
        seen(clips.film())
    assert caught.value.code == "too_long"


def test_a_film_without_frames_or_pictures(clips: Any) -> None:
    with pytest.raises(BROKEN):
        seen(clips.film(num_frames=0))
    with pytest.raises(Undecodable, match="has no pictures"):
        seen(clips.sound("ipod", "aac"))


def test_a_rate_that_is_no_number(clips: Any) -> None:
    """A second of the file's clock has no ticks: its rate is 0 divided by 0."""
    with pytest.raises(BROKEN):
        seen(clips.patched(clips.film(), b"mdhd", 12, 0))


def test_the_rate_is_taken_from_the_frames_when_the_file_says_none() -> None:
    fps = decode_video_module._fps

    class Stream:
        average_rate: Any = None
        guessed_rate: Any = Fraction(0, 1)

    assert fps(Stream(), (0, 10, 20), 0.01) == pytest.approx(10.0)  # type: ignore[arg-type]
    assert fps(Stream(), (5,), 0.01) == 1.0  # type: ignore[arg-type]
    Stream.average_rate = Fraction(90000, 1)
    assert fps(Stream(), (), 0.0) == 1.0  # type: ignore[arg-type]


# ---------------------------------------------------------------- what they are


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        b"ffconcat version 1.0\nfile /etc/passwd\n",
        b"<?xml version='1.0'?><MPD></MPD>",
        b"\x89PNG\r\n\x1a\n" + bytes(20),
        b"\0\0\0\x18ftypheic" + bytes(20),
        b"\0\0\0\x18ftypavif" + bytes(20),
        b"RIFF\x10\0\0\0WEBPVP8 ",
        b"GIF89a" + bytes(20),
        b"\xff\xd8\xff\xe0" + bytes(20),
        b"ID3\x04\0\0\0\0\0\x05hello world",
        b"[playlist]\nFile1=http://127.0.0.1/\n",
        b"v=0\no=- 0 0 IN IP4 127.0.0.1\n",
    ],
)
def test_what_is_no_file_with_sound_or_pictures_reaches_no_demuxer(data: bytes) -> None:
    assert container_of(data) is None


def test_codecs_that_ffmpeg_does_not_know(clips: Any) -> None:
    with pytest.raises(Undecodable, match="pictures of a kind that nothing here knows"):
        seen(clips.film("avi", "mpeg4", 12).replace(b"FMP4", b"ZZZZ"))
    sound = bytearray(clips.wav(0.1))
    sound[20:22] = b"BB"  # the format
    with pytest.raises(Undecodable, match="sound of a kind that nothing here knows"):
        heard(bytes(sound))


def test_a_playlist_behind_the_name_of_a_film_opens_nothing(clips: Any) -> None:
    trap = b"\0\0\0\x14ftypisom\0\0\0\0isom" + b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"
    with pytest.raises(BROKEN):
        seen(trap)


def test_a_codec_that_is_not_on_the_list_is_not_run(clips: Any) -> None:
    with pytest.raises(BROKEN):
        seen(clips.film("avi", "ffv1"))
    with pytest.raises(BROKEN):
        heard(clips.sound("avi", "wmav2"))
    with open_container(clips.film("avi", "ffv1"), "avi") as container:
        stream = container.streams.best("video")  # nor opened to see what is in it
        assert isinstance(stream, av.VideoStream) and stream.codec_context.pix_fmt is None


# ---------------------------------------------------------------- the process of its own


def run(task: Task, data: bytes, **options: Any) -> Outcome:
    async def ask() -> Outcome:
        return await Decoder(**options).decode(task, data)

    return asyncio.run(ask())


def test_a_process_of_its_own_decodes_and_can_open_nothing(clips: Any) -> None:
    data = clips.film()
    outcome = run(Task(kind="video", demuxer="mov", max_bytes=10**6), data)
    assert not outcome.problem and outcome.video == seen(data)
    broken = run(Task(kind="video", demuxer="mov", max_bytes=10**6), data[:200])
    assert broken.problem.startswith("is broken: ")
    with_eyes = (
        "import sys\nfrom mlx_mesh.proxy.media import decode_child as child\n"
        "def spy(task, data):\n"
        "    import socket\n"
        "    for name, open_it in (('file', lambda: open('/etc/passwd')), ('socket', socket.socket)):\n"
        "        try:\n            open_it()\n"
        "        except OSError:\n            continue\n"
        "        return child.Outcome(problem='opened a ' + name)\n"
        "    return child.Outcome(problem='opened nothing')\n"
        "import socket\n"
        "child.decode_video = spy\nsys.exit(child.main())\n"
    )
    told = run(Task(kind="video", demuxer="mov"), b"x", command=(sys.executable, "-I", "-c", with_eyes))
    assert told.problem == "opened nothing"


SAYS_READY = "import sys,os; os.write(1, b'+'); "


@pytest.mark.parametrize(
    ("program", "problem"),
    [
        ("os.abort()", "it ended the process"),
        ("os.write(1, b'nonsense')", "said nothing that can be read"),
        ("[os.write(1, bytes(1 << 20)) for _ in range(100)]", "it ended the process"),
        ("sys.stdin.buffer.read()", "said nothing that can be read"),
    ],
)
def test_a_file_that_ends_its_process_ends_one_request(program: str, problem: str) -> None:
    command = (sys.executable, "-I", "-c", SAYS_READY + program)
    outcome = run(Task(kind="audio", demuxer="wav"), bytes(1 << 20), command=command)
    assert problem in outcome.problem and not outcome.code


def test_a_file_that_takes_for_ever_is_ended() -> None:
    command = (sys.executable, "-I", "-c", SAYS_READY + "import time; time.sleep(1000)")
    outcome = run(Task(kind="audio", demuxer="wav"), b"", command=command, deadline_s=0.3)
    assert outcome.code == "too_long" and "DECODE_DEADLINE_S" in outcome.problem


def test_a_decoder_that_cannot_start_is_no_files_fault(caplog: pytest.LogCaptureFixture) -> None:
    command = (sys.executable, "-I", "-c", "raise ImportError('no libav')")
    with pytest.raises(ApiError, match="the server's log says why") as caught:
        run(Task(kind="audio", demuxer="wav"), b"", command=command)
    assert caught.value.status == 500 and "no libav" in caplog.text


def test_a_decoder_that_is_killed_before_it_looks_is_asked_for_again() -> None:
    command = (sys.executable, "-I", "-c", "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ApiError, match="signal 9") as caught:
        run(Task(kind="audio", demuxer="wav"), b"", command=command)
    assert (caught.value.status, caught.value.retry_after_s > 0) == (503, True)


def test_a_client_that_leaves_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    children: list[Any] = []
    has_begun = asyncio.Event()
    start = asyncio.create_subprocess_exec

    async def watched(*args: Any, **options: Any) -> Any:
        children.append(await start(*args, **options))
        has_begun.set()
        return children[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", watched)

    async def ask() -> None:
        decoder = Decoder(command=(sys.executable, "-I", "-c", SAYS_READY + "import time; time.sleep(1000)"))
        task = asyncio.create_task(decoder.decode(Task(kind="audio", demuxer="wav"), b""))
        async with asyncio.timeout(30):
            await has_begun.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() and children[0].returncode == -9

    asyncio.run(ask())


def test_few_files_are_decoded_together_and_a_turn_has_a_deadline() -> None:
    command = (sys.executable, "-I", "-c", SAYS_READY + "import time; time.sleep(1000)")

    async def ask() -> None:
        decoder = Decoder(command=command, deadline_s=5.0, turn_s=0.1)
        tasks = [
            asyncio.create_task(decoder.decode(Task(kind="audio", demuxer="wav"), b"")) for _ in range(3)
        ]
        done, waiting = await asyncio.wait(tasks, timeout=4.0, return_when=asyncio.FIRST_COMPLETED)
        assert len(done) == 1
        with pytest.raises(ApiError, match="turn did not come") as caught:
            done.pop().result()
        assert caught.value.status == 503
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)

    asyncio.run(ask())
