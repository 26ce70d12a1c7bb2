"""The ring's own sockets tell which neighbour hung up."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from mlx_mesh.node.engine.neighbours import hung_up, ring_links

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


@dataclass
class Ring:
    """Rank 1 of three as it sees itself: it dialled rank 2 and was dialled by rank 0."""

    links: dict[int, int]
    ends_of: dict[int, socket.socket]  # the neighbours' ends


@pytest.fixture
def ring() -> Iterator[Ring]:
    with ExitStack() as stack:
        listening = []
        for _ in range(3):
            listening.append(stack.enter_context(socket.create_server(("127.0.0.1", 0))))
        names = [sock.getsockname() for sock in listening]
        stack.enter_context(socket.create_connection(names[2]))
        next_end = stack.enter_context(listening[2].accept()[0])
        before_end = stack.enter_context(socket.create_connection(names[1]))
        stack.enter_context(listening[1].accept()[0])
        for sock in (*socket.socketpair(), socket.create_connection(names[0])):  # nothing of the ring's
            stack.enter_context(sock)
        links = ring_links([[f"{host}:{port}"] for host, port in names], 1)
        assert sorted(links.values()) == [0, 2]
        yield Ring(links, {0: before_end, 2: next_end})


def test_connections_that_are_open_are_nobodys_loss(ring: Ring) -> None:
    ring.ends_of[0].sendall(b"not read yet")
    assert hung_up(ring.links) == ()


@pytest.mark.parametrize("lost", [0, 2])
@pytest.mark.parametrize("how", ["close", "reset", "last words"])
def test_the_neighbour_that_hung_up_is_named(ring: Ring, lost: int, how: str) -> None:
    end = ring.ends_of[lost]
    if how == "reset":
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    elif how == "last words":
        end.sendall(b"not read yet")
    end.close()
    assert hung_up(ring.links) == (lost,)


def test_both_may_have_hung_up(ring: Ring) -> None:
    for end in ring.ends_of.values():
        end.close()
    assert hung_up(ring.links) == (0, 2)
