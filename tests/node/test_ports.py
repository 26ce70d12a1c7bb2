"""Binding: exclusive data ports, the HTTP socket, and words for what goes wrong."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from mlx_mesh.mesh.errors import BringUpError, PreflightError
from mlx_mesh.node import ports
from mlx_mesh.node.run_file import RunFile

NET_TCP = (
    "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    "   0: 0100007F:4650 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4711 1\n"
    "   1: 0100007F:4650 0100007F:9999 01 00000000:00000000 00:00000000 00000000     0        0 4712 1\n"
    "   2: 00000000:0016 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 4713 1\n"
)


def test_each_rank_gets_ports_of_its_own_that_are_free_afterwards() -> None:
    reserved = ports.reserve_data_ports("127.0.0.1", [0, 3], 2)
    assert set(reserved) == {0, 3} and len({a for pair in reserved.values() for a in pair}) == 4
    for address in reserved[0]:
        host, _, port = address.partition(":")
        assert int(port) in ports.DATA_PORTS
        with socket.socket() as sock:
            sock.bind((host, int(port)))


def test_a_port_that_somebody_shares_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as shared:
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        shared.bind(("127.0.0.1", 0))
        shared.listen()
        taken = shared.getsockname()[1]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            free = probe.getsockname()[1]
        monkeypatch.setattr("random.sample", lambda *_: [taken, free])
        assert ports.reserve_data_ports("127.0.0.1", [0], 1) == {0: (f"127.0.0.1:{free}",)}


def test_an_address_of_another_host_is_told_with_our_own() -> None:
    with pytest.raises(BringUpError, match=r"10\.99\.0\.7 is not an address of this host \(it has .*127"):
        ports.reserve_data_ports("10.99.0.7", [0], 1)


def test_the_http_socket_listens() -> None:
    with (
        ports.bind_http("127.0.0.1", 0) as listen,
        socket.create_connection(listen.getsockname(), timeout=5),
    ):
        pass


def test_a_taken_http_port_names_its_holder() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PreflightError, match="the port is in use") as error:
            ports.bind_http("127.0.0.1", taken.getsockname()[1])
    if os.path.exists("/proc/net/tcp"):  # noqa: PTH110
        assert f"by pid {os.getpid()}" in str(error.value)


def test_a_port_of_our_own_mesh_is_told_with_how_to_stop_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    run_file, _ = RunFile.claim(tmp_path / "mlx-mesh" / "studio", "studio", "mac1", "run")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        run_file.update(url=f"http://127.0.0.1:{port}")
        with pytest.raises(PreflightError, match=r"by mesh studio\. .*`mlx-mesh down studio`"):
            ports.bind_http("127.0.0.1", port)
        run_file.release()
        with pytest.raises(PreflightError, match=r"in use( by pid|\.)"):
            ports.bind_http("127.0.0.1", port)


def test_a_name_that_does_not_resolve_is_told() -> None:
    with pytest.raises(PreflightError, match="does not resolve"):
        ports.bind_http("no-such-name.invalid", 0)


def test_only_listeners_on_the_port_are_found_in_proc_net_tcp() -> None:
    assert ports.listening_inodes(NET_TCP, 18000) == {"4711"}
    assert ports.listening_inodes(NET_TCP, 22) == {"4713"}


def test_lsof_tells_pid_and_name() -> None:
    assert ports.parse_lsof("p123\ncpython3.11\nf7\n") == "pid 123 (python3.11)"
    assert ports.parse_lsof("") == ""
