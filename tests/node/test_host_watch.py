"""The watch over one host: caffeinate lives and dies with it, sleep and link changes are told once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.node import host_watch, interfaces
from mlx_mesh.node.host_watch import HostWatch, read_clocks

CAFFEINATE = """#!/bin/sh
# Stands for caffeinate: notes its arguments, and stays as long as the process of -w.
echo "$@" > "${0%/*}/arguments"
while kill -0 "$5" 2>/dev/null; do sleep 0.05; done
"""


def link(*addresses: str, is_active: bool = True) -> Interface:
    return Interface(
        name="en2",
        link_class=LinkClass.THUNDERBOLT,
        evidence="Thunderbolt 1",
        addresses=addresses,
        is_active=is_active,
    )


@pytest.fixture
def on_a_mac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is first on PATH of what believes to be a Mac."""
    monkeypatch.setattr(host_watch, "is_mac", lambda: True)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    yield tmp_path


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - a file of another process is waited for, too
            await asyncio.sleep(0.01)


def test_a_mac_is_held_awake_as_long_as_the_agent_lives(on_a_mac: Path) -> None:
    (on_a_mac / "caffeinate").write_text(CAFFEINATE)
    (on_a_mac / "caffeinate").chmod(0o755)

    async def scenario() -> None:
        notes: list[str] = []
        watch = HostWatch(notes.append, look=lambda: [link("10.0.0.1/30")])
        await watch.start()
        assert watch.condition.awake.startswith("by caffeinate (pid ") and watch.condition.events == ()
        await until((on_a_mac / "arguments").exists)
        await until((on_a_mac / "arguments").read_text)
        assert (on_a_mac / "arguments").read_text() == f"-i -m -s -w {os.getpid()}\n"
        pid = int(watch.condition.awake.partition("pid ")[2].rstrip(")"))
        await watch.stop()
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
        assert watch.condition.events == ()  # that it ends now is no news

    asyncio.run(scenario())


def test_a_caffeinate_that_ends_or_is_missing_is_told(on_a_mac: Path) -> None:
    async def scenario() -> None:
        notes: list[str] = []
        watch = HostWatch(notes.append, look=lambda: [])
        (on_a_mac / "caffeinate").write_text("#!/bin/sh\nexit 3\n")
        (on_a_mac / "caffeinate").chmod(0o755)
        await watch.start()
        await until(lambda: watch.condition.events)
        assert watch.condition.awake == "" and "ended with status 3" in watch.condition.events[0]
        await watch.stop()

    asyncio.run(scenario())


def test_a_mac_without_caffeinate_says_so(on_a_mac: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_watch, "find_program", lambda name: None)

    async def scenario() -> None:
        notes: list[str] = []
        watch = HostWatch(notes.append, look=lambda: [])
        await watch.start()
        await watch.stop()
        assert notes == ["this Mac is not held awake: there is no caffeinate"]

    asyncio.run(scenario())


def test_sleep_and_link_changes_are_noted_once_with_their_time() -> None:
    looks = [[link("10.0.0.1/30")], [link("10.0.0.1/30", is_active=False)], []]
    clocks = [(0.0, 0.0), (1.0, 1.0), (2.0, 402.0)]

    async def scenario() -> None:
        notes: list[str] = []
        watch = HostWatch(
            notes.append,
            look=lambda: looks.pop(0) if len(looks) > 1 else looks[0],
            glance=lambda: len(looks),
            clocks=lambda: clocks.pop(0) if len(clocks) > 1 else clocks[0],
            link_tick_s=0.01,
            clock_tick_s=0.01,
        )
        await watch.start()
        await until(lambda: len(watch.condition.events) == 2)
        await watch.stop()
        assert sorted(notes) == ["en2 (Thunderbolt 1) lost its link", "the machine slept for 400 s"]
        assert all(" UTC: " in event for event in watch.condition.events)

    asyncio.run(scenario())


def test_only_the_latest_events_are_kept() -> None:
    watch = HostWatch(lambda text: None)
    for number in range(9):
        watch.tell(f"event {number}")
    assert [event[-1] for event in watch.condition.events] == ["4", "5", "6", "7", "8"]


def test_the_clocks_of_this_machine_go_on_together() -> None:
    one, other = read_clocks(), read_clocks()
    assert other[0] >= one[0] and abs((other[1] - one[1]) - (other[0] - one[0])) < 1.0


def test_the_dear_look_is_made_only_when_the_cheap_one_differs() -> None:
    glances, num_looks = [1, 1, 1, 1, 2], 0

    def look() -> list[Interface]:
        nonlocal num_looks
        num_looks += 1
        return [link("10.0.0.1/30", is_active=num_looks == 1)]

    async def scenario() -> None:
        watch = HostWatch(
            lambda text: None,
            look=look,
            glance=lambda: glances.pop(0) if len(glances) > 1 else glances[0],
            link_tick_s=0.001,
        )
        await watch.start()
        await until(lambda: watch.condition.events)
        await watch.stop()
        assert num_looks == 2
        assert len(watch.condition.events) == 1

    asyncio.run(scenario())


def test_a_glance_at_a_mac_asks_only_ifconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    text = "en2: flags=8863<UP,BROADCAST> mtu 1500\n\tinet 10.0.0.1 netmask 0xfffffffc\n\tstatus: active\n"

    def ask(words: list[str]) -> str:
        asked.append(words[0])
        return text

    monkeypatch.setattr(interfaces, "is_mac", lambda: True)
    monkeypatch.setattr(interfaces, "ask", ask)
    before = interfaces.glance_at_interfaces()
    assert interfaces.glance_at_interfaces() == before
    text = text.replace("status: active", "status: inactive")
    assert interfaces.glance_at_interfaces() != before
    assert set(asked) == {"ifconfig"}
