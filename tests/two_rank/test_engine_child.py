"""One engine child and its agent: hello, settings, end of file, the wrong model."""

from __future__ import annotations

import signal
import socket
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Connect, EngineFailed, EngineHello, Heartbeat, JoinPlans, Load
from mlx_mesh.mesh.types import PROTOCOL_VERSION, Backend, Phase, Sharding
from mlx_mesh.node.engine.failure import EXIT_AGENT_GONE, EXIT_STATUS

pytestmark = pytest.mark.two_rank

SOLO = Connect(epoch=1, rank=0, world_size=1, backend=Backend.NONE, addresses=())


def test_an_engine_says_hello_with_its_versions_and_backends_then_beats(bench: Any) -> None:
    with closing(bench.engine(bench.engine_config())) as engine:
        hello = engine.wait_for_kind(EngineHello)
        assert hello.pid == engine.process.pid
        assert hello.versions.protocol == PROTOCOL_VERSION
        assert hello.versions.mlx
        assert "ring" in hello.backends
        assert hello.device
        beat = engine.wait_for_kind(Heartbeat)
        assert (beat.phase, beat.busy) == (Phase.IMPORTED, False)


def test_an_engine_whose_agent_is_gone_ends_at_once(bench: Any) -> None:
    with closing(bench.engine(bench.engine_config())) as engine:
        engine.wait_for_kind(EngineHello)
        engine.hang_up()
        assert engine.wait_for_exit() == EXIT_AGENT_GONE


def test_an_engine_without_settings_ends(bench: Any) -> None:
    with closing(bench.engine(None)) as engine:
        engine.hang_up()
        assert engine.wait_for_exit() == EXIT_AGENT_GONE


def test_ctrl_c_is_the_agents_business(bench: Any) -> None:
    with closing(bench.engine(bench.engine_config())) as engine:
        engine.wait_for_kind(EngineHello)
        engine.process.send_signal(signal.SIGINT)
        engine.send(SOLO)
        engine.wait_for_phase(Phase.CONNECTED)


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1 here")
def test_sigusr1_shows_where_every_thread_is(bench: Any) -> None:
    with closing(bench.engine(bench.engine_config())) as engine:
        engine.wait_for_kind(Heartbeat)
        engine.process.send_signal(signal.SIGUSR1)
        engine.send(SOLO)
        engine.wait_for_phase(Phase.CONNECTED)
        engine.hang_up()
        engine.wait_for_exit()
        threads = [line for line in engine.output if line.startswith(("Thread 0x", "Current thread 0x"))]
        assert len(threads) >= 3, engine.output  # main, commands, heartbeat


def test_without_a_backend_the_engine_says_which_extra_to_install(bench: Any) -> None:
    code = "import sys; sys.modules['mlx.core'] = None"
    with closing(bench.engine(bench.engine_config(), code)) as engine:
        failure = engine.wait_for_kind(EngineFailed)
        assert (failure.phase, failure.kind) == (Phase.STARTING, "config")
        if sys.platform == "linux":
            assert "mlx-mesh[cpu]" in failure.message
        assert engine.wait_for_exit() == EXIT_STATUS["config"]


def test_a_missing_model_is_a_config_failure_that_names_the_folder(bench: Any) -> None:
    with closing(bench.engine(bench.engine_config())) as engine:
        engine.send(SOLO)
        engine.wait_for_phase(Phase.CONNECTED)
        engine.send(
            Load(
                model="/nowhere/model",
                placement=bench.split(Sharding.NONE, 6, [1]),
                max_sequences=4,
                prefill_step_size=0,
                context_length=0,
            )
        )
        failure = engine.wait_for_kind(EngineFailed)
        assert (failure.phase, failure.kind) == (Phase.LOADING, "config")
        assert "/nowhere/model" in failure.message
        assert engine.wait_for_exit() == EXIT_STATUS["config"]


def test_a_connect_for_another_rank_or_a_wrong_order_is_refused(bench: Any) -> None:
    for command in (
        Connect(epoch=2, rank=0, world_size=1, backend=Backend.NONE, addresses=()),
        JoinPlans(endpoint="tcp://127.0.0.1:1"),
    ):
        with closing(bench.engine(bench.engine_config())) as engine:
            engine.send(command)
            assert engine.wait_for_kind(EngineFailed).kind == "internal"
            assert engine.wait_for_exit() == EXIT_STATUS["internal"]


def test_a_taken_data_port_is_a_bind_failure(bench: Any) -> None:
    with socket.socket() as owner, closing(bench.engine(bench.engine_config(world_size=2))) as engine:
        owner.bind(("127.0.0.1", 0))
        owner.listen()
        address = f"127.0.0.1:{owner.getsockname()[1]}"
        engine.send(
            Connect(
                epoch=1,
                rank=0,
                world_size=2,
                backend=Backend.RING,
                addresses=((address,), ("127.0.0.1:9",)),
            )
        )
        failure = engine.wait_for_kind(EngineFailed)
        assert (failure.phase, failure.kind) == (Phase.CONNECTING, "bind")
        assert "is taken" in failure.message
        assert engine.wait_for_exit() == EXIT_STATUS["bind"]


def test_a_lone_rank_does_not_wait_for_its_peers_for_ever(bench: Any) -> None:
    ports = bench.free_ports(2)
    with closing(bench.engine(bench.engine_config(world_size=2))) as engine:
        engine.send(
            Connect(
                epoch=1,
                rank=0,
                world_size=2,
                backend=Backend.RING,
                addresses=tuple((f"127.0.0.1:{port}",) for port in ports),
                deadline_s=-4.0,  # of which 1 s is left with the grace time
            )
        )
        assert engine.wait_for_exit() != 0
        assert any("Timeout" in line for line in engine.output), engine.output


def test_solo_serves_a_request(bench: Any, tiny_llama: Path) -> None:
    with bench.mesh(1) as mesh:
        mesh.connect()
        mesh.load(tiny_llama, bench.split(Sharding.NONE, 6, [1]))
        mesh.submit(bench.greedy("a", [5, 6, 7], 4))
        assert len(mesh.answer("a").token_ids) == 4
        assert mesh.stop() == [0]
