"""`python -I -m mlx_mesh.proxy.media.decode_child`: makes what engines read of one audio or video.

A process of its own for each file, because FFmpeg is a million lines of C over a stranger's bytes: what makes
it crash, loop or fill memory ends this process and one request. It opens nothing: before the file is looked
at the system takes away the right to open files and sockets, and to write to disk.

Standard input: a `Task` and the file, each with its length in front; standard output: READY, then one
`Outcome`. Ends by itself when it takes too long, whoever started it.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import signal
import sys

import msgspec

from mlx_mesh.proxy.media.decode_audio import decode_audio, wav_of
from mlx_mesh.proxy.media.decode_video import decode_video
from mlx_mesh.proxy.media.decoding import LENGTH, READY, Outcome, Task, Undecodable
from mlx_mesh.proxy.media.limits import DECODE_DEADLINE_S

MEMORY_BYTES = 4 * 1024**3
"""Address space, code and threads included. macOS does not hold anyone to it; there the bounds on pixels
do."""

_OPEN_FILES = 3  # standard input, output and error; they are open


def main() -> int:
    import av
    import av.logging

    signal.alarm(int(DECODE_DEADLINE_S) + 5)
    av.logging.set_level(None)
    _warm_up()
    sys.stdout.buffer.write(READY)
    sys.stdout.buffer.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())  # nobody reads it from here on
    os.closerange(_OPEN_FILES, 256)
    task = msgspec.msgpack.decode(_frame(), type=Task)
    data = _frame()
    _give_up_rights()
    outcome = outcome_of(task, data)
    sys.stdout.buffer.write(msgspec.msgpack.encode(outcome))
    return 0


def outcome_of(task: Task, data: bytes) -> Outcome:
    """Whatever is wrong with the file becomes its problem."""
    import av

    try:
        return decode_audio(task, data) if task.kind == "audio" else decode_video(task, data)
    except Undecodable as error:
        return Outcome(problem=str(error), code=error.code)
    except MemoryError:
        return Outcome(problem="needs more memory than one file may have", code="too_large")
    except (av.FFmpegError, ValueError, OverflowError, ArithmeticError, OSError, TypeError) as error:
        # What PyAV makes of broken files. Its words name functions and numbers, never data.
        words = getattr(error, "strerror", None) or str(error)
        return Outcome(problem=f"is broken: {words[:200].rstrip('.') or type(error).__name__}")


def _warm_up() -> None:
    """Both libraries import by need, and all of it has to be there before nothing can be opened any more."""
    import av
    import av.subtitles.stream
    from PIL import Image

    decode_audio(Task(kind="audio", demuxer="wav", rate=8000, max_seconds=1.0), wav_of(bytes(3200), 16000))
    frame = av.VideoFrame(2, 2, "yuv420p").reformat(width=1, height=1, format="rgb24")
    picture = Image.fromarray(frame.to_ndarray())
    for kind in ("PNG", "JPEG"):
        picture.save(io.BytesIO(), kind)


def _frame() -> bytes:
    (length,) = LENGTH.unpack(sys.stdin.buffer.read(LENGTH.size))
    return sys.stdin.buffer.read(length)


def _give_up_rights() -> None:
    seconds = int(DECODE_DEADLINE_S) + 5
    for limit, value in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, seconds * 4),  # of all threads together
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
    ):
        with contextlib.suppress(ValueError, OSError):  # a system that knows it not, or is stricter already
            resource.setrlimit(limit, (value, value))
    resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES, _OPEN_FILES))


if __name__ == "__main__":
    sys.exit(main())
