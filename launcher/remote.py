"""One host, reached in whatever way, and a process on it: `LocalHost` here, `SshHost` in ssh.py.

A command is a list of words. It never depends on PATH, a login shell's syntax, the working directory or what
a shell profile prints: the first word is the interpreter's path, and what counts in the output is behind a
random marker. Secrets go over stdin only.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.mesh.errors import MeshError

MAX_LINE_BYTES = 16 * 1024 * 1024
MAX_CAPTURED_LINES = 20_000

Stream = Literal["stdout", "stderr"]
OnLine = Callable[[Stream, str], None]


@dataclass(frozen=True, slots=True)
class Exit:
    """How a process ended; `signal` 0 = one that SSH does not name. `lost`: the connection to it ended first,
    so it may still be there."""

    code: int | None = None
    signal: int | None = None
    lost: str = ""

    def __str__(self) -> str:
        if self.lost:
            return f"the connection was lost ({self.lost})"
        if self.signal is not None:
            if self.signal == 0:
                return "it was ended by a signal"
            with contextlib.suppress(ValueError):
                return f"it was ended by {signal.Signals(self.signal).name}"
            return f"it was ended by signal {self.signal}"
        return f"it ended with status {self.code}"


OnExit = Callable[[Exit], None]


class RemoteProcess(Protocol):
    """A started process. Its lines and its end go to the callbacks given to `start`, from other threads."""

    def send(self, data: bytes) -> None:
        """Write to stdin. A process that is gone is told by its exit, not here."""

    def close_stdin(self) -> None:
        """End of file on stdin: an attached agent ends."""

    def wait(self, timeout_s: float) -> Exit | None:
        """How it ended, or None when it has not within `timeout_s`."""

    def kill(self) -> None:
        """End it at once where that is possible from here (local: SIGKILL; ssh: close the channel)."""


class RemoteHost(Protocol):
    """A host that can be used until `close`."""

    name: str
    local_address: str  # this machine's address towards it; '' when unknown
    peer_address: str  # its address as seen from here; '' for this machine or behind a jump host

    def start(self, words: Sequence[str], on_line: OnLine, on_exit: OnExit) -> RemoteProcess:
        """Start a command with stdin, stdout and stderr connected. Raises HostFault."""

    def connect_to(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """A stream to an address as that host sees it. Raises OSError."""

    def be_patient(self, limit_s: float) -> None:
        """A connection that is silent counts as lost after `limit_s` from now on, not earlier."""

    def close(self) -> None: ...


# ---------------------------------------------------------------- this machine


class LocalProcess:
    """A child of the launcher, in a session of its own: a terminal's Ctrl-C reaches the launcher only."""

    def __init__(self, popen: subprocess.Popen[bytes], on_line: OnLine, on_exit: OnExit) -> None:
        self._popen = popen
        self._exit: Exit | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._on_exit = on_exit
        assert popen.stdout is not None and popen.stderr is not None
        self._readers = [
            threading.Thread(target=_pump, args=(popen.stdout, "stdout", on_line), daemon=True),
            threading.Thread(target=_pump, args=(popen.stderr, "stderr", on_line), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        code = self._popen.wait()
        for reader in self._readers:  # what it said last comes before its end
            reader.join(timeout=1.0)
        self.close_stdin()
        self._exit = Exit(code=code) if code >= 0 else Exit(signal=-code)
        self._ended.set()
        self._on_exit(self._exit)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def send(self, data: bytes) -> None:
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._popen.stdin.write(data)
            self._popen.stdin.flush()

    def close_stdin(self) -> None:
        assert self._popen.stdin is not None
        with self._lock, contextlib.suppress(OSError):
            self._popen.stdin.close()

    def wait(self, timeout_s: float) -> Exit | None:
        self._ended.wait(timeout_s)
        return self._exit

    def kill(self) -> None:
        self._popen.kill()  # safe: the child is reaped by `_watch` only, under the same Popen's lock


class LocalHost:
    """This machine."""

    local_address = ""
    peer_address = ""

    def __init__(self, name: str, environment: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._environment = clean_environment(os.environ if environment is None else environment)

    def start(self, words: Sequence[str], on_line: OnLine, on_exit: OnExit) -> LocalProcess:
        expanded = [expand_home(word) for word in words]
        try:
            popen = subprocess.Popen(
                expanded,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd="/",
                env=self._environment,
                start_new_session=True,
            )
        except OSError as error:
            raise interpreter_fault(self.name, words[0], f"{error.strerror or error}") from error
        return LocalProcess(popen, on_line, on_exit)

    def connect_to(self, host: str, port: int, timeout_s: float) -> socket.socket:
        return socket.create_connection((host, port), timeout=timeout_s)

    def be_patient(self, limit_s: float) -> None:
        """There is no connection."""

    def close(self) -> None:
        """Nothing is held open."""


def clean_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What a local agent may see: no secrets, and nothing that would make a rank of it."""
    dropped = ("RANK", "WORLD_SIZE", "PAIRED_HOST", "PAIRED_PORT")
    return {
        key: value
        for key, value in environment.items()
        if key not in dropped and not key.startswith(("MLX_", "PYTHON"))
    }


def expand_home(word: str) -> str:
    """`~` and `~/...` as this machine's home folder; anything else as it is."""
    return str(Path(word).expanduser()) if word == "~" or word.startswith("~/") else word


def interpreter_fault(host: str, python: str, seen: str) -> HostFault:
    return HostFault(
        host,
        "interpreter",
        f"{python} cannot be started ({seen})",
        "install mlx-mesh there (`mlx-mesh init HOST --install -o -` does it on another host), or set "
        "`python:` of this host in the hostfile to the interpreter that has it",
    )


def _pump(pipe: IO[bytes], stream: Stream, on_line: OnLine) -> None:
    with pipe:
        splitter = LineSplitter(stream, on_line)
        while data := pipe.read1(65536):  # type: ignore[attr-defined]
            splitter.feed(data)
        splitter.finish()


class LineSplitter:
    """Bytes to lines of text; a line over MAX_LINE_BYTES is cut into several."""

    def __init__(self, stream: Stream, on_line: OnLine) -> None:
        self._stream = stream
        self._on_line = on_line
        self._rest = bytearray()

    def feed(self, data: bytes) -> None:
        self._rest += data
        if b"\n" in data:
            *lines, rest = self._rest.split(b"\n")
            self._rest = bytearray(rest)
            for line in lines:
                self._say(line)
        while len(self._rest) > MAX_LINE_BYTES:
            self._say(self._rest[:MAX_LINE_BYTES])
            del self._rest[:MAX_LINE_BYTES]

    def finish(self) -> None:
        if self._rest:
            self._say(self._rest)
            self._rest = bytearray()

    def _say(self, line: bytes | bytearray) -> None:
        self._on_line(self._stream, line.decode("utf-8", "replace").rstrip("\r"))


# ---------------------------------------------------------------- short commands


@dataclass(frozen=True, slots=True)
class Completed:
    """A command that ended by itself."""

    exit: Exit
    stdout: tuple[str, ...]
    stderr: tuple[str, ...]

    def last_words(self, num_lines: int = 3) -> str:
        """The end of what it said, for an error message."""
        lines = [line.strip() for line in (*self.stdout, *self.stderr) if line.strip()]
        return " | ".join(lines[-num_lines:])


class CommandTimeout(MeshError):
    """A command did not end within its deadline; it was told to end."""


def run(host: RemoteHost, words: Sequence[str], stdin: bytes, timeout_s: float) -> Completed:
    """Run a command to its end. Raises HostFault (it cannot be started) or CommandTimeout (it is late)."""
    said: dict[Stream, list[str]] = {"stdout": [], "stderr": []}

    def on_line(stream: Stream, line: str) -> None:
        if len(said[stream]) < MAX_CAPTURED_LINES:
            said[stream].append(line)

    process = host.start(words, on_line, lambda exit: None)
    process.send(stdin)
    process.close_stdin()
    ended = process.wait(timeout_s)
    if ended is None:
        process.kill()
        raise CommandTimeout(f"{host.name}: {words[0]} did not answer within {timeout_s:g} s")
    return Completed(ended, tuple(said["stdout"]), tuple(said["stderr"]))


class ProgramFailed(MeshError):
    """A program of launcher/programs gave no answer; `completed` has what was seen."""

    def __init__(self, host: str, name: str, completed: Completed) -> None:
        said = completed.last_words()
        super().__init__(
            f"{host}: {name} gave no answer: {completed.exit}" + (f", saying: {said}" if said else "")
        )
        self.completed = completed


def program_source(name: str, marker: str, request: Mapping[str, Any]) -> bytes:
    """The text that, given to `PYTHON -I -u -`, runs launcher/programs/NAME.py."""
    source = resources.files("mlx_mesh.launcher.programs").joinpath(f"{name}.py").read_text("utf-8")
    return f"{source}\n\nmain({marker!r}, {json.dumps(dict(request))!r})\n".encode()


def program_words(python: str) -> list[str]:
    return [python, "-I", "-u", "-"]


def new_marker() -> str:
    """A word that nothing else prints."""
    return f"mlx-mesh-{secrets.token_hex(8)}"


def run_program(
    host: RemoteHost, python: str, name: str, request: Mapping[str, Any], timeout_s: float
) -> dict[str, Any]:
    """The answer of a program on that host. Raises HostFault, CommandTimeout or ProgramFailed."""
    marker = new_marker()
    completed = run(host, program_words(python), program_source(name, marker, request), timeout_s)
    for line in completed.stdout:
        if line.startswith(marker + " "):
            answer: dict[str, Any] = json.loads(line[len(marker) + 1 :])
            return answer
    raise ProgramFailed(host.name, name, completed)


def stream_program(
    host: RemoteHost, python: str, name: str, request: Mapping[str, Any], tick_s: float = 0.5
) -> Iterator[dict[str, Any] | None]:
    """Answers of a program as they come, None now and then meanwhile; ends with the program, and ends the
    program when the caller stops. Raises ProgramFailed when it ends without success."""
    marker = new_marker()
    answers: queue.Queue[dict[str, Any] | Exit] = queue.Queue()
    said: list[str] = []

    def on_line(stream: Stream, line: str) -> None:
        if stream == "stdout" and line.startswith(marker + " "):
            answers.put(json.loads(line[len(marker) + 1 :]))
        elif line and len(said) < 100:
            said.append(line)

    process = host.start(program_words(python), on_line, answers.put)
    process.send(program_source(name, marker, request))
    process.close_stdin()
    try:
        while True:
            try:
                item = answers.get(timeout=tick_s)
            except queue.Empty:
                yield None
                continue
            if isinstance(item, Exit):
                if item.code != 0:
                    raise ProgramFailed(host.name, name, Completed(item, (), tuple(said)))
                return
            yield item
    finally:
        process.kill()
