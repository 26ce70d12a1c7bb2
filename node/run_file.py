"""The run file of an agent: who runs here for a mesh, so that a later start can tell and clean up.

`<state>/<mesh>/agent-<host>.json`. It exists while the agent lives; one that is left over names engines
that may have survived (macOS has no parent-death signal), and these are ended by pid and start time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from mlx_mesh.mesh.errors import AlreadyRunningError, MeshError
from mlx_mesh.node.processes import ProcessId, identify, is_alive, kill_and_wait

_KILL_S = 5.0
_RETRY_S = 0.05
CLAIM_S = 20.0
"""How long an agent waits for others of this user that are starting on this host."""


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What the file holds."""

    mesh: str
    run_id: str
    host: str
    agent: ProcessId
    coordinator: str = ""
    url: str = ""  # of the HTTP endpoint, on the leader
    engines: dict[str, ProcessId] = {}  # by rank, as JSON wants text keys
    proxy: ProcessId | None = None
    embedder: ProcessId | None = None


def state_root() -> Path:
    """Where meshes keep their state: $XDG_STATE_HOME/mlx-mesh, or ~/.local/state/mlx-mesh."""
    base = os.environ.get("XDG_STATE_HOME") or ""
    root = Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "state"
    return root / "mlx-mesh"


def safe_name(name: str) -> str:
    """`name` as one part of a path."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "_"


class RunFile:
    """This agent's own file, from `claim` to `release`."""

    def __init__(self, path: Path, record: RunRecord) -> None:
        self.path = path
        self._record = record

    @classmethod
    def claim(cls, folder: Path, mesh: str, host: str, run_id: str) -> tuple[RunFile, list[str]]:
        """Take the file, ending what a dead agent of the same mesh and host left behind; the second value
        says in words what was ended. May block for seconds. Raises AlreadyRunningError when it lives."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / f"agent-{safe_name(host)}.json"
        me = identify(os.getpid())
        assert me is not None
        # The folder of the mesh itself is what the launcher locks, on a host that has both.
        with _alone_in(folder.parent):
            notes = _end_leftovers(path)
            run_file = cls(path, RunRecord(mesh=mesh, run_id=run_id, host=host, agent=me))
            run_file._write()
        return run_file, notes

    def update(
        self,
        *,
        engines: dict[int, ProcessId] | None = None,
        proxy: ProcessId | None = None,
        embedder: ProcessId | None = None,
        coordinator: str | None = None,
        url: str | None = None,
    ) -> None:
        """Replace what is given."""
        changes: dict[str, object] = {}
        if engines is not None:
            changes["engines"] = {str(rank): process for rank, process in engines.items()}
        if proxy is not None:
            changes["proxy"] = proxy
        if embedder is not None:
            changes["embedder"] = embedder
        if coordinator is not None:
            changes["coordinator"] = coordinator
        if url is not None:
            changes["url"] = url
        self._record = msgspec.structs.replace(self._record, **changes)
        self._write()

    def release(self) -> None:
        """Remove the file, unless an engine could not be ended: the next start must find it."""
        if not self._record.engines:
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        draft = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        draft.write_bytes(msgspec.json.encode(self._record))
        draft.replace(self.path)


def mesh_at(port: int) -> str:
    """The mesh of this user whose HTTP endpoint has that port on this host; '' = none."""
    for path in state_root().glob("*/agent-*.json"):
        record = _read(path)
        if record is not None and record.url.rpartition(":")[2] == str(port) and is_alive(record.agent):
            return record.mesh
    return ""


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """One agent at a time looks for leftovers and takes its file; it waits for the other's few seconds.
    Raises MeshError after CLAIM_S."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    until = time.monotonic() + CLAIM_S
    try:
        while not _try_lock(fd):
            if time.monotonic() > until:
                raise MeshError(
                    f"{folder} is locked by another agent for over {CLAIM_S:g} s. See which one with "
                    f"`fuser {folder}` and end it."
                )
            time.sleep(_RETRY_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _end_leftovers(path: Path) -> list[str]:
    record = _read(path)
    if record is None:
        path.unlink(missing_ok=True)  # none, or unreadable
        return []
    if is_alive(record.agent):
        raise _already_running(record)
    notes = []
    for what, process in _children_of(record).items():
        if not is_alive(process):
            continue
        if not kill_and_wait(process, _KILL_S):
            raise MeshError(
                f"the {what} of an earlier run of mesh {record.mesh} (pid {process.pid}) is still there "
                f"{_KILL_S:g} s after SIGKILL. Wait until the system has freed it, or reboot this host."
            )
        notes.append(f"ended the {what} that an earlier run left behind (pid {process.pid})")
    path.unlink(missing_ok=True)
    return notes


def leftovers_of(root: Path) -> Iterator[str]:
    """In words, what an agent had started and left behind, of all meshes with state under `root`."""
    for path in sorted(root.glob("*/agent-*.json")):
        record = _read(path)
        if record is None or is_alive(record.agent):
            continue
        for what, process in _children_of(record).items():
            if is_alive(process):
                yield f"the {what} of mesh {record.mesh} (pid {process.pid})"


def _children_of(record: RunRecord) -> dict[str, ProcessId]:
    """What an agent had started, in words."""
    others = {"proxy": record.proxy, "embedder": record.embedder}
    return {
        **{f"engine of rank {rank}": process for rank, process in record.engines.items()},
        **{what: process for what, process in others.items() if process is not None},
    }


def _read(path: Path) -> RunRecord | None:
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(path.read_bytes(), type=RunRecord)
    return None


def _already_running(record: RunRecord) -> AlreadyRunningError:
    where = f" at {record.url}" if record.url else ""
    return AlreadyRunningError(
        f"mesh {record.mesh} already runs on this host{where}: agent {record.host}, pid {record.agent.pid}. "
        "Stop it first, or give this mesh another name."
    )
