"""Child processes of an agent: started by exec with a socket pair, heard line by line, and ended for sure."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mlx_mesh.node.processes import ProcessId, identify

LAST_LINES = 120
MAX_LINE_BYTES = 8192
STACKS_S = 0.5
"""What a child has to print its stacks; it takes milliseconds."""

LAST_FRAME = " in <module>"
"""Of the main thread, which faulthandler prints last."""

_CHUNK_BYTES = 65536
_DRAIN_S = 1.0  # a grandchild may hold the output open after the child is gone
_FOREIGN_PREFIXES = ("MLX_", "PAIRED_", "KAMI_", "OMPI_", "PMI_", "PMIX_", "PYTHON", "SLURM_", "DISTRIBUTED_")
_FOREIGN_NAMES = frozenset(
    {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SERVER_RANK"}
)


@dataclass(frozen=True, slots=True)
class Programs:
    """The command lines of an agent's children, without the arguments that the agent adds."""

    engine: tuple[str, ...]
    proxy: tuple[str, ...]
    inspect: tuple[str, ...]
    embedder: tuple[str, ...] = ()

    @classmethod
    def default(cls, faults: Sequence[str] = ()) -> Programs:
        """Our own modules under this interpreter, isolated from the environment and the working directory.
        With `faults` the engines are those that fail on order."""
        python = (sys.executable, "-I", "-u", "-m")
        faulty = ("mlx_mesh.node.engine.faulty", "--faults", ",".join(faults))
        return cls(
            engine=(*python, *(faulty if faults else ("mlx_mesh.node.engine",))),
            proxy=(*python, "mlx_mesh.proxy"),
            inspect=(*python, "mlx_mesh.node.engine.inspect"),
            embedder=(*python, "mlx_mesh.node.engine.embedder"),
        )


def child_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Our environment without what could make a child join another job, slow it down (MLX_METAL_FAST_SYNCH
    can hang the GPU) or show it a secret; plus `extra`."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_FOREIGN_PREFIXES) and name not in _FOREIGN_NAMES
    }
    return clean | dict(extra or {})


class Child:
    """One running child process. Make it with `start`, end it with `stop` or `kill`."""

    def __init__(self, process: asyncio.subprocess.Process, on_line: Callable[[str], object]) -> None:
        self.pid = process.pid
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self._process = process
        self._on_line = on_line
        self._stacks_end = asyncio.Event()
        self._identity = identify(process.pid)
        self._output = asyncio.create_task(self._read_output(), name=f"output of pid {process.pid}")

    @classmethod
    async def start(
        cls,
        command: Sequence[str],
        on_line: Callable[[str], object],
        *,
        environment: Mapping[str, str],
        pass_fds: Sequence[int] = (),
    ) -> tuple[Child, socket.socket]:
        """Run `command --fd N` where N is the child's end of a socket pair; returns our end too.

        The child leads its own session, so that its whole process group can be ended and a Ctrl-C at our
        terminal does not reach it. Its stdout and stderr come back line by line through `on_line`.
        Raises OSError when the program cannot be started.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                process = await asyncio.create_subprocess_exec(
                    *command,
                    "--fd",
                    str(theirs.fileno()),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.STDOUT,
                    cwd="/",
                    env=dict(environment),
                    pass_fds=(theirs.fileno(), *pass_fds),
                    start_new_session=True,
                )
            except BaseException:
                ours.close()
                raise
        return cls(process, on_line), ours

    @property
    def identity(self) -> ProcessId:
        """Pid and start time, for the run file."""
        return self._identity or ProcessId(pid=self.pid, start_time="gone")

    @property
    def returncode(self) -> int | None:
        """None while it runs; negative = killed by that signal."""
        return self._process.returncode

    async def wait(self) -> int:
        """Until the process is gone and its output is read; returns its return code."""
        code = await self._process.wait()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(self._output), _DRAIN_S)
        self._output.cancel()
        return code

    async def has_ended(self, within_s: float) -> bool:
        """Whether a child that is ending by itself does so `within_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), within_s)
        return self._process.returncode is not None

    async def wait_or_kill(self, within_s: float) -> int:
        """For a child that is ending by itself: KILL it when it has not ended `within_s` seconds."""
        await self.has_ended(within_s)
        return await self.kill()

    async def stop(self, stop_s: float) -> int:
        """TERM, `stop_s` seconds of patience, KILL; returns when it is gone."""
        self._signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._process.wait(), stop_s)
        except TimeoutError:
            self._signal(signal.SIGKILL)
        return await self.wait()

    async def kill(self) -> int:
        """KILL; returns when it is gone. Works on a stopped process too."""
        self._signal(signal.SIGKILL)
        return await self.wait()

    async def print_stacks(self) -> None:
        """Have a child that registered faulthandler for SIGUSR1 print where it stands, also inside a native
        call and when it is stopped. Waits for the last line, STACKS_S at most."""
        self._stacks_end.clear()
        self._signal(signal.SIGUSR1)
        self._signal(signal.SIGCONT)  # a stopped one prints first of all: it is killed right after
        printed = asyncio.create_task(self._stacks_end.wait())
        ended = asyncio.create_task(self._process.wait())  # SIGUSR1 ends a child that is still starting
        await asyncio.wait((printed, ended), timeout=STACKS_S, return_when=asyncio.FIRST_COMPLETED)
        for task in (printed, ended):
            task.cancel()
        await asyncio.gather(printed, ended, return_exceptions=True)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    async def _read_output(self) -> None:
        """Lines of any length and encoding; carriage returns of progress bars count as line ends."""
        stream = self._process.stdout
        assert stream is not None
        rest = b""
        while chunk := await stream.read(_CHUNK_BYTES):
            *lines, rest = (rest + chunk).replace(b"\r", b"\n").split(b"\n")
            for line in lines:
                self._take(line)
            if len(rest) > MAX_LINE_BYTES:
                self._take(rest)
                rest = b""
        self._take(rest)

    def _take(self, line: bytes) -> None:
        text = line[:MAX_LINE_BYTES].decode("utf-8", "replace").rstrip()
        if text:
            if LAST_FRAME in text:
                self._stacks_end.set()
            self.last_lines.append(text)
            self._on_line(text)
