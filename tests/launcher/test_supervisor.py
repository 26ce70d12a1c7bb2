"""The launcher's books of its agents, without any process."""

from __future__ import annotations

import io
import queue
import sys
import time
from typing import Any

import pytest

from mlx_mesh.launcher import supervisor as supervisor_module
from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.preflight import ReadyHost
from mlx_mesh.launcher.remote import Exit, LocalHost
from mlx_mesh.launcher.revival import SHORT_LIFE_S
from mlx_mesh.launcher.supervisor import Supervisor
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.messages import MeshReady
from mlx_mesh.mesh.types import HostFacts, Versions

FACTS = HostFacts(
    hostname="box",
    system="Linux",
    machine="x86_64",
    chip="",
    memory_bytes=8,
    usable_memory_bytes=8,
    addresses=("127.0.0.1",),
    versions=Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3.12"),
)


class StartsNothing(LocalHost):
    """A host that can be reached, and breaks when something shall be started there."""

    def start(self, *args: Any) -> Any:
        raise HostFault(self.name, "connect", "the connection broke", "look at it")


@pytest.mark.parametrize(
    ("addresses", "asked", "announces"),
    [
        (("10.0.0.1", "10.0.0.2"), None, True),
        (("10.0.0.1", "10.0.0.2"), False, False),
        (("127.0.0.1", "127.0.0.1"), None, False),
        (("10.0.0.1",), None, False),
        (("127.0.0.1",), True, True),
    ],
)
def test_agents_announce_a_mesh_of_several_hosts(
    addresses: tuple[str, ...], asked: bool | None, announces: bool
) -> None:
    entries = tuple(HostEntry(name=f"mac{number}") for number in range(len(addresses)))
    hosts = [
        ReadyHost(entry, LocalHost(entry.name), sys.executable, "m", FACTS, address)
        for entry, address in zip(entries, addresses, strict=True)
    ]
    config = LaunchConfig(name="studio", model="m", hosts=entries, announce=asked)
    mesh = Supervisor(config, hosts, Console(io.StringIO()), lambda agents: None)
    told = [mesh.agent_config(index, "").announce for index in range(len(hosts))]
    assert told == [announces] * len(hosts)


def test_an_agent_that_cannot_even_be_started_is_tried_again_after_longer_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = (HostEntry(name="mac1"), HostEntry(name="mac2"))
    hosts = [ReadyHost(entry, LocalHost(entry.name), sys.executable, "m", FACTS, "") for entry in entries]
    config = LaunchConfig(name="studio", model="m", hosts=entries)
    tries: queue.SimpleQueue[int] = queue.SimpleQueue()

    def reach_again(entry: HostEntry, ssh: str, old: Any, num_tries: int, *more: Any) -> LocalHost:
        tries.put(num_tries)
        return StartsNothing(entry.name)

    monkeypatch.setattr(supervisor_module, "reach_again", reach_again)
    mesh = Supervisor(config, hosts, Console(io.StringIO()), lambda agents: None)
    mesh._handle(0, MeshReady(url="", epoch=1, seconds=1.0))
    mesh._agents[1].started_at = time.monotonic() - 2 * SHORT_LIFE_S
    mesh._ended(1, Exit(code=0))
    for _ in range(2):  # it is reached, and its start fails
        assert mesh._take(timeout_s=20.0) and mesh._take(timeout_s=20.0)
    assert [tries.get(timeout=20.0) for _ in range(3)] == [0, 1, 2]
