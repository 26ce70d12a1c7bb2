"""How a receiver asks and a sender answers, inside TLS.

A receiver says Hello, and gets an Answer; then it asks for pieces, one after the other without waiting, and
gets for each an Answer and, if that is no refusal, exactly the piece's bytes.
"""

from __future__ import annotations

import ssl
import struct
from typing import TypeVar

import msgspec

from mlx_mesh.mesh.delivery import Piece
from mlx_mesh.mesh.errors import ProtocolError

MAX_FRAME_BYTES = 16 * 1024
HANDSHAKE_S = 15.0
IO_S = 60.0  # without a byte, in either direction
_PREFIX = struct.Struct(">I")

Kind = TypeVar("Kind")


class Hello(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    token: str


class Answer(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """`sha256` of the bytes that follow; `refusal` = none follow, and why."""

    sha256: bytes = b""
    refusal: str = ""


def send_frame(connection: ssl.SSLSocket, message: Hello | Answer | Piece) -> int:
    """Returns the number of bytes."""
    body = msgspec.msgpack.encode(message)
    connection.sendall(_PREFIX.pack(len(body)) + body)
    return _PREFIX.size + len(body)


def read_frame(connection: ssl.SSLSocket, kind: type[Kind]) -> tuple[Kind, int] | None:
    """A message and its bytes on the wire; None at an orderly end. Raises ProtocolError or OSError."""
    prefix = bytearray(_PREFIX.size)
    if not read_into(connection, memoryview(prefix), may_end=True):
        return None
    (length,) = _PREFIX.unpack(prefix)
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {length} bytes; the longest has {MAX_FRAME_BYTES}")
    body = bytearray(length)
    read_into(connection, memoryview(body))
    try:
        return msgspec.msgpack.decode(body, type=kind), _PREFIX.size + length
    except msgspec.MsgspecError as error:
        raise ProtocolError(f"an unreadable message ({error})") from error


def read_into(connection: ssl.SSLSocket, view: memoryview, *, may_end: bool = False) -> bool:
    """Fill the view. False: the other side ended before the first byte, where it may. Raises OSError."""
    done = 0
    while done < len(view):
        got = connection.recv_into(view[done:])
        if not got:
            if may_end and not done:
                return False
            raise ConnectionResetError("the other side ended in the middle of a message")
        done += got
    return True
