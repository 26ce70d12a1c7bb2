"""Hosts that are short of memory: how a system says so, and what the mesh does meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Chunk, Failed, MeshStatus
from mlx_mesh.node import agent
from mlx_mesh.node.pressure import linux_pressure, mac_pressure, read_pressure

CALM = "some avg10=35.00 avg60=1.00 avg300=0.00 total=9\nfull avg10=3.10 avg60=0.50 avg300=0.00 total=4\n"
SHORT = CALM.replace("full avg10=3.10", "full avg10=41.70")


def test_only_work_that_stands_still_for_memory_is_pressure() -> None:
    assert linux_pressure([]) == linux_pressure([""]) == linux_pressure([CALM, "nonsense"]) == ""
    assert "42 %" in linux_pressure([CALM, SHORT])
    assert [mac_pressure(level) for level in (0, 1, 2)] == ["", "", ""]
    assert "critical" in mac_pressure(4)


def test_this_host_can_be_asked() -> None:
    assert isinstance(read_pressure(), str)


async def test_while_a_host_is_short_of_memory_no_new_request_is_taken_and_open_ones_go_on(
    run_mesh: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = ""
    monkeypatch.setattr(agent, "read_pressure", lambda: said)
    async with run_mesh() as mesh:
        _, line = await mesh.up()
        line.submit("open", 100)
        said = "all work stood still"
        await until(line, lambda status: all(host.pressure == said for host in status.hosts))
        line.submit("new", 4)
        failed = await line.wait_for(Failed, lambda event: event.id == "new")
        assert failed.code == "memory_pressure" and failed.retry_after_s > 0
        assert "mac2: all work stood still" in failed.message
        said = ""
        await until(line, lambda status: not any(host.pressure for host in status.hosts))
        line.submit("later", 4)
        ids, how = await line.answer("later")
        assert (len(ids), how) == (4, "length")
        open_ids: list[int] = []
        while len(open_ids) < 100:  # none of them was lost or stopped
            open_ids = [
                token_id
                for event in line.events
                if isinstance(event, Chunk) and event.chunk.id == "open"
                for token_id in event.chunk.token_ids
            ]
            await line.status()
        assert open_ids == mesh.undisturbed_tokens(100)


async def until(line: Any, holds: Callable[[MeshStatus], bool]) -> None:
    """Asked for again and again; heartbeats bring the news."""
    async with asyncio.timeout(20):
        while not holds(await line.status()):
            pass
