"""The line of settings that a child of ours is given on stdin before anything else."""

from __future__ import annotations

import os

from mlx_mesh.mesh.errors import SettingsError

MAX_LINE_BYTES = 1 << 20


def first_line(fd: int) -> bytes:
    """Byte by byte, so that nothing after the line is taken from the descriptor. Raises SettingsError."""
    line = bytearray()
    while (byte := os.read(fd, 1)) not in (b"", b"\n"):
        line += byte
        if len(line) > MAX_LINE_BYTES:
            raise SettingsError("the launcher's settings are too long.")
    return bytes(line)


def wait_for_end(fd: int) -> None:
    """Until nobody can write there any more. Blocks."""
    while os.read(fd, 4096):
        pass
