"""One end of a link measurement: an echo server on a free port, or the client that measures against it.

Plain TCP with small messages back and forth, then one large stream: what MLX's ring does. Readable by
Python 3.7.
"""

from __future__ import annotations

import json
import socket
import sys
import time

SMALL = 64
CHUNK = 1024 * 1024
ACCEPT_S = 30.0
IO_S = 20.0


def read_exactly(connection: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = connection.recv(min(size, CHUNK))
        if not part:
            raise ConnectionError("the other end closed the connection")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def serve(marker: str, address: str, num_trips: int, num_chunks: int) -> None:
    """Print the port, then answer one client."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind((address, 0))
        listener.listen(1)
        listener.settimeout(ACCEPT_S)
        say(marker, {"port": listener.getsockname()[1]})
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(IO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(num_trips):
            connection.sendall(read_exactly(connection, SMALL))
        read_exactly(connection, num_chunks * CHUNK)
        connection.sendall(b"x" * SMALL)
    say(marker, {"done": True})


def measure(marker: str, address: str, port: int, num_trips: int, num_chunks: int) -> None:
    """Median round trip in ns, and bytes a second of a stream."""
    trips = []
    with socket.create_connection((address, port), timeout=IO_S) as connection:
        connection.settimeout(IO_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(num_trips):
            began = time.perf_counter_ns()
            connection.sendall(b"x" * SMALL)
            read_exactly(connection, SMALL)
            trips.append(time.perf_counter_ns() - began)
        chunk = b"\0" * CHUNK
        began = time.perf_counter_ns()
        for _ in range(num_chunks):
            connection.sendall(chunk)
        read_exactly(connection, SMALL)
        seconds = (time.perf_counter_ns() - began) / 1e9
    rtt = sorted(trips)[len(trips) // 2]
    say(marker, {"rtt_ns": rtt, "bandwidth": int(num_chunks * CHUNK / seconds)})


def say(marker: str, answer: object) -> None:
    sys.stdout.write("\n%s %s\n" % (marker, json.dumps(answer)))  # noqa: UP031
    sys.stdout.flush()


def main(marker: str, request: str) -> None:
    asked = json.loads(request)
    if asked["do"] == "serve":
        serve(marker, asked["address"], asked["num_trips"], asked["num_chunks"])
    else:
        measure(marker, asked["address"], asked["port"], asked["num_trips"], asked["num_chunks"])
