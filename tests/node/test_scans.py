"""Scans that clients ask for: one at a time, the last one remembered."""

from __future__ import annotations

import asyncio
import threading

import pytest

from mlx_mesh.mesh.discovery import Announcement, InterfaceScan, Scan, ScanWish, Sighting
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.interfaces import LinkClass
from mlx_mesh.mesh.messages import ProxyEvent, ScanNetwork, ScanReply
from mlx_mesh.mesh.types import Versions
from mlx_mesh.node.scans import Scans

VERSIONS = Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3", protocol=1)


class Network:
    """Scans that end when they are let go."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.wishes: list[float] = []
        self.error = ""

    def scan(self, wish: ScanWish, stop: threading.Event) -> Scan:
        self.wishes.append(wish.timeout_s)
        while not self.go.wait(0.01) and not stop.is_set():
            pass
        if self.error:
            raise MeshError(self.error)
        own = Announcement(host="mac1", run="0" * 16, role="node", versions=VERSIONS)
        other = Announcement(host="mac2", run="1" * 16, role="agent", port=1, versions=VERSIONS)
        en0 = InterfaceScan(name="en0", link_class=LinkClass.ETHERNET, evidence="x", num_queries=2)
        return Scan(
            own=own,
            interfaces=(en0,),
            sightings=(Sighting(announcement=other, source="multicast", interface="en0"),),
            is_mac=False,
        )


async def told(sent: asyncio.Queue[ProxyEvent]) -> ScanReply:
    async with asyncio.timeout(10.0):
        reply = await sent.get()
    assert isinstance(reply, ScanReply)
    return reply


def test_who_asks_while_a_scan_runs_is_given_its_result_and_it_is_remembered() -> None:
    async def scenario() -> None:
        network, sent = Network(), asyncio.Queue[ProxyEvent]()
        scans = Scans(sent.put_nowait, network.scan)
        scans.hear(ScanNetwork(id="0"))
        assert await told(sent) == ScanReply(id="0", report=None)
        scans.hear(ScanNetwork(id="1", timeout_s=2.0))
        scans.hear(ScanNetwork(id="2", timeout_s=9.0))
        network.go.set()
        first, second = await told(sent), await told(sent)
        assert [first.id, second.id] == ["1", "2"] and network.wishes == [2.0]
        assert first.report is not None and first.report == second.report
        assert [(host.name, host.verdict.what) for host in first.report.hosts] == [("mac2", "usable")]
        assert (first.report.host, first.report.timeout_s, first.report.interfaces[0].num_queries) == (
            "mac1",
            2.0,
            2,
        )
        scans.hear(ScanNetwork(id="3"))
        assert await told(sent) == ScanReply(id="3", report=first.report)
        await scans.stop()

    asyncio.run(scenario())


def test_a_scan_that_fails_is_told_and_the_last_good_one_stays() -> None:
    async def scenario() -> None:
        network, sent = Network(), asyncio.Queue[ProxyEvent]()
        network.go.set()
        scans = Scans(sent.put_nowait, network.scan)
        scans.hear(ScanNetwork(id="1", timeout_s=1.0))
        good = await told(sent)
        network.error = "no interfaces today"
        scans.hear(ScanNetwork(id="2", timeout_s=1.0))
        assert await told(sent) == ScanReply(id="2", report=None, error="no interfaces today")
        scans.hear(ScanNetwork(id="3"))
        assert (await told(sent)).report == good.report
        await scans.stop()

    asyncio.run(scenario())


def test_the_end_of_the_mesh_does_not_wait_for_a_scan() -> None:
    async def scenario() -> None:
        network, sent = Network(), asyncio.Queue[ProxyEvent]()
        scans = Scans(sent.put_nowait, network.scan)
        scans.hear(ScanNetwork(id="1", timeout_s=60.0))
        async with asyncio.timeout(10.0):
            await scans.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize("timeout_s", [0.0, 0.1, 61.0, float("nan")])
def test_a_scan_takes_a_time_that_makes_sense(timeout_s: float) -> None:
    from mlx_mesh.node.scan import scan

    with pytest.raises(MeshError, match="out of range"):
        scan(ScanWish(timeout_s=timeout_s))
