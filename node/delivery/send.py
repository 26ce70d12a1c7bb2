"""`python -m mlx_mesh.node.delivery.send`: offer the pieces of a folder to receivers that have a token, over
TLS, until stdin ends. SendOrder in, Offering and Refused out."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
import socket
import ssl
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from mlx_mesh.mesh.delivery import MAX_PIECE_BYTES, Piece
from mlx_mesh.mesh.delivery_orders import Offering, Refused, SendOrder
from mlx_mesh.mesh.errors import MeshError, ProtocolError
from mlx_mesh.mesh.spans import covers
from mlx_mesh.node.delivery.certificate import Certificate, make_certificate
from mlx_mesh.node.delivery.part_folder import check_source, read_part
from mlx_mesh.node.delivery.program import Speaker, end_now, on_end_of_stdin, run_program
from mlx_mesh.node.delivery.wire import HANDSHAKE_S, IO_S, Answer, Hello, read_frame, send_frame

_MAX_CONNECTIONS = 64
_BACKLOG = 16

OnRefused = Callable[[str, str], None]
"""Address and reason."""


class Sender:
    """Listens from `listen` on; each connection has a thread. Its process is its end."""

    def __init__(self, order: SendOrder, on_refused: OnRefused) -> None:
        self._order = order
        self._on_refused = on_refused
        self._certificate: Certificate = make_certificate()
        self._free = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        folder = Path(order.folder)
        self._is_delivered = read_part(folder) is not None
        self._stamps = {name: self._stamp((folder / name).stat()) for name in order.files}

    def listen(self) -> Offering:
        """Raises MeshError when there is no address to listen at."""
        ports: dict[str, int] = {}
        for address in self._order.addresses:
            try:
                listener = socket.create_server((address, 0), backlog=_BACKLOG)
            except OSError as error:
                raise MeshError(f"cannot listen at {address} ({error.strerror or error})") from error
            ports[address] = listener.getsockname()[1]
            threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        return Offering(ports=ports, certificate=self._certificate.pem)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            raw, peer = listener.accept()
            if not self._free.acquire(blocking=False):
                self._on_refused(str(peer[0]), f"there are {_MAX_CONNECTIONS} connections already")
                raw.close()
                continue
            threading.Thread(target=self._greet, args=(raw, str(peer[0])), daemon=True).start()

    def _greet(self, raw: socket.socket, peer: str) -> None:
        try:
            with raw:
                raw.settimeout(HANDSHAKE_S)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._certificate.context.wrap_socket(raw, server_side=True) as connection:
                    if self._admit(connection, peer):
                        connection.settimeout(IO_S)
                        with contextlib.suppress(OSError):  # the receiver tells what it misses
                            self._serve(connection)
        except (OSError, ProtocolError) as error:
            self._on_refused(peer, f"it did not say hello as a receiver does ({_words(error)})")
        finally:
            self._free.release()

    def _admit(self, connection: ssl.SSLSocket, peer: str) -> bool:
        said = read_frame(connection, Hello)
        if said is None:
            raise ConnectionResetError("it said nothing")
        token = said[0].token.encode()
        known = [each.host for each in self._order.peers if hmac.compare_digest(each.token.encode(), token)]
        if not known:
            self._on_refused(peer, "its token is wrong")
            send_frame(connection, Answer(refusal="this token is not known here"))
            return False
        send_frame(connection, Answer())
        return True

    def _serve(self, connection: ssl.SSLSocket) -> None:
        files: dict[str, int] = {}
        buffer = memoryview(bytearray(MAX_PIECE_BYTES))
        try:
            while (asked := read_frame(connection, Piece)) is not None:
                piece = asked[0]
                if refusal := self._why_not(piece):
                    send_frame(connection, Answer(refusal=refusal))
                    continue
                if piece.file not in files:
                    files[piece.file] = os.open(
                        Path(self._order.folder) / piece.file, os.O_RDONLY | os.O_CLOEXEC
                    )
                view = buffer[: piece.size]
                if not _read_fully(files[piece.file], view, piece.start):
                    send_frame(connection, Answer(refusal=f"{piece.file} ends before byte {piece.end}"))
                    continue
                if self._stamp(os.fstat(files[piece.file])) != self._stamps[piece.file]:
                    send_frame(
                        connection, Answer(refusal=f"{piece.file} was changed while it was being sent")
                    )
                    continue
                send_frame(connection, Answer(sha256=hashlib.sha256(view).digest()))
                connection.sendall(view)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def _stamp(self, status: os.stat_result) -> tuple[int, ...]:
        """Changes when another file is put in its place, or somebody writes to it; into one of ours pieces
        may come while others go."""
        stamp = status.st_dev, status.st_ino
        return stamp if self._is_delivered else (*stamp, status.st_size, status.st_mtime_ns)

    def _why_not(self, piece: Piece) -> str:
        size = self._order.files.get(piece.file)
        if size is None:
            return f"{piece.file} is no file of this model"
        if not 0 <= piece.start < piece.end <= size or piece.size > MAX_PIECE_BYTES:
            return f"{piece.file} has no bytes {piece.start} to {piece.end} to be sent at once"
        held = self._order.held
        if held is not None and not covers(held.get(piece.file, ()), [(piece.start, piece.end)]):
            return f"bytes {piece.start} to {piece.end} of {piece.file} are not here"
        return ""


def _read_fully(descriptor: int, view: memoryview, offset: int) -> bool:
    done = 0
    while done < len(view):
        got = os.preadv(descriptor, [view[done:]], offset + done)
        if got <= 0:
            return False
        done += got
    return True


def _words(error: BaseException) -> str:
    return getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)


def _work(order: SendOrder, speaker: Speaker) -> None:
    ended = threading.Event()
    on_end_of_stdin(ended.set)
    check_source(Path(order.folder), order.files)
    sender = Sender(order, lambda peer, why: speaker.say(Refused(peer=peer, why=why)))
    speaker.say(sender.listen())
    ended.wait()  # as long as the launcher lives; receivers have their own limits
    end_now()


if __name__ == "__main__":
    sys.exit(run_program(SendOrder, _work))
