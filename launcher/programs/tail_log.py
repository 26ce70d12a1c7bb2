"""The last lines of a mesh's log files on its leader and, when followed, what is added to them."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path

POLL_S = 0.2
SIGN_OF_LIFE_S = 2.0


def logs_folder(name: str) -> Path:
    root = os.environ.get("XDG_STATE_HOME", "")
    return (
        (Path(root) if Path(root).is_absolute() else Path.home() / ".local" / "state")
        / "mlx-mesh"
        / name
        / "logs"
    )


def files_of(folder: Path, rank: int | None) -> dict[int, Path]:
    """The current file of each rank; rotated ones end in a number."""
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = re.match(r"rank-(\d+)\.log$", path.name)
        if match and (rank is None or int(match.group(1)) == rank):
            found[int(match.group(1))] = path
    return found


def last_lines(path: Path, count: int) -> tuple[list[bytes], int]:
    """The last `count` lines, reading from the end, and the size up to which was read."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        start, data = size, b""
        while start > 0 and data.count(b"\n") <= count:
            step = min(65536, start)
            start -= step
            file.seek(start)
            data = file.read(step) + data
    lines = data[: size - start].splitlines()
    return (lines[-count:] if count else []), size


class Follower:
    """Goes on reading a file, also when it is rotated away and begun anew."""

    def __init__(self, path: Path, offset: int) -> None:
        self._path, self._offset, self._part = path, offset, b""
        self._inode = path.stat().st_ino

    def new_lines(self) -> list[bytes]:
        try:
            now = self._path.stat()
        except OSError:
            return []
        if now.st_ino != self._inode or now.st_size < self._offset:
            self._inode, self._offset = now.st_ino, 0
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = self._part + file.read(1 << 20)
            self._offset = file.tell()
        *lines, self._part = data.split(b"\n")
        return lines


def main(marker: str, request: str) -> None:
    asked = json.loads(request)
    folder = logs_folder(asked["name"])

    def say(rank: int, lines: list[bytes]) -> None:
        for line in lines:
            told = json.dumps({"rank": rank, "line": line.decode("utf-8", "replace")})
            sys.stdout.write(f"\n{marker} {told}\n")

    followers: dict[int, Follower] = {}
    for rank, path in files_of(folder, asked["rank"]).items():
        lines, size = last_lines(path, asked["num_lines"])
        say(rank, lines)
        followers[rank] = Follower(path, size)
    summary = json.dumps({"folder": str(folder), "ranks": sorted(files_of(folder, None))})
    sys.stdout.write(f"\n{marker} {summary}\n")
    sys.stdout.flush()
    spoke_at = time.monotonic()
    while asked["follow"]:
        for rank, path in files_of(folder, asked["rank"]).items():
            if rank not in followers:
                followers[rank] = Follower(path, 0)
            say(rank, followers[rank].new_lines())
        if time.monotonic() - spoke_at > SIGN_OF_LIFE_S:
            sys.stdout.write("\n")  # fails when nobody listens any more, which ends this program
            spoke_at = time.monotonic()
        sys.stdout.flush()
        time.sleep(POLL_S)
