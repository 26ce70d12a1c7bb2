"""What the programs of a delivery have in common: one order on stdin, framed lines on stdout, and an end when
the launcher is gone."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

import msgspec

from mlx_mesh.mesh.delivery_orders import Failed, Said
from mlx_mesh.mesh.errors import ExitCode, MeshError

MAX_ORDER_BYTES = 256 * 1024 * 1024  # a list of pieces; a terabyte has about 130,000
Order = TypeVar("Order")


class Speaker:
    """Writes framed lines; from any thread."""

    def __init__(self, marker: str, fd: int = 1) -> None:
        self._marker = marker.encode()
        self._fd = fd
        self._lock = threading.Lock()

    def say(self, what: Said) -> None:
        line = self._marker + b" " + msgspec.json.encode(what) + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]


def read_order(kind: type[Order], fd: int = 0) -> Order:
    """The one line on stdin. Raises MeshError."""
    parts: list[bytes] = []
    size = 0
    while not parts or b"\n" not in parts[-1]:
        part = os.read(fd, 1 << 20)
        size += len(part)
        if not part or size > MAX_ORDER_BYTES:
            raise MeshError("the launcher's order did not come whole")
        parts.append(part)
    try:
        return msgspec.json.decode(b"".join(parts), type=kind)
    except msgspec.MsgspecError as error:
        raise MeshError(
            f"the launcher's order cannot be read ({error}); install the same mlx-mesh"
        ) from error


def on_end_of_stdin(act: Callable[[], None], fd: int = 0) -> None:
    """Call `act` from a thread when the launcher closes stdin or is gone."""

    def watch() -> None:
        try:
            while os.read(fd, 65536):
                pass
        except OSError:
            pass
        act()

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def end_now() -> None:
    """There is nothing to put away."""
    os._exit(ExitCode.INTERRUPTED)


def run_program(kind: type[Order], work: Callable[[Order, Speaker], None]) -> int:
    """Read the order and do it; whatever goes wrong is said as Failed. Returns the exit status."""
    try:
        order = read_order(kind)
    except MeshError as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE
    speaker = Speaker(order.marker)  # type: ignore[attr-defined]
    os.chdir("/")
    try:
        work(order, speaker)
    except (MeshError, OSError) as error:
        speaker.say(Failed(message=str(error), lost=getattr(error, "lost", "")))
        return ExitCode.FAILED
    return ExitCode.OK
