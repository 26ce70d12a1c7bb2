"""Which neighbours of the ring closed their connection, read from the sockets that MLX opened.

MLX says that it lost a peer and not which one; its sockets are this process's, so they can be looked at.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_CLOSED = select.POLLHUP | select.POLLERR | getattr(select, "POLLRDHUP", 0)


def ring_links(addresses: Sequence[Sequence[str]], rank: int) -> dict[int, int]:
    """The neighbour at the other end of each of this process's descriptors that belong to the ring, which
    is connected. `addresses[r]`: where rank r listens, "ip:port"; a rank dials the next one and is dialled by
    the one before."""
    size = len(addresses)
    links = {}
    for fd in [int(entry.name) for entry in Path("/dev/fd").iterdir()]:
        with suppress(OSError), _opened(fd) as connection:  # else: no socket, or not connected
            if connection.family != socket.AF_INET:
                continue
            if _name(connection.getpeername()) in addresses[(rank + 1) % size]:
                links[fd] = (rank + 1) % size
            elif _name(connection.getsockname()) in addresses[rank]:
                links[fd] = (rank - 1) % size
    return links


def hung_up(links: Mapping[int, int]) -> tuple[int, ...]:
    """The neighbours whose connection ended."""
    return tuple(sorted({rank for fd, rank in links.items() if _is_closed(fd)}))


@contextmanager
def _opened(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor, which stays open. Raises OSError when it is none."""
    copy = os.dup(fd)
    try:
        connection = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with connection:
        yield connection


def _name(end: tuple[str, int]) -> str:
    host, port = end
    return f"{host}:{port}"


def _is_closed(fd: int) -> bool:
    """The other end hung up, gracefully or not. What it sent before may be unread."""
    poll = select.poll()
    poll.register(fd, select.POLLIN | _CLOSED)
    if dict(poll.poll(0)).get(fd, 0) & (_CLOSED | select.POLLNVAL):
        return True
    try:
        with _opened(fd) as connection:
            return not connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
