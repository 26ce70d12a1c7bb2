"""Every way in which a real agent process may die: soon nothing of it is left on any host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.errors import ExitCode
from mlx_mesh.mesh.messages import (
    AgentConfig,
    AgentListening,
    Chunk,
    EpochEnded,
    Failed,
    Farewell,
    LauncherEvent,
    MeshReady,
)
from mlx_mesh.node.processes import ProcessId, identify, is_alive
from mlx_mesh.node.run_file import RunRecord

MARKER = "@mesh@"
SOON_S = 10.0
OWN_FDS = Path("/proc/self/fd")


class Launched:
    """An agent process as the launcher starts it."""

    def __init__(self, process: asyncio.subprocess.Process, run_file: Path) -> None:
        self.process = process
        self.run_file = run_file

    async def wait_for(self, kind: Any) -> Any:
        assert self.process.stdout is not None
        async with asyncio.timeout(30.0):
            while line := await self.process.stdout.readline():
                if line.startswith(MARKER.encode()):
                    event = msgspec.json.decode(line[len(MARKER) :], type=LauncherEvent)
                    if isinstance(event, kind):
                        return event
        raise AssertionError(f"the agent ended without {kind.__name__}")

    def children(self) -> list[ProcessId]:
        record = msgspec.json.decode(self.run_file.read_bytes(), type=RunRecord)
        return [*record.engines.values(), *([record.proxy] if record.proxy else [])]

    async def ended(self) -> int:
        assert self.process.stdout is not None
        async with asyncio.timeout(SOON_S):
            while await self.process.stdout.read(65536):
                pass
            return await self.process.wait()


@contextlib.asynccontextmanager
async def launched(mesh: Any, host: str) -> AsyncIterator[Launched]:
    mesh.write_scripts()
    config: AgentConfig = mesh.config(host, marker=MARKER, attached=True)
    programs = {name: list(getattr(mesh.programs, name)) for name in ("engine", "proxy", "inspect")}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(Path(__file__).parent / "programs" / "fake_agent.py"),
        str(mesh.state / host),
        json.dumps(programs),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(config) + b"\n")
    try:
        yield Launched(process, mesh.state / host / "test" / f"agent-{host}.json")
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def gone(processes: list[ProcessId]) -> None:
    """Other processes' children send us no event, so this one polls."""
    async with asyncio.timeout(SOON_S):
        while any(is_alive(process) for process in processes):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def two_hosts(mesh: Any) -> AsyncIterator[tuple[Launched, Launched, list[ProcessId]]]:
    """Leader, follower and all their children, ready."""
    async with launched(mesh, "mac1") as leader:
        mesh.coordinator = (await leader.wait_for(AgentListening)).coordinator
        async with launched(mesh, "mac2") as follower:
            await leader.wait_for(MeshReady)
            children = leader.children() + follower.children()
            assert len(children) == 3 and all(is_alive(child) for child in children)
            yield leader, follower, children


async def test_the_end_of_input_ends_both_hosts(run_mesh: Any) -> None:
    async with run_mesh() as mesh, two_hosts(mesh) as (leader, follower, children):
        for agent in (leader, follower):
            agent.process.stdin.close()  # type: ignore[union-attr]
        assert await leader.ended() == ExitCode.OK
        await follower.ended()
        await gone(children)
        assert not leader.run_file.exists() and not follower.run_file.exists()


async def test_the_launchers_last_line_tells_clients_why_the_mesh_ended(run_mesh: Any) -> None:
    async with run_mesh() as mesh, two_hosts(mesh) as (leader, follower, _):
        line = await mesh.connect(msgspec.json.decode(leader.run_file.read_bytes())["url"])
        await line.ready()
        line.submit("a", 100_000)
        await line.wait_for(Chunk)
        why = Farewell(reason="The agent on mac9 is gone.", is_failure=True)
        stdin = leader.process.stdin
        assert stdin is not None
        stdin.write(msgspec.json.encode(why) + b"\n")
        stdin.close()
        failed = await line.wait_for(Failed)
        assert failed.code == "mesh_failed" and "The agent on mac9 is gone." in failed.message
        await leader.ended()
        await follower.ended()


async def test_a_killed_leader_takes_the_follower_with_it(run_mesh: Any) -> None:
    async with run_mesh() as mesh, two_hosts(mesh) as (leader, follower, children):
        leader.process.kill()
        async with asyncio.timeout(mesh.deadlines.heartbeat_timeout_s - 0.5):  # not by its silence
            assert await follower.ended() == ExitCode.FAILED
        await gone(children)
        assert not follower.run_file.exists()


async def test_a_frozen_leader_ends_the_follower_after_its_timeouts(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(
            mesh.deadlines, heartbeat_timeout_s=1.0, rejoin_timeout_s=4.0
        )
        async with two_hosts(mesh) as (leader, follower, _):
            engines = follower.children()
            leader.process.send_signal(signal.SIGSTOP)
            async with asyncio.timeout(mesh.deadlines.rejoin_timeout_s - 0.5):
                await gone(engines)
            assert follower.process.returncode is None  # it looks for the leader a while longer
            assert await follower.ended() == ExitCode.FAILED


async def test_a_leader_that_slept_blames_nobody_when_it_wakes(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(
            mesh.deadlines, engine_silence_s=1.0, heartbeat_timeout_s=20.0, rejoin_timeout_s=30.0
        )
        async with two_hosts(mesh) as (leader, follower, children):
            url = msgspec.json.decode(leader.run_file.read_bytes(), type=RunRecord).url
            leader.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(3.0)  # this long sleep is what the test is about
            leader.process.send_signal(signal.SIGCONT)
            line = await mesh.connect(url)
            await line.ready()
            line.submit("a", 150)  # longer than engine_silence_s
            assert (await line.answer("a"))[1] == "length"
            assert (await line.status()).epoch == 1
            assert all(is_alive(child) for child in children) and follower.process.returncode is None


async def test_sigterm_on_the_leader_stops_all_hosts_cleanly(run_mesh: Any) -> None:
    async with run_mesh() as mesh, two_hosts(mesh) as (leader, follower, children):
        leader.process.terminate()
        assert await leader.ended() == ExitCode.OK
        assert not any(is_alive(child) for child in children)
        assert await follower.ended() == ExitCode.OK


async def test_a_killed_follower_is_noticed_within_a_second(run_mesh: Any) -> None:
    async with run_mesh() as mesh, two_hosts(mesh) as (leader, follower, _):
        loop = asyncio.get_running_loop()
        follower.process.kill()
        at = loop.time()
        ended = await leader.wait_for(EpochEnded)
        assert loop.time() - at < 1.0
        assert "mac2" in ended.cause


async def test_leftovers_of_a_dead_agent_are_ended_by_the_next_one(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        bystander = await asyncio.create_subprocess_exec("sleep", "60")
        sleeper = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
        folder = mesh.state / "mac1" / "test"
        folder.mkdir(parents=True)
        left = identify(sleeper.pid)
        other = identify(bystander.pid)
        assert left is not None and other is not None
        record = RunRecord(
            mesh="test",
            run_id="old",
            host="mac1",
            agent=ProcessId(pid=2**22 - 1, start_time="long ago"),
            engines={
                "0": left,
                # The pid lives, but it is another process by now.
                "1": ProcessId(pid=other.pid, start_time="long ago"),
            },
        )
        (folder / "agent-mac1.json").write_bytes(msgspec.json.encode(record))
        try:
            leader = await mesh.start_leader()
            assert await asyncio.wait_for(sleeper.wait(), SOON_S) == -signal.SIGKILL
            assert f"left behind (pid {sleeper.pid})" in leader.output.text()
            assert is_alive(other) and str(other.pid) not in leader.output.text()
        finally:
            for process in (bystander, sleeper):
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def num_descriptors() -> int:
    return len(list(OWN_FDS.iterdir()))


@pytest.mark.skipif(not OWN_FDS.exists(), reason="reads /proc")
async def test_an_agent_that_comes_and_goes_leaves_no_descriptor_open(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        before = num_descriptors()
        await mesh.up()
        await mesh.close()
        assert num_descriptors() <= before + 1


async def test_a_host_that_was_frozen_for_too_long_joins_again_when_it_wakes(run_mesh: Any) -> None:
    async with run_mesh() as mesh:
        mesh.deadlines = msgspec.structs.replace(
            mesh.deadlines, heartbeat_timeout_s=1.0, rejoin_timeout_s=20.0
        )
        async with two_hosts(mesh) as (leader, follower, _):
            old_engines = follower.children()
            follower.process.send_signal(signal.SIGSTOP)
            ended = await leader.wait_for(EpochEnded)
            assert "host mac2" in ended.cause and "heartbeat_timeout_s" in ended.cause
            follower.process.send_signal(signal.SIGCONT)
            assert (await leader.wait_for(MeshReady)).epoch == 2
            assert not any(is_alive(engine) for engine in old_engines)
