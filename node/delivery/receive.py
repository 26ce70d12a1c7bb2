"""`python -m mlx_mesh.node.delivery.receive`: fetch pieces from senders into a folder. ReceiveOrder in,
Receiving and Received out.

Each piece is compared with the sender's SHA-256 before it is written, and counts from the moment its line is
in the journal: whatever ends this process, the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import socket
import ssl
import sys
import threading
import time
from collections import deque
from pathlib import Path

from mlx_mesh.mesh.delivery import MAX_PIECE_BYTES, Piece
from mlx_mesh.mesh.delivery_orders import Received, ReceiveOrder, Receiving, Source
from mlx_mesh.mesh.errors import ExitCode, MeshError, ProtocolError
from mlx_mesh.node.delivery.certificate import client_context, is_pinned
from mlx_mesh.node.delivery.part_folder import PartWriter, check_target, open_part
from mlx_mesh.node.delivery.program import Speaker, on_end_of_stdin, run_program
from mlx_mesh.node.delivery.wire import HANDSHAKE_S, IO_S, Answer, Hello, read_frame, read_into, send_frame

NUM_STREAMS = 2
"""Connections to each sender: while one waits for a disk or a hash, the other fills the link."""

NUM_TRIES = 3  # of one connection that breaks, without a piece in between
NUM_ASKED = 2  # pieces under way on one connection
CONNECT_S = 5.0
RETRY_S = 0.5
TICK_S = 0.5
SETTLE_S = 2.0


class SenderLost(MeshError):
    """A sender cannot be reached or does not give what it has; another one may."""

    def __init__(self, host: str, why: str) -> None:
        super().__init__(f"nothing comes from {host}: {why}")
        self.lost = host


class Receiver:
    """Fetches everything of an order. `run` once; `stop` from any thread."""

    def __init__(self, order: ReceiveOrder, writer: PartWriter) -> None:
        self._order = order
        self._writer = writer
        self._queues = {source.host: deque(source.pieces) for source in order.sources}
        self._lock = threading.Lock()
        self._changed = threading.Event()
        self._error: BaseException | None = None
        self._is_stopped = False
        self.is_done = False
        self._via: dict[str, str] = {}
        self.num_bytes = 0  # over the network
        self.num_written = 0
        self.num_pieces = 0

    @property
    def total(self) -> int:
        return sum(piece.size for source in self._order.sources for piece in source.pieces)

    @property
    def via(self) -> str:
        with self._lock:
            return ", ".join(sorted(set(self._via.values())))

    def stop(self) -> None:
        self._is_stopped = True
        self._changed.set()

    def run(self, say: Speaker | None = None) -> None:
        """Until all pieces are there (returns) or it cannot go on (raises MeshError)."""
        threads = [
            threading.Thread(target=self._stream, args=(source,), daemon=True)
            for source in self._order.sources
            for _ in range(min(NUM_STREAMS, len(source.pieces)))
        ]
        for thread in threads:
            thread.start()
        settled_at = time.monotonic()
        told = -1
        try:
            while any(thread.is_alive() for thread in threads):
                self._changed.wait(TICK_S)
                self._changed.clear()
                if self._error is not None or self._is_stopped:
                    break
                if time.monotonic() - settled_at > SETTLE_S:
                    self._writer.settle()
                    settled_at = time.monotonic()
                if say is not None and self.num_written != told:
                    told = self.num_written
                    say.say(Receiving(done=told, total=self.total, via=self.via))
        finally:
            self._is_stopped = True
            for thread in threads:  # a piece that is being written is finished
                thread.join(TICK_S)
            self._writer.settle()
            self.is_done = True
        if self._error is not None:
            raise self._error
        left = sum(map(len, self._queues.values()))
        if left:
            raise MeshError(f"ended with {left} pieces left")

    def _stream(self, source: Source) -> None:
        """One connection, made again when it breaks."""
        tries = 0
        try:
            while not self._is_stopped and self._queues[source.host]:
                before = self.num_pieces
                try:
                    self._connect_and_fetch(source)
                except (OSError, ProtocolError) as error:
                    tries = tries + 1 if self.num_pieces == before else 1
                    if tries >= NUM_TRIES:
                        raise SenderLost(source.host, _words(error)) from error
                    time.sleep(RETRY_S)  # a link that comes back, a sender that is busy
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        finally:
            self._changed.set()

    def _connect_and_fetch(self, source: Source) -> None:
        under_way: deque[Piece] = deque()
        try:
            with self._connect(source) as connection:
                self._fetch(source, connection, under_way)
        finally:
            with self._lock:
                self._queues[source.host].extendleft(reversed(under_way))

    def _connect(self, source: Source) -> ssl.SSLSocket:
        context = client_context(source.certificate)
        failed: list[str] = []
        for address, port in source.endpoints:
            try:
                raw = socket.create_connection((address, port), timeout=CONNECT_S)
            except OSError as error:
                failed.append(f"{address}:{port} {_words(error)}")
                continue
            try:
                raw.settimeout(HANDSHAKE_S)
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                connection = context.wrap_socket(raw)
            except ssl.SSLError as error:
                raw.close()
                raise SenderLost(
                    source.host,
                    f"who answers at {address}:{port} does not have its certificate ({_words(error)})",
                ) from error
            except BaseException:
                raw.close()
                raise
            try:
                self._introduce(source, connection)
            except BaseException:
                connection.close()
                raise
            self._via[source.host] = address
            return connection
        raise OSError(None, f"no connection ({'; '.join(failed) or 'it has no address'})")

    def _introduce(self, source: Source, connection: ssl.SSLSocket) -> None:
        if not is_pinned(connection, source.certificate):
            raise SenderLost(source.host, "it shows another certificate")
        self._count(send_frame(connection, Hello(token=source.token)))
        answer = read_frame(connection, Answer)
        if answer is None or answer[0].refusal:
            raise SenderLost(source.host, answer[0].refusal if answer else "it hung up")
        connection.settimeout(IO_S)

    def _fetch(self, source: Source, connection: ssl.SSLSocket, under_way: deque[Piece]) -> None:
        buffer = memoryview(bytearray(MAX_PIECE_BYTES))
        queue = self._queues[source.host]
        while not self._is_stopped:
            while len(under_way) < NUM_ASKED and (piece := self._take(queue)) is not None:
                under_way.append(piece)
                self._count(send_frame(connection, piece))
            if not under_way:
                return
            piece = under_way[0]
            answered = read_frame(connection, Answer)
            if answered is None:
                raise ConnectionResetError("it hung up")
            answer, num_bytes = answered
            if answer.refusal:
                raise SenderLost(source.host, answer.refusal)
            view = buffer[: piece.size]
            read_into(connection, view)
            self._count(num_bytes + piece.size)
            digest = hashlib.sha256(view)
            if digest.digest() != answer.sha256:
                raise ProtocolError(
                    f"bytes {piece.start} to {piece.end} of {piece.file} came with another SHA-256"
                )
            self._writer.write(piece, view, digest.hexdigest())
            under_way.popleft()
            with self._lock:
                self.num_written += piece.size
                self.num_pieces += 1

    def _take(self, queue: deque[Piece]) -> Piece | None:
        with self._lock:
            return queue.popleft() if queue else None

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self.num_bytes += num_bytes


def _words(error: BaseException) -> str:
    return getattr(error, "reason", "") or getattr(error, "strerror", "") or str(error)


def _work(order: ReceiveOrder, speaker: Speaker) -> None:
    began = time.monotonic()
    check_target(Path(order.folder), order.head)
    with open_part(Path(order.folder), order.head, order.again) as writer:
        receiver = Receiver(order, writer)

        def leave() -> None:
            if receiver.is_done:
                return
            receiver.stop()
            with contextlib.suppress(MeshError, OSError):
                writer.settle()
            os._exit(ExitCode.INTERRUPTED)

        on_end_of_stdin(leave)
        receiver.run(speaker)
        speaker.say(
            Received(
                num_bytes=receiver.num_bytes,
                num_pieces=receiver.num_pieces,
                seconds=time.monotonic() - began,
            )
        )


if __name__ == "__main__":
    sys.exit(run_program(ReceiveOrder, _work))
