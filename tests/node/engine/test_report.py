"""What the agent hears from an engine, and how the engine hears the agent."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import pytest

from mlx_mesh.mesh.errors import BringUpError, PlacementError, ProtocolError, SettingsError
from mlx_mesh.mesh.messages import (
    Cancel,
    EngineCommand,
    EngineFailed,
    EngineReport,
    Heartbeat,
    PhaseReached,
    Progress,
    StepDigest,
    StopEngine,
    WarmUp,
)
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.engine.backend import FOREIGN_VARIABLES, drop_foreign_variables, no_backend_message
from mlx_mesh.node.engine.commands import Commands
from mlx_mesh.node.engine.failure import EXIT_STATUS, EngineError, FailureKind, describe
from mlx_mesh.node.engine.report import HeartbeatThread, MemoryReading, Reporter
from mlx_mesh.node.pipe import BlockingPipe


@dataclass
class Wire:
    """An engine's end and its agent's end."""

    engine: BlockingPipe[EngineCommand]
    agent: BlockingPipe[EngineReport]
    now: float = 100.0


@pytest.fixture
def wire() -> Iterator[Wire]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, theirs:
        yield Wire(
            BlockingPipe(theirs, msgspec.msgpack.Decoder(EngineCommand)),
            BlockingPipe(ours, msgspec.msgpack.Decoder(EngineReport)),
        )


def test_a_phase_is_timed_from_its_beginning_to_its_end(wire: Wire) -> None:
    reporter = Reporter(wire.engine, lambda: wire.now)
    reporter.enter(Phase.LOADING)
    wire.now += 2.5
    reporter.progress(3, 10)
    reporter.reached(Phase.LOADED, weights_bytes=7)
    assert wire.agent.receive() == Progress(phase=Phase.LOADING, done=3, total=10)
    assert wire.agent.receive() == PhaseReached(phase=Phase.LOADED, seconds=2.5, weights_bytes=7)


def test_a_heartbeat_shows_the_step_in_hand_and_the_last_one_done(wire: Wire) -> None:
    reporter = Reporter(wire.engine, lambda: wire.now)
    reporter.read_memory = lambda: MemoryReading(1, 2, 3)
    reporter.phase = Phase.READY
    reporter.begin_step()
    reporter.entered_layer(4)
    wire.now += 0.5
    assert reporter.heartbeat() == Heartbeat(
        phase=Phase.READY,
        step=0,
        layer=4,
        busy=True,
        busy_s=0.5,
        memory_bytes=1,
        peak_memory_bytes=2,
        cache_bytes=3,
    )
    reporter.end_step(9, num_sequences=2, num_waiting=1)
    beat = reporter.heartbeat()
    assert (beat.step, beat.busy, beat.busy_s, beat.num_sequences, beat.num_waiting) == (9, False, 0.0, 2, 1)


def test_a_heartbeat_predicts_the_step_from_those_before(wire: Wire) -> None:
    reporter = Reporter(wire.engine, lambda: wire.now)
    reporter.phase = Phase.READY
    reporter.begin_step(100)
    assert reporter.heartbeat().expected_s < 0  # nothing was measured yet
    wire.now += 5.0
    reporter.end_step(1, num_sequences=1, num_waiting=0)
    reporter.begin_step(200)
    assert reporter.heartbeat().expected_s == pytest.approx(10.0)
    assert reporter.heartbeat().steps_s == 5.0


def test_the_warm_up_is_no_measure_of_later_steps(wire: Wire) -> None:
    reporter = Reporter(wire.engine, lambda: wire.now)
    reporter.phase = Phase.WARMING
    reporter.begin_step()
    wire.now += 60.0
    reporter.end_step(1, num_sequences=1, num_waiting=0)
    reporter.phase = Phase.READY
    reporter.begin_step()
    assert reporter.heartbeat().expected_s < 0


def test_every_checkpoint_of_a_ranks_history_goes_out_once(wire: Wire) -> None:
    reporter = Reporter(wire.engine)
    for step in range(1, 40):
        reporter.note_tokens(step, [("a", step)])
    first = reporter.heartbeat().digests
    assert [step for step, _ in first] == [16, 32] and len(set(first)) == 2
    assert reporter.heartbeat().digests == ()


def test_a_paranoid_rank_tells_its_history_after_every_step(wire: Wire) -> None:
    reporter = Reporter(wire.engine)
    reporter.is_paranoid = True
    reporter.note_tokens(1, [("a", 7)])
    said = wire.agent.receive()
    assert isinstance(said, StepDigest) and said.step == 1 and reporter.heartbeat().digests == ()


def test_heartbeats_come_by_themselves_until_stopped(wire: Wire) -> None:
    thread = HeartbeatThread(Reporter(wire.engine), 0.01)
    thread.start()
    for _ in range(3):
        assert isinstance(wire.agent.receive(), Heartbeat)
    thread.stop()


def test_a_failure_names_the_phase_in_which_it_happened(wire: Wire) -> None:
    reporter = Reporter(wire.engine)
    reporter.enter(Phase.LOADING)
    reporter.failed(EngineError("memory", "none left"))
    assert wire.agent.receive() == EngineFailed(phase=Phase.LOADING, kind="memory", message="none left")


def test_commands_come_in_order_and_the_wrong_one_is_an_error(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os._exit", lambda status: None)  # the reader ends the process at end of file
    commands = Commands(wire.engine)
    commands.start()
    assert commands.poll() is None
    for command in (Cancel(id="a"), WarmUp(), StopEngine()):
        wire.agent.send(command)
    assert commands.next() == Cancel(id="a")
    assert commands.expect(WarmUp) == WarmUp()
    with pytest.raises(EngineError, match="StopEngine where WarmUp comes next"):
        commands.expect(WarmUp)
    wire.agent.close()
    commands._thread.join(10)


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (EngineError("bind", "x"), "bind"),
        (RuntimeError("[ring] connection to a peer was lost"), "peer_lost"),
        (RuntimeError("[metal::malloc] Attempting to allocate 9 bytes, greater than the maximum allowed "
                      "buffer size of 8 bytes."), "memory"),
        (RuntimeError("[METAL] Command buffer execution failed: Insufficient Memory"), "memory"),
        (RuntimeError("[malloc] Unable to allocate 1099511627776 bytes."), "memory"),
        (MemoryError(), "memory"),
        (PlacementError("no"), "config"),
        (SettingsError("no"), "config"),
        (FileNotFoundError("config.json"), "config"),
        (BringUpError("mixed up"), "stray_peer"),
        (ProtocolError("what"), "internal"),
        (RuntimeError("anything else"), "internal"),
        (KeyError("oops"), "internal"),
    ],
)  # fmt: skip
def test_every_error_has_a_kind_and_words(error: Exception, kind: FailureKind) -> None:
    found = describe(error)
    assert found.kind == kind
    assert str(found)


def test_exit_statuses_are_distinct_and_not_zero() -> None:
    assert len(set(EXIT_STATUS.values())) == len(EXIT_STATUS)
    assert 0 not in EXIT_STATUS.values()


def test_without_a_backend_linux_users_are_told_which_extra_to_install() -> None:
    message = no_backend_message("no libmlx.so", "Linux")
    assert "pip install 'mlx-mesh[cpu]'" in message
    assert "mlx-mesh[cuda13]" in message
    assert "extra" not in no_backend_message("x", "Darwin")


def test_what_other_launchers_say_to_mlx_is_dropped() -> None:
    environment = dict.fromkeys(FOREIGN_VARIABLES, "1") | {"HOME": "/root"}
    assert set(drop_foreign_variables(environment)) == set(FOREIGN_VARIABLES)
    assert environment == {"HOME": "/root"}
