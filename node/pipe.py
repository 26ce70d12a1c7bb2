"""Length-prefixed frames over a socket pair between an agent and its children.

A child gets its end as an inherited file descriptor; end of file on either side means that the other
process is gone. 4 bytes big-endian length, then one MessagePack message.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Generic, TypeVar

import msgspec

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import MAX_FRAME_BYTES, encode

T = TypeVar("T")
_LENGTH = struct.Struct(">I")


def _checked_length(header: bytes) -> int:
    length: int = _LENGTH.unpack(header)[0]
    if length > MAX_FRAME_BYTES:
        raise ProtocolError(f"a frame of {length} bytes is over the limit of {MAX_FRAME_BYTES}")
    return length


class BlockingPipe(Generic[T]):
    """The child's end, for threads. `send` may be called from several threads, `receive` from one."""

    def __init__(self, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> None:
        self._sock = sock
        self._decoder = decoder
        self._send_lock = threading.Lock()

    def send(self, message: msgspec.Struct) -> None:
        """Raises OSError when the agent is gone."""
        body = encode(message)
        with self._send_lock:
            self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> T | None:
        """The next message, waiting without limit; None at end of file. Raises ProtocolError."""
        header = self._read(_LENGTH.size)
        if header is None:
            return None
        body = self._read(_checked_length(header))
        if body is None:
            return None
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"unreadable message on a child's pipe: {error}") from error

    def _read(self, size: int) -> bytes | None:
        buffer = bytearray()
        while len(buffer) < size:
            part = self._sock.recv(min(size - len(buffer), 1 << 20))
            if not part:
                return None
            buffer += part
        return bytes(buffer)

    def close(self) -> None:
        self._sock.close()


class AsyncPipe(Generic[T]):
    """The agent's end (and the proxy's), for asyncio."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        decoder: msgspec.msgpack.Decoder[T],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._decoder = decoder

    @classmethod
    async def open(cls, sock: socket.socket, decoder: msgspec.msgpack.Decoder[T]) -> AsyncPipe[T]:
        """Take over a connected stream socket."""
        reader, writer = await asyncio.open_connection(sock=sock)
        return cls(reader, writer, decoder)

    def send(self, message: msgspec.Struct) -> None:
        """Queue a message; never blocks. A peer that is gone is noticed by `receive`, not here."""
        if self._writer.is_closing():
            return
        body = encode(message)
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def receive(self) -> T | None:
        """The next message; None when the other process is gone. Raises ProtocolError."""
        try:
            header = await self._reader.readexactly(_LENGTH.size)
            body = await self._reader.readexactly(_checked_length(header))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"unreadable message on a child's pipe: {error}") from error

    async def drain(self) -> None:
        """Wait until the peer took what was queued (bounded by the caller)."""
        await self._writer.drain()

    async def close(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):  # the other process may have gone first
            await self._writer.wait_closed()
