"""Before MLX connects: does each rank reach the next one on the real addresses and ports, and how fast.

MLX's ring says little when it cannot connect, and retries for long. Here each rank listens where it will
listen, dials the next one, exchanges a few words and a few megabytes, and gives everything back. A failure
names the pair, their addresses and what the system said.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import statistics
import struct
import sys
import threading
import time

from mlx_mesh.mesh.messages import Connect, NeighbourLink
from mlx_mesh.node.engine.binding import bind_message
from mlx_mesh.node.engine.failure import EngineError

NUM_TRIPS = 32
NUM_BYTES = 4 * 1024 * 1024
CHUNK_BYTES = 256 * 1024
RETRY_S = 0.05
IO_S = 20.0
"""A link that does not carry NUM_BYTES in this time is as good as none."""

HELLO_S = 2.0
"""Who connects and does not say in this time who it is, is not of this mesh."""

_HELLO = struct.Struct("!8sIII")  # magic, epoch, rank of the dialler, rank that it dials
_MAGIC = b"mlxmesh1"


def probe_ring(connect: Connect) -> NeighbourLink:
    """What this rank measured towards the next one, after the one before it has measured towards this one.

    Raises EngineError: bind for an address that cannot be listened on, peer_lost for a neighbour that cannot
    be reached, or does not come, within `connect.deadline_s`.
    """
    deadline = time.monotonic() + connect.deadline_s
    rank, size = connect.rank, connect.world_size
    before = (rank - 1) % size
    answered = _Answering(connect, before, deadline)
    with answered:
        link = _dial(connect, (rank + 1) % size, deadline)
        answered.wait()
    return link


class _Answering:
    """The listening side, in a thread of its own: two ranks that dial each other must not both wait."""

    def __init__(self, connect: Connect, before: int, deadline: float) -> None:
        self._connect, self._before, self._deadline = connect, before, deadline
        self._error: EngineError | None = None
        self._is_done = threading.Event()
        self._listener = _listen(connect.addresses[connect.rank][0])
        self._thread = threading.Thread(target=self._run, name="ring-probe", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._is_done.set()
        self._listener.close()

    def wait(self) -> None:
        """Until the rank before has measured. Raises what went wrong."""
        self._thread.join(max(0.0, self._deadline - time.monotonic()) + IO_S)
        if self._thread.is_alive():
            raise self._did_not_come()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        self._listener.settimeout(RETRY_S)  # a closed listener wakes a waiting accept on some systems only
        while not self._is_done.is_set():
            if time.monotonic() >= self._deadline:
                self._error = self._did_not_come()
                return
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:  # also when it was closed because dialling failed
                self._error = EngineError("bind", f"Rank {self._connect.rank} cannot accept: {error}.")
                return
            with connection, contextlib.suppress(OSError):  # a stranger, or a dialler that comes again
                if self._answer(connection):
                    return

    def _answer(self, connection: socket.socket) -> bool:
        """Whether this was the rank before, and it got all its answers."""
        connection.settimeout(HELLO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        hello = _hello(self._connect, self._before, self._connect.rank)
        if _receive(connection, len(hello)) != hello:
            return False
        connection.settimeout(IO_S)
        connection.sendall(hello)
        for _ in range(NUM_TRIPS):
            connection.sendall(_receive(connection, 8))
        _receive(connection, NUM_BYTES)
        # Before the last word: the other side goes on to MLX with it, whose first call must find MLX here.
        self._listener.close()
        connection.sendall(hello)
        # The other side closes first, so that its port is the one that waits a while before it is free.
        return connection.recv(1) == b""

    def _did_not_come(self) -> EngineError:
        own = self._connect.addresses[self._connect.rank][0]
        return EngineError(
            "peer_lost",
            f"Rank {self._before} did not reach rank {self._connect.rank} at {own} within "
            f"{self._connect.deadline_s:g} s.",
            (self._before,),
        )


def _listen(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        # Without it a connection of an earlier try that is not quite gone would keep the port.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, int(port)))
        listener.listen(4)
    except OSError as error:
        listener.close()
        raise EngineError("bind", bind_message(host, port, error)) from error
    return listener


def _dial(connect: Connect, peer: int, deadline: float) -> NeighbourLink:
    address = connect.addresses[peer][0]
    host, _, port = address.rpartition(":")
    last = OSError(errno.ETIMEDOUT, "no answer")
    while True:
        left_s = deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise last
            with socket.create_connection((host, int(port)), timeout=min(left_s, IO_S)) as connection:
                return _measure(connect, peer, connection)
        except OSError as error:
            last = error
            # Its listener may not be there yet; what does not change by itself is told at once.
            if left_s <= 0 or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES):
                raise EngineError("peer_lost", unreachable(connect, peer, error), (peer,)) from error
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))


def _measure(connect: Connect, peer: int, connection: socket.socket) -> NeighbourLink:
    connection.settimeout(IO_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    hello = _hello(connect, connect.rank, peer)
    connection.sendall(hello)
    if _receive(connection, len(hello)) != hello:
        raise ConnectionError(errno.ECONNRESET, "a program of another mesh or epoch answered")
    trips = []
    for number in range(NUM_TRIPS):
        began = time.perf_counter_ns()
        connection.sendall(number.to_bytes(8, "big"))
        _receive(connection, 8)
        trips.append(time.perf_counter_ns() - began)
    chunk = bytes(CHUNK_BYTES)
    began = time.perf_counter_ns()
    for _ in range(NUM_BYTES // CHUNK_BYTES):
        connection.sendall(chunk)
    _receive(connection, len(hello))
    took_ns = time.perf_counter_ns() - began
    return NeighbourLink(
        peer=peer,
        rtt_ns=int(statistics.median(trips)),
        bandwidth=NUM_BYTES * 1_000_000_000 // max(1, took_ns),
    )


def _hello(connect: Connect, rank: int, peer: int) -> bytes:
    return _HELLO.pack(_MAGIC, connect.epoch & 0xFFFFFFFF, rank, peer)


def _receive(connection: socket.socket, size: int) -> bytes:
    """All of so many bytes; of large ones only the last part is kept. Raises OSError."""
    left, part = size, b""
    kept = bytearray()
    while left:
        part = connection.recv(min(left, CHUNK_BYTES))
        if not part:
            raise ConnectionError(
                errno.ECONNRESET, "it closed the connection, as a program of another mesh or epoch would"
            )
        left -= len(part)
        if size <= CHUNK_BYTES:
            kept += part
    return bytes(kept)


def unreachable(connect: Connect, peer: int, error: OSError) -> str:
    """A failed dial in words, with what usually is behind it."""
    own, there = connect.addresses[connect.rank][0], connect.addresses[peer][0]
    said = error.strerror or str(error)
    text = f"Rank {connect.rank} ({own}) cannot reach rank {peer} at {there}: {said}. "
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH) and sys.platform == "darwin":
        return text + (
            "If `ping` works, macOS's Local Network privacy holds this program back: start it over SSH or "
            "from Terminal, or allow the program that started it in System Settings, Privacy & Security, "
            "Local Network."
        )
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
        return text + "They have no network in common that is up: set `addresses:` in the hostfile."
    return text + "Check that no firewall is between the hosts on these addresses."
