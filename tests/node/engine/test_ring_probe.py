"""Each rank reaches the next one on the real addresses and ports before MLX connects."""

from __future__ import annotations

import errno
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest

from mlx_mesh.mesh.messages import Connect
from mlx_mesh.mesh.types import Backend
from mlx_mesh.node.engine import ring_probe
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.ring_probe import probe_ring, unreachable


def free_addresses(count: int) -> tuple[tuple[str, ...], ...]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    addresses = tuple((f"127.0.0.1:{sock.getsockname()[1]}",) for sock in sockets)
    for sock in sockets:
        sock.close()
    return addresses


def connect(rank: int, addresses: tuple[tuple[str, ...], ...], deadline_s: float = 30.0) -> Connect:
    return Connect(
        epoch=7,
        rank=rank,
        world_size=len(addresses),
        backend=Backend.RING,
        addresses=addresses,
        deadline_s=deadline_s,
    )


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_measures_towards_the_next(size: int) -> None:
    addresses = free_addresses(size)
    with ThreadPoolExecutor(size) as pool:
        links = list(pool.map(lambda rank: probe_ring(connect(rank, addresses)), range(size)))
    assert [link.peer for link in links] == [(rank + 1) % size for rank in range(size)]
    assert all(0 < link.rtt_ns < 5_000_000_000 and link.bandwidth > 0 for link in links)


def test_the_ports_are_free_afterwards_even_for_one_that_shares_nothing() -> None:
    """Whoever closes first keeps its port for a while: that must not be the listening side."""
    addresses = free_addresses(2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: probe_ring(connect(rank, addresses)), range(2)))
    for (address,) in addresses:
        host, _, port = address.rpartition(":")
        with socket.socket() as sock:
            sock.bind((host, int(port)))


def test_who_has_measured_finds_no_listener_any_more() -> None:
    """MLX's first call after it would take this listener for MLX's own at the other side."""
    addresses = free_addresses(2)
    host, _, port = addresses[1][0].rpartition(":")
    deadline = time.monotonic() + 30
    answering = ring_probe._Answering(connect(1, addresses), 0, deadline)
    with answering:
        ring_probe._dial(connect(0, addresses), 1, deadline)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)))
        answering.wait()


def test_a_stranger_does_not_take_the_place_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_probe, "HELLO_S", 0.2)
    addresses = free_addresses(2)
    host, _, port = addresses[0][0].rpartition(":")
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(probe_ring, connect(0, addresses))
        while True:  # until it listens
            try:
                silent = socket.create_connection((host, int(port)))
                break
            except ConnectionRefusedError:
                time.sleep(0.01)
        wrong = socket.create_connection((host, int(port)))
        wrong.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        second = pool.submit(probe_ring, connect(1, addresses))
        began = time.monotonic()
        assert first.result(30).peer == 1 and second.result(30).peer == 0
        assert time.monotonic() - began < ring_probe.IO_S / 2  # the silent one is not waited for
        silent.close()
        wrong.close()


def test_a_neighbour_that_never_comes_is_named_with_its_address() -> None:
    addresses = free_addresses(2)
    with pytest.raises(EngineError) as error:
        probe_ring(connect(0, addresses, deadline_s=0.3))
    assert error.value.kind == "peer_lost"
    assert f"Rank 0 ({addresses[0][0]}) cannot reach rank 1 at {addresses[1][0]}" in str(error.value)


def test_a_rank_of_another_epoch_is_no_neighbour() -> None:
    addresses = free_addresses(2)
    other = msgspec.structs.replace(connect(1, addresses, deadline_s=1.0), epoch=8)
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(probe_ring, each) for each in (connect(0, addresses, deadline_s=1.0), other)]
        for result in results:
            with pytest.raises(EngineError, match=r"another mesh or epoch|did not reach"):
                result.result(30)


def test_a_neighbour_that_can_be_dialled_and_does_not_dial_is_named() -> None:
    """Traffic may pass in one direction only."""
    addresses = free_addresses(2)
    host, _, port = addresses[1][0].rpartition(":")
    listener = socket.create_server((host, int(port)))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            hello = connection.recv(64)
            connection.sendall(hello)
            for _ in range(ring_probe.NUM_TRIPS):
                connection.sendall(connection.recv(8))
            left = ring_probe.NUM_BYTES
            while left:
                left -= len(connection.recv(min(left, 1 << 20)))
            connection.sendall(hello)
            connection.recv(1)

    thread = threading.Thread(target=answer)
    thread.start()
    with listener, pytest.raises(EngineError, match=r"Rank 1 did not reach rank 0 at 127\.0\.0\.1:"):
        probe_ring(connect(0, addresses, deadline_s=1.0))
    thread.join()


def test_a_taken_port_is_told_before_anything_else() -> None:
    addresses = free_addresses(2)
    host, _, port = addresses[0][0].rpartition(":")
    with socket.create_server((host, int(port))), pytest.raises(EngineError) as error:
        probe_ring(connect(0, addresses))
    assert error.value.kind == "bind" and port in str(error.value)


def test_no_route_on_a_mac_is_told_with_its_usual_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = connect(0, (("10.0.0.1:5000",), ("10.0.0.2:5000",)))
    error = OSError(errno.EHOSTUNREACH, "No route to host")
    assert "no network in common" in unreachable(asked, 1, error)
    monkeypatch.setattr("sys.platform", "darwin")
    assert "Local Network privacy" in unreachable(asked, 1, error)
    assert "firewall" in unreachable(asked, 1, OSError(errno.ETIMEDOUT, "timed out"))
