"""What a launcher and a waiting `mlx-mesh agent` say to each other, beside plain SSH.

The agent is an SSH server with a key of its own. User `launcher`, with a key that was paired, may run the
commands of mlx-mesh. User `guest` needs no key, and may ask for two subsystems only: HELLO, which tells what
the agent announces anyway, and PAIR. Both are lines of JSON.
"""

from __future__ import annotations

import contextlib
import time
from typing import TypeVar

import msgspec
import paramiko

from mlx_mesh.launcher.pairing import PairingRefused

GUEST = "guest"
LAUNCHER = "launcher"
HELLO = "hello@mlx-mesh"
PAIR = "pair@mlx-mesh"

MAX_LINE_BYTES = 8192
ANSWER_S = 15.0
"""Each side waits so long for the other's next line."""

T = TypeVar("T")


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """The strings of the agent's announcement; {} while it has none, and then why."""

    strings: dict[str, str] = {}
    error: str = ""


class PairRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A launcher begins. `message` of SPAKE2 in hex; `key`: its own, as base64."""

    by: str  # "code" or "secret"
    key: str
    label: str
    message: str


class PairAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The host's part, or why there is none."""

    message: str = ""
    proof: str = ""
    refused: str = ""


class PairProof(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's proof; '' = the host's was wrong."""

    proof: str


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """`refused` '' = paired."""

    refused: str = ""


def write_line(channel: paramiko.Channel, value: msgspec.Struct) -> None:
    """Raises PairingRefused when the other side is gone."""
    try:
        channel.settimeout(ANSWER_S)
        channel.sendall(msgspec.json.encode(value) + b"\n")
    except OSError as error:
        raise PairingRefused(f"the other side went away ({error or type(error).__name__}).") from error


def hang_up(channel: paramiko.Channel) -> None:
    """Close it, whatever became of its connection."""
    with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
        channel.close()


def read_line(channel: paramiko.Channel, of: type[T]) -> T:
    """The next line, which must be of this type. Raises PairingRefused."""
    line = bytearray()
    until = time.monotonic() + ANSWER_S
    try:
        while not line.endswith(b"\n"):
            channel.settimeout(max(0.01, until - time.monotonic()))
            byte = channel.recv(1)
            if not byte:
                raise PairingRefused("the other side went away in the middle.")
            line += byte
            if len(line) > MAX_LINE_BYTES:
                raise PairingRefused(f"a line of more than {MAX_LINE_BYTES} bytes came.")
    except TimeoutError as error:
        raise PairingRefused(f"no answer came within {ANSWER_S:g} s.") from error
    except OSError as error:
        raise PairingRefused(f"the other side went away ({error or type(error).__name__}).") from error
    try:
        return msgspec.json.decode(bytes(line), type=of)
    except msgspec.MsgspecError as error:
        raise PairingRefused(f"what came is not of this protocol ({error}).") from error
