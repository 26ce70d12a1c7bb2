"""One process of a delivery on a host: told what to do over its stdin, heard line by line, ended with it."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_mesh.launcher.remote import Exit, RemoteHost, Stream, new_marker
from mlx_mesh.mesh.delivery_orders import Failed, Said
from mlx_mesh.mesh.errors import PreflightError

STALL_S = 120.0
"""A process that says nothing for so long hangs. Readers and receivers tell every few pieces."""

END_S = 5.0
_NUM_LAST_LINES = 5
_WORDS = ["-I", "-u", "-m"]


@dataclass(frozen=True, slots=True)
class Heard:
    """What a process said, or how it ended."""

    host: str
    said: Said | Exit


class DeliveryFailed(PreflightError):
    """One host cannot go on. `lost`: the host from which nothing came, '' = another reason."""

    def __init__(self, message: str, lost: str = "") -> None:
        super().__init__(message)
        self.lost = lost


class DeliveryProcess:
    """`python -m mlx_mesh.node.delivery.PROGRAM`. What it says goes into `heard`, in order. It ends when its
    stdin is closed, which `close` does."""

    def __init__(
        self,
        host: str,
        remote: RemoteHost,
        python: str,
        program: str,
        order: Callable[[str], msgspec.Struct],
        heard: queue.Queue[Heard],
    ) -> None:
        """`order` is given the marker. Raises HostFault."""
        self.host = host
        self._last_lines: deque[str] = deque(maxlen=_NUM_LAST_LINES)
        marker = new_marker()
        decoder: Any = msgspec.json.Decoder(Said)

        def on_line(stream: Stream, line: str) -> None:
            if stream == "stdout" and line.startswith(marker + " "):
                try:
                    heard.put(Heard(host, decoder.decode(line[len(marker) + 1 :])))
                except msgspec.MsgspecError as error:
                    heard.put(Heard(host, Failed(message=f"it speaks another language ({error})")))
            elif line.strip():
                self._last_lines.append(line)

        words = [python, *_WORDS, f"mlx_mesh.node.delivery.{program}"]
        self._process = remote.start(words, on_line, lambda ended: heard.put(Heard(host, ended)))
        self._process.send(msgspec.json.encode(order(marker)) + b"\n")

    def words(self) -> str:
        """The last that it said outside its lines."""
        return " | ".join(self._last_lines)

    def close(self) -> None:
        """End it, and wait until it is gone."""
        self._process.close_stdin()
        if self._process.wait(END_S) is None:
            self._process.kill()


def ask(
    host: str,
    remote: RemoteHost,
    python: str,
    program: str,
    order: Callable[[str], msgspec.Struct],
    on_said: Callable[[Said], None] = lambda said: None,
    stall_s: float = STALL_S,
) -> Said:
    """Run a program to its answer. `on_said` hears what comes before it. Raises HostFault or
    DeliveryFailed."""
    heard: queue.Queue[Heard] = queue.Queue()
    process = DeliveryProcess(host, remote, python, program, order, heard)
    last: Said | None = None
    try:
        while True:
            try:
                said = heard.get(timeout=stall_s).said
            except queue.Empty:
                raise DeliveryFailed(
                    f"{host}: {program} said nothing for {stall_s:g} s; see if its disk or network hangs"
                ) from None
            if isinstance(said, Exit):
                break
            if isinstance(said, Failed):
                raise DeliveryFailed(f"{host}: {said.message}", said.lost)
            last = said
            on_said(said)
    finally:
        process.close()
    if last is None or said.code != 0:
        raise DeliveryFailed(
            f"{host}: {program} gave no answer: {said}" + (f"; {process.words()}" if process.words() else "")
        )
    return last
