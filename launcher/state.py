"""The state folder of a mesh, `$XDG_STATE_HOME` (or ~/.local/state)/mlx-mesh/NAME, and who runs it.

`up.json` (mode 0600) says which launcher runs the mesh, by pid and start time, and what `status`, `logs` and
`down` need to reach it. A launcher holds a lock on the folder for its whole life, so two of one name cannot
start at once; the kernel drops the lock with the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from mlx_mesh.launcher.error_text import ERROR_PREFIX
from mlx_mesh.launcher.programs.processes import started
from mlx_mesh.launcher.text import harmless
from mlx_mesh.mesh.discovery import AgentRoute
from mlx_mesh.mesh.errors import AlreadyRunningError, NotRunningError, SettingsError
from mlx_mesh.mesh.host_entry import HostEntry

LAST_WORDS_BYTES = 16 * 1024
LAST_WORDS_CHARS = 600


class HostAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How a host of a running mesh is reached again."""

    name: str
    ssh: str  # '' = this machine, or a host with an `agent`
    user: str
    python: str
    agent: AgentRoute | None = None  # reached by its waiting `mlx-mesh agent`

    @property
    def is_local(self) -> bool:
        return not self.ssh and self.agent is None

    @property
    def entry(self) -> HostEntry:
        """As a host to be opened."""
        return HostEntry(name=self.name, ssh=self.ssh, user=self.user, python=self.python, agent=self.agent)


class AgentProcess(msgspec.Struct, frozen=True, kw_only=True):
    """One agent by identity. `started` is '' until it has been asked."""

    host: str
    pid: int
    started: str = ""


class UpState(msgspec.Struct, frozen=True, kw_only=True):
    """What `up.json` holds. No secret is in it."""

    name: str
    run_id: str
    pid: int
    started: str
    hostfile: str  # '' without one
    model: str
    hosts: tuple[HostAddress, ...]
    ssh_config: str = ""
    api_key_file: str = ""
    url: str = ""  # '' until ready
    log: str = ""  # the launcher's own output when detached
    agents: tuple[AgentProcess, ...] = ()
    drain_s: float = 30.0  # open requests may take so long when it stops

    @property
    def is_alive(self) -> bool:
        """Whether that launcher still runs, told by pid and start time."""
        return bool(self.started) and started(self.pid) == self.started


def state_root(environment: Mapping[str, str]) -> Path:
    root = environment.get("XDG_STATE_HOME", "")
    return (Path(root) if Path(root).is_absolute() else Path.home() / ".local" / "state") / "mlx-mesh"


class StateFolder:
    """One mesh's folder."""

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self.name = name
        self._file = self.path / "up.json"
        self._lock: int | None = None

    @property
    def launcher_log(self) -> Path:
        return self.path / "launcher.log"

    def read(self) -> UpState | None:
        """What the last launcher wrote and did not take back, alive or not."""
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=UpState)
        except FileNotFoundError:
            return None
        except msgspec.MsgspecError as error:
            raise SettingsError(
                f"{self._file} cannot be read ({error}). If no mesh {self.name} runs, remove that file."
            ) from error

    def read_running(self) -> UpState:
        """The running launcher's state. Raises NotRunningError."""
        state = self.read()
        if state is not None and state.is_alive:
            return state
        left = (
            f" Its launcher (pid {state.pid}) was killed; `mlx-mesh down {self.name}` ends what it left."
            if state is not None
            else ""
        )
        raise NotRunningError(
            f"No mesh named {self.name} runs here.{left}{self.last_words()} Start it with `mlx-mesh up`."
        )

    def last_words(self) -> str:
        """How the last detached launcher of this name ended, as a sentence; '' when there was none."""
        try:
            with self.launcher_log.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
                lines = [harmless(line) for line in file.read().decode("utf-8", "replace").splitlines()]
        except OSError:
            return ""
        lines = [line for line in lines if line.strip()]
        errors = [at for at, line in enumerate(lines) if line.startswith(ERROR_PREFIX)]
        if not errors:
            return f" What the last one said is in {self.launcher_log}."
        words = " ".join(line.strip() for line in lines[errors[-1] :]).removeprefix(ERROR_PREFIX)
        if len(words) > LAST_WORDS_CHARS:
            words = f"{words[:LAST_WORDS_CHARS]} ..."
        return f" The last one ended: {words.rstrip('.')} (see {self.launcher_log})."

    def claim(self) -> None:
        """Become the launcher of this name until this process ends. Raises AlreadyRunningError."""
        while self._lock is None:
            self.make()
            try:
                lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:  # another launcher was refused and took the folder back
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                raise already_running(self.name, self.read()) from None
            if self._is_at(lock):
                self._lock = lock
            else:
                os.close(lock)

    def _is_at(self, descriptor: int) -> bool:
        """The folder that is open is the one at our path."""
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), self.path.stat())
        return False

    def make(self) -> None:
        """Make the folder, for this user only."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise SettingsError(
                f"The state folder {self.path} cannot be made ({error.strerror}). Set XDG_STATE_HOME to a "
                "folder that you may write to."
            ) from error

    def write(self, state: UpState) -> None:
        """Replace up.json in one step."""
        new = self.path / "up.json.new"
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(state), indent=1) + b"\n")
        new.replace(self._file)

    def clear(self) -> None:
        """Take up.json back: nothing runs any more."""
        for path in (self._file, self.path / "up.json.new"):
            with contextlib.suppress(FileNotFoundError):
                path.unlink()

    def release(self) -> None:
        """Let another launcher have the name. An empty folder is of no use to anybody."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # it has logs in it
                self.path.rmdir()
            os.close(self._lock)
            self._lock = None


def already_running(name: str, state: UpState | None) -> AlreadyRunningError:
    where = f"at {state.url}" if state and state.url else "and is still starting"
    pid = f" (launcher pid {state.pid})" if state else ""
    return AlreadyRunningError(
        f"A mesh named {name} runs already {where}{pid}. Stop it with `mlx-mesh down {name}`, or give "
        "this one another name."
    )


def all_states(root: Path) -> Iterator[tuple[StateFolder, UpState]]:
    """Every mesh of this user that has an up.json, alive or not, by name."""
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        if not path.is_dir():  # measurements.json
            continue
        folder = StateFolder(root, path.name)
        state = folder.read()
        if state is not None:
            yield folder, state
