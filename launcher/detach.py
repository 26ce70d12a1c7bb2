"""`up --detach`: the launcher goes on in a session of its own, and this one waits until it is ready."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

import msgspec

from mlx_mesh.launcher.programs.tail_log import Follower
from mlx_mesh.launcher.signals import Interrupted, StopSignals
from mlx_mesh.launcher.state import StateFolder
from mlx_mesh.mesh.errors import ExitCode

POLL_S = 0.2
MAX_LOG_BYTES = 5 * 1024 * 1024
STOP_S = 60.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What the detached launcher tells the waiting one: a URL, or why there is none."""

    url: str = ""
    message: str = ""
    exit_code: int = 0


def detach(arguments: Sequence[str], folder: StateFolder, out: TextIO) -> Outcome:
    """Start `mlx-mesh ARGUMENTS` in a new session, show its output until it is ready or has failed."""
    folder.make()
    log = folder.launcher_log
    if log.exists():
        log.replace(log.with_suffix(".log.1"))
    reader, writer = os.pipe()
    try:
        with log.open("ab") as file:
            log.chmod(0o600)
            child = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-u",
                    "-m",
                    "mlx_mesh.launcher",
                    *arguments,
                    "--detached-fd",
                    str(writer),
                ],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                pass_fds=(writer,),
                start_new_session=True,
            )
        os.close(writer)
        writer = -1
        with StopSignals():
            try:
                return _wait(child, reader, log, out)
            except Interrupted:
                _end(child)
                raise
    finally:
        os.close(reader)
        if writer >= 0:
            os.close(writer)


def _wait(child: subprocess.Popen[bytes], reader: int, log: Path, out: TextIO) -> Outcome:
    """Bounded by the launcher's own deadlines: it tells an outcome or ends."""
    shown = Follower(log, 0)
    told = b""
    while True:
        readable, _, _ = select.select([reader], [], [], POLL_S)
        for line in shown.new_lines():
            out.write(line.decode("utf-8", "replace") + "\n")
        out.flush()
        if readable:
            part = os.read(reader, 65536)
            told += part
            if not part or b"\n" in told:
                break
    if told:
        outcome = msgspec.json.decode(told, type=Outcome)
        if outcome.url:
            child.returncode = 0  # it lives on and is not ours to wait for
            return outcome
    else:
        outcome = Outcome(message=f"The launcher ended without a word; see {log}.", exit_code=ExitCode.FAILED)
    child.wait(STOP_S)
    return outcome


def _end(child: subprocess.Popen[bytes]) -> None:
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def tell(descriptor: int, outcome: Outcome) -> None:
    """The detached side; the waiting one may be gone."""
    try:
        os.write(descriptor, msgspec.json.encode(outcome) + b"\n")
    except OSError:
        return
    finally:
        os.close(descriptor)


class RotatingLog:
    """A text stream into a file that is begun anew when it is large; the one before is kept as .log.1."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("a", encoding="utf-8")

    def write(self, text: str) -> int:
        self._file.write(text)
        if self._file.tell() > MAX_LOG_BYTES:
            self._file.close()
            self._path.replace(self._path.with_suffix(".log.1"))
            self._file = self._path.open("a", encoding="utf-8")
        return len(text)

    def flush(self) -> None:
        self._file.flush()

    def isatty(self) -> bool:
        return False

    def close(self) -> None:
        self._file.close()
