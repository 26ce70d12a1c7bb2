"""The folder of pairings, used by several threads: hosts are connected to side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from mlx_mesh.launcher.pairings import PairedHost, Pairings


def test_the_first_connections_to_several_hosts_make_one_key(tmp_path: Path) -> None:
    for attempt in range(8):
        environment = {"XDG_STATE_HOME": str(tmp_path / str(attempt))}
        with ThreadPoolExecutor(8) as pool:
            keys = list(pool.map(Pairings.key_of, [Pairings(environment)] * 8, ["launcher"] * 8))
        assert len({key.asbytes() for key in keys}) == 1
        folder = Pairings(environment).folder
        assert [path.name for path in folder.iterdir()] == ["launcher_key"]


def test_hosts_that_are_kept_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    pairings = Pairings({"XDG_STATE_HOME": str(tmp_path)})
    hosts = [
        PairedHost(name=f"mac{i}", key=f"SHA256:{i}", addresses=(), port=1, paired_at=0.0) for i in range(24)
    ]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(pairings.keep_host, hosts))
    assert {host.name for host in pairings.hosts()} == {host.name for host in hosts}
