"""What engines do when another one, a stranger or their agent gets in the way; what they cost while idle."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Connect, EngineFailed, EngineHello, Heartbeat
from mlx_mesh.mesh.types import Backend, Phase, Sharding
from mlx_mesh.node.engine.failure import EXIT_AGENT_GONE, EXIT_STATUS

pytestmark = pytest.mark.two_rank

SPLITS = {"pipeline": (Sharding.PIPELINE, [3, 3]), "tensor": (Sharding.TENSOR, [1, 1])}
LONG = 2000  # tokens; no test waits for all of them
ENDS_WITHIN_S = 10.0
NO_PROBE = "import mlx_mesh.node.engine.group as group; group.probe_ring = lambda _: None"
"""What comes after the probe of the links: what MLX makes of a stranger."""


def start(bench: Any, mesh: Any, model: Path, name: str = "pipeline") -> None:
    sharding, stages = SPLITS[name]
    mesh.connect()
    mesh.load(model, bench.split(sharding, 6, stages))


@pytest.mark.parametrize(
    ("name", "victim"),
    [
        ("pipeline", 1),
        ("tensor", 0),
        pytest.param("pipeline", 0, marks=pytest.mark.long),
        pytest.param("tensor", 1, marks=pytest.mark.long),
    ],
)
def test_the_survivor_of_a_killed_engine_says_peer_lost_and_ends(
    name: str, victim: int, bench: Any, tiny_llama: Path
) -> None:
    with bench.mesh(2) as mesh:
        start(bench, mesh, tiny_llama, name)
        mesh.submit(bench.greedy("a", [5, 6, 7], LONG))
        mesh.wait_for_tokens("a", 5)
        killed = time.monotonic()
        mesh.engines[victim].process.kill()
        survivor = mesh.engines[1 - victim]
        failure = survivor.wait_for_kind(EngineFailed)
        assert (failure.phase, failure.kind, failure.lost_ranks) == (Phase.READY, "peer_lost", (victim,))
        assert survivor.wait_for_exit() == EXIT_STATUS["peer_lost"]
        assert time.monotonic() - killed < ENDS_WITHIN_S


def test_an_idle_follower_notices_that_the_leader_was_killed(bench: Any, tiny_llama: Path) -> None:
    with bench.mesh(2) as mesh:
        start(bench, mesh, tiny_llama)
        mesh.leader.process.kill()
        failure = mesh.engines[1].wait_for_kind(EngineFailed)
        assert failure.kind == "peer_lost"
        assert "rank 0" in failure.message
        assert mesh.engines[1].wait_for_exit() == EXIT_STATUS["peer_lost"]


def test_an_engine_inside_a_collective_ends_with_its_agent(bench: Any, tiny_llama: Path) -> None:
    with bench.mesh(2) as mesh:
        start(bench, mesh, tiny_llama)
        mesh.engines[1].process.send_signal(signal.SIGSTOP)
        mesh.submit(bench.greedy("a", [5, 6, 7], LONG))
        mesh.leader.wait_for_kind(Heartbeat, lambda beat: beat.busy and beat.busy_s > 0.5)  # it hangs
        mesh.leader.hang_up()
        assert mesh.leader.wait_for_exit() == EXIT_AGENT_GONE


def test_a_stranger_on_the_data_port_cannot_keep_the_ranks_for_ever(bench: Any) -> None:
    """MLX takes it for the peer, and the real peer waits inside `init`, which nothing but a watchdog ends."""
    with bench.mesh(2, codes=[NO_PROBE, NO_PROBE]) as mesh:
        ports = bench.free_ports(2)
        wait_for_hellos(mesh)
        mesh.leader.send(ring(0, ports, deadline_s=-3.0))  # with the grace time 2 s
        with stranger_at(ports[0]):
            mesh.engines[1].send(ring(1, ports, deadline_s=-3.0))
            assert all(engine.wait_for_exit() != 0 for engine in mesh.engines)
        assert any("Timeout" in line for line in mesh.leader.output), mesh.leader.output


def test_a_peer_that_does_not_answer_the_checked_collective_is_called_a_stranger(bench: Any) -> None:
    impatient = "import mlx_mesh.node.engine.group as group; group.CHECK_S = 1.0"
    silent = "import time, mlx_mesh.node.engine.group as g; g._check_collectives = lambda *_: time.sleep(60)"
    with bench.mesh(2, codes=[impatient, silent]) as mesh:
        ports = bench.free_ports(2)
        wait_for_hellos(mesh)
        for rank, engine in enumerate(mesh.engines):
            engine.send(ring(rank, ports))
        failure = mesh.leader.wait_for_kind(EngineFailed)
        seen = f"{failure.message} The other rank: {mesh.engines[1].story()}"
        assert (failure.phase, failure.kind) == (Phase.CONNECTING, "stray_peer"), seen
        assert "did not end within 1 s" in failure.message
        assert mesh.leader.wait_for_exit() == EXIT_STATUS["stray_peer"]


def test_a_rank_of_another_epoch_is_called_a_stranger(bench: Any) -> None:
    with bench.mesh(2, epochs=[1, 2], codes=[NO_PROBE, NO_PROBE]) as mesh:
        ports = bench.free_ports(2)
        for rank, engine in enumerate(mesh.engines):
            engine.send(ring(rank, ports, epoch=1 + rank))
        for rank, engine in enumerate(mesh.engines):
            failure = engine.wait_for_kind(EngineFailed)
            assert failure.kind == "stray_peer"
            assert f"wrong values for ranks [{1 - rank}]" in failure.message


def test_the_death_of_one_follower_of_two_ends_everyone(bench: Any, tiny_llama: Path) -> None:
    with bench.mesh(3) as mesh:
        mesh.connect()
        mesh.load(tiny_llama, bench.split(Sharding.PIPELINE, 6, [2, 2, 2]))
        mesh.engines[2].process.kill()  # nobody computes: only the plan channel can tell
        failure = mesh.leader.wait_for_kind(EngineFailed)
        assert "rank 2" in failure.message and failure.lost_ranks == (2,)
        assert mesh.leader.wait_for_exit() == EXIT_STATUS["peer_lost"]
        assert mesh.engines[1].wait_for_exit() == EXIT_STATUS["peer_lost"]


def wait_for_hellos(mesh: Any) -> None:
    for engine in mesh.engines:
        engine.wait_for_kind(EngineHello)


def ring(rank: int, ports: list[int], *, epoch: int = 1, deadline_s: float = 30.0) -> Connect:
    return Connect(
        epoch=epoch,
        rank=rank,
        world_size=2,
        backend=Backend.RING,
        addresses=tuple((f"127.0.0.1:{port}",) for port in ports),
        deadline_s=deadline_s,
    )


def stranger_at(port: int) -> socket.socket:
    """A client that connected before the real peer."""
    end = time.monotonic() + 30
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:  # not listening yet
            if time.monotonic() > end:
                raise
            time.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("name", SPLITS)
def test_idle_engines_use_no_cpu_and_end_cleanly_in_the_middle_of_requests(
    name: str, bench: Any, tiny_llama: Path
) -> None:
    with bench.mesh(2) as mesh:
        start(bench, mesh, tiny_llama, name)
        mesh.submit(*[bench.greedy(f"r{i}", [5, 6, i], 5 + i) for i in range(3)])
        mesh.submit(bench.greedy("cancelled", [7, 8], LONG))
        mesh.wait_for_tokens("cancelled", 3)
        mesh.cancel("cancelled")
        for i in range(3):
            mesh.answer(f"r{i}")
        mesh.answer("cancelled")
        assert_no_cpu(mesh)
        mesh.submit(*[bench.greedy(f"late {i}", [5, 6, i], LONG) for i in range(3)])
        mesh.wait_for_tokens("late 2", 3)
        assert mesh.stop() == [0, 0]
        for engine in mesh.engines:
            assert not any("closed by the peer" in line for line in engine.output), engine.output
            assert not any(isinstance(report, EngineFailed) for report in engine.reports)


def assert_no_cpu(mesh: Any) -> None:
    """For 3 s of heartbeats."""
    before = [cpu_seconds(engine.process.pid) for engine in mesh.engines]
    began = time.monotonic()
    num_beats = sum(isinstance(report, Heartbeat) for report in mesh.leader.reports)
    mesh.leader.wait_for(
        lambda reports: sum(isinstance(r, Heartbeat) for r in reports) >= num_beats + 15 or None, "idle time"
    )
    seconds = time.monotonic() - began
    for engine, cpu in zip(mesh.engines, before, strict=True):
        share = (cpu_seconds(engine.process.pid) - cpu) / seconds
        assert share < 0.02, f"rank {engine.rank} used {share:.1%} of a core while idle"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
