"""One rotating file per rank on the leader, and the prefix that every line of a rank carries."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
from pathlib import Path

from mlx_mesh.mesh.log_lines import json_line

MAX_FILE_BYTES = 5 * 1024 * 1024
NUM_OLD_FILES = 3

_FORMAT = logging.Formatter("%(asctime)s %(message)s")


def prefix(rank: int, host: str) -> str:
    """`[rank host]`."""
    return f"[{rank} {host}]"


class RankLogs:
    """`<folder>/rank-K.log`, rotated by size. Writing a log never fails a mesh: a full disk is counted."""

    def __init__(self, folder: Path, is_json: bool = False) -> None:
        self._folder = folder
        self._is_json = is_json
        self._handlers: dict[int, _QuietHandler] = {}

    def begin(self) -> None:
        """Put the files of an earlier mesh of this name behind, as if they were full."""
        for path in self._folder.glob("rank-*.log"):
            if path.stem.removeprefix("rank-").isdecimal():
                handler = self._new_handler(path)
                with contextlib.suppress(OSError):  # a full disk ends no mesh
                    handler.doRollover()
                handler.close()

    def _new_handler(self, path: Path) -> _QuietHandler:
        handler = _QuietHandler(
            path, maxBytes=MAX_FILE_BYTES, backupCount=NUM_OLD_FILES, encoding="utf-8", delay=True
        )
        if not self._is_json:
            handler.setFormatter(_FORMAT)
        return handler

    def write(self, rank: int, host: str, line: str) -> None:
        """Append a line with time and prefix."""
        handler = self._handlers.get(rank)
        if handler is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            handler = self._handlers[rank] = self._new_handler(self._folder / f"rank-{rank}.log")
        if self._is_json:
            text = json_line(line, component="engine", rank=rank, host=host)
        else:
            text = f"{prefix(rank, host)} {line}"
        handler.handle(logging.LogRecord("rank", logging.INFO, "", 0, text, None, None))

    def close(self) -> None:
        for handler in self._handlers.values():
            handler.close()
        self._handlers.clear()


class _QuietHandler(logging.handlers.RotatingFileHandler):
    num_failed = 0

    def handleError(self, record: logging.LogRecord) -> None:
        self.num_failed += 1
