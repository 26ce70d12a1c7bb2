"""The folder into which a model is delivered: files of their true sizes with holes where nothing is yet, and
the journal that says what is there.

Only folders that mlx-mesh made are ever written to. They lie where no other program looks for models, because
one that does not know the journal would read the holes as zeros.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from mlx_mesh.mesh.delivery import Piece, gigabytes
from mlx_mesh.mesh.errors import MeshError, PreflightError
from mlx_mesh.mesh.part_record import (
    RECORD_NAME,
    KeptPiece,
    PartRecord,
    RecordHead,
    parse_record,
    piece_line,
    settled_line,
    write_record,
)
from mlx_mesh.node.hub import SMALL_FILES, WEIGHTS, cache_root, parse_hub_id

OnBytes = Callable[[int], None]

_PLAIN_NAME = re.compile(r"[^/\0.][^/\0]*")
"""A name comes from another host: it must not lead out of the folder, nor to our own files in it."""


def target_folder(asked: str, models: str) -> Path:
    """Where a delivery of this model goes on this host: below the folder of models if there is one, where
    other programs do not look. The same name always leads to the same folder."""
    hub_id = parse_hub_id(asked)
    name = (hub_id[0] if hub_id and not asked.startswith(("/", "~")) else asked).rstrip("/")
    last = re.sub(r"[^\w.-]", "_", name.rpartition("/")[2]).lstrip(".") or "model"
    root = Path(models).expanduser() / ".mlx-mesh" if models else cache_root() / "delivered"
    return root / hashlib.sha256(asked.encode()).hexdigest()[:12] / last


def check_target(folder: Path, head: RecordHead) -> None:
    """Raises MeshError unless that is where a delivery of this model goes, or was made by one, and its files
    are those of a model: who may deliver a model may write nothing else."""
    for name in head.files:
        if not is_model_file(name):
            raise MeshError(f"{name!r} is no file of a model's folder")
    root = folder.parent.parent
    is_place = root.name == ".mlx-mesh" or root == cache_root() / "delivered"
    is_place = is_place and folder.relative_to(root) == target_folder(head.asked, "").relative_to(
        cache_root() / "delivered"
    )
    if not folder.is_absolute() or not (is_place or read_part(folder) is not None):
        raise MeshError(f"{folder} is not where models are delivered to")


def check_source(folder: Path, names: Iterable[str]) -> None:
    """Raises MeshError unless that is a model's folder, and these are files of one: who may fetch a model may
    read nothing else."""
    for name in names:
        if not is_model_file(name):
            raise MeshError(f"{name!r} is no file of a model's folder")
    if not (folder / "config.json").is_file() or not any(folder.glob("model*.safetensors")):
        raise MeshError(f"{folder} is no model's folder")


def is_model_file(name: str) -> bool:
    return bool(_PLAIN_NAME.fullmatch(name) and (WEIGHTS.fullmatch(name) or SMALL_FILES.fullmatch(name)))


def read_part(folder: Path) -> PartRecord | None:
    """None: no such folder, or an ordinary one. Raises PreflightError for a journal that is none."""
    try:
        return parse_record((folder / RECORD_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise PreflightError(
            f"{folder / RECORD_NAME} cannot be used ({error}). Delete {folder}; `mlx-mesh sync` makes it "
            "again."
        ) from error


def describe_part(folder: Path) -> str:
    """What a folder has of its model, in words; '' for one that has all of it. Raises PreflightError."""
    record = read_part(folder)
    if record is None or record.is_whole:
        return ""
    return f"{gigabytes(record.num_bytes)} of {gigabytes(sum(record.head.files.values()))}"


def check_pieces(
    folder: Path, pieces: Sequence[KeptPiece], on_bytes: OnBytes | None = None
) -> tuple[list[KeptPiece], int]:
    """Those whose bytes are as they were received, and how many are not."""
    right: list[KeptPiece] = []
    for kept in pieces:
        try:
            is_right = hash_piece(folder, kept.piece) == kept.sha256
        except OSError:
            is_right = False
        if is_right:
            right.append(kept)
        if on_bytes is not None:
            on_bytes(kept.end - kept.start)
    return right, len(pieces) - len(right)


def hash_piece(folder: Path, piece: Piece) -> str:
    """Hex SHA-256. Raises OSError, also for a file that is too short."""
    with (folder / piece.file).open("rb", buffering=0) as file:
        data = os.pread(file.fileno(), piece.size, piece.start)
    if len(data) != piece.size:
        raise OSError(errno.EIO, f"{piece.file} ends early")
    return hashlib.sha256(data).hexdigest()


class Busy(MeshError):
    """Another delivery writes into the folder."""


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """For one process at a time; the kernel drops it with the process. Raises Busy."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Busy(f"another delivery is writing into {folder}; wait for it or end it") from None
        yield
    finally:
        os.close(descriptor)


def settle_part(
    folder: Path, *, verify: bool = False, on_bytes: Callable[[int, int], None] | None = None
) -> tuple[PartRecord | None, int, int]:
    """What may be believed of a folder: pieces that may have been lost with the power are read again, with
    `verify` all of them; those that are wrong are given up. Returns the record, how many pieces were read
    again and were right, and how many were wrong. Raises Busy or PreflightError."""
    record = read_part(folder)
    if record is None:
        return None, 0, 0
    _, doubtful, num_gone = _sort_out(folder, record, verify=verify)
    if not doubtful and not num_gone:
        return record, 0, 0
    with _locked(folder):
        # Once more: a delivery that ended just now may have put another model there.
        if (record := read_part(folder)) is None:
            return None, 0, 0
        sure, doubtful, num_gone = _sort_out(folder, record, verify=verify)
        done, total = 0, sum(kept.end - kept.start for kept in doubtful)

        def count(num: int) -> None:
            nonlocal done
            done += num
            if on_bytes is not None:
                on_bytes(done, total)

        right, num_wrong = check_pieces(folder, doubtful, count)
        for file in {kept.file for kept in right}:
            _sync(folder / file)
        _replace(folder / RECORD_NAME, write_record(record.head, [*sure, *right]))
    return read_part(folder), len(right), num_wrong + num_gone


def _sort_out(
    folder: Path, record: PartRecord, *, verify: bool
) -> tuple[list[KeptPiece], Sequence[KeptPiece], int]:
    """Pieces that are sure, pieces to be read again, and how many are gone with their file."""
    sure = [] if verify else list(record.pieces[: record.num_settled])
    sure = [kept for kept in sure if _has_size(folder, kept.file, record.head)]
    doubtful = record.pieces if verify else record.pieces[record.num_settled :]
    return sure, doubtful, len(record.pieces) - len(sure) - len(doubtful)


def _has_size(folder: Path, name: str, head: RecordHead) -> bool:
    try:
        return (folder / name).stat().st_size == head.files[name]
    except OSError:
        return False


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _to_disk(descriptor)
    finally:
        os.close(descriptor)


def _to_disk(descriptor: int) -> None:
    """On macOS fsync leaves data in the drive's own cache, which goes with the power."""
    if hasattr(fcntl, "F_FULLFSYNC"):
        with contextlib.suppress(OSError):  # not every file system has it
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            return
    os.fsync(descriptor)


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f"{path.name}.new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        _to_disk(file.fileno())
    temporary.replace(path)
    _sync(path.parent)  # an old journal must not come back beside files of another model


class PartWriter:
    """Writes pieces into a folder of ours; the only one that does. `write` from any thread. Open it with
    `open_part`, in a `with` block."""

    def __init__(self, folder: Path, head: RecordHead, num_pieces: int) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._journal = os.open(folder / RECORD_NAME, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        self._lock = threading.Lock()
        self._dirty: set[str] = set()
        self._num_pieces = self._num_settled = num_pieces
        for name, size in head.files.items():
            descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            self._files[name] = descriptor
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)  # holes: they take no space

    def write(self, piece: Piece, data: memoryview, sha256: str) -> None:
        """The bytes first, then the line that tells of them. Raises MeshError when the disk is full."""
        try:
            done = 0
            while done < len(data):
                done += os.pwrite(self._files[piece.file], data[done:], piece.start + done)
            line = piece_line(KeptPiece(piece.file, piece.start, piece.end, sha256))
            with self._lock:
                self._append(line)
                self._dirty.add(piece.file)
                self._num_pieces += 1
        except OSError as error:
            raise disk_error(self._folder, error) from error

    def settle(self) -> None:
        """Bring what was written to the disk, and say so in the journal."""
        with self._lock:
            num_pieces, dirty = self._num_pieces, self._dirty
            self._dirty = set()
        if num_pieces == self._num_settled:
            return
        try:
            for name in dirty:
                _to_disk(self._files[name])
            with self._lock:
                self._append(settled_line(num_pieces))
            _to_disk(self._journal)
        except OSError as error:
            raise disk_error(self._folder, error) from error
        self._num_settled = num_pieces

    def _append(self, line: bytes) -> None:
        """A line that the disk has no room for is taken back: what follows it would be unreadable."""
        size = os.fstat(self._journal).st_size
        written = os.write(self._journal, line)
        if written != len(line):
            os.ftruncate(self._journal, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        for descriptor in (*self._files.values(), self._journal):
            os.close(descriptor)


@contextlib.contextmanager
def open_part(folder: Path, head: RecordHead, again: Sequence[str] = ()) -> Iterator[PartWriter]:
    """A PartWriter for the folder, which is made if it is not there and emptied if it has another model.
    `again`: files of which nothing counts any more. Raises Busy or MeshError."""
    for name, size in head.files.items():
        if not _PLAIN_NAME.fullmatch(name) or size < 0:
            raise MeshError(f"{name!r} ({size} bytes) is no file of a model's folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(folder, error) from error
    with _locked(folder):
        kept = _keep(folder, head, set(again))
        try:
            _replace(folder / RECORD_NAME, write_record(head, kept))
            writer = PartWriter(folder, head, len(kept))
        except OSError as error:
            raise disk_error(folder, error) from error
        try:
            yield writer
        finally:
            writer.close()


def _keep(folder: Path, head: RecordHead, again: set[str]) -> list[KeptPiece]:
    """The pieces that count from now on; what else is in the folder is removed. Refuses a folder with files
    in it that is not ours."""
    record = read_part(folder)
    if record is None:
        if any(folder.iterdir()):
            raise PreflightError(f"{folder} was not made by mlx-mesh and is not empty; move it away.")
        return []
    if record.head.digest != head.digest:
        for name in record.head.files:
            (folder / name).unlink(missing_ok=True)
        return []
    for name in record.head.files:
        if name not in head.files:
            (folder / name).unlink(missing_ok=True)
    return [
        kept
        for kept in record.pieces[: record.num_settled]  # see settle_part for the others
        if kept.file not in again and head.files.get(kept.file) == record.head.files[kept.file]
    ]


def disk_error(folder: Path, error: OSError) -> MeshError:
    """What a failed write means."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return PreflightError(
            f"the disk of {folder} is full ({gigabytes(free_bytes(folder))} free). What has come is kept: "
            "free some and run it again"
        )
    return PreflightError(f"{folder} cannot be written to ({error.strerror or error})")


def free_bytes(folder: Path) -> int:
    """On the disk on which that folder is or would be made."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    return shutil.disk_usage(existing).free
