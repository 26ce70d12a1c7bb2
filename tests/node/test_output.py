"""What an agent prints: framed for the launcher, words for people, and never a stopped loop."""

from __future__ import annotations

import logging.handlers
import os
from pathlib import Path

import msgspec
import pytest

from mlx_mesh.mesh.messages import (
    AgentFailed,
    AgentListening,
    AgentStarted,
    AgentStopped,
    EpochEnded,
    LauncherEvent,
    LogLine,
    MeshReady,
    RankProgress,
)
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node import logs
from mlx_mesh.node.output import Output, words

EVENTS: tuple[LauncherEvent, ...] = (
    AgentListening(coordinator="127.0.0.1:1", agent_pid=2),
    AgentStarted(host="mac1", agent_pid=2),
    RankProgress(rank=1, host="mac2", phase=Phase.LOADING, done=3, total=9),
    LogLine(rank=1, host="mac2", line="hello"),
    MeshReady(url="http://127.0.0.1:18000", epoch=1, seconds=2.0),
    EpochEnded(epoch=1, cause="rank 1", final=False),
    AgentFailed(message="broken", exit_code=5),
    AgentStopped(reason="SIGTERM"),
)


def test_events_are_framed_and_notes_are_plain_in_order() -> None:
    reader, writer = os.pipe()
    output = Output("@m@", writer)
    output.start()
    for event in EVENTS:
        output.event(event)
    output.note("a note")
    output.close()
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        *framed, note = file.read().splitlines()
    assert [msgspec.json.decode(line.removeprefix(b"@m@ "), type=LauncherEvent) for line in framed] == list(
        EVENTS
    )
    assert note == b"a note"


@pytest.mark.parametrize("event", EVENTS)
def test_every_event_has_words_for_people(event: LauncherEvent) -> None:
    assert words(event)


def test_a_line_of_a_rank_carries_rank_and_host() -> None:
    assert words(LogLine(rank=1, host="mac2", line="hello")) == "[1 mac2] hello"
    assert words(RankProgress(rank=1, host="mac2", phase=Phase.LOADING, done=3, total=9)) == (
        "[1 mac2] loading 3/9"
    )


def test_a_reader_that_does_not_read_stops_nobody() -> None:
    reader, writer = os.pipe()
    output = Output("", writer)
    output.start()
    for _ in range(20_000):
        output.note("x" * 100)  # far more than a pipe holds
    assert output.num_dropped > 0
    os.close(reader)  # frees the thread
    output.close()
    os.close(writer)


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    output = Output("", writer)
    output.start()
    output.note("nobody hears this")
    output.close()
    os.close(writer)
    assert output.num_dropped == 1


def test_rank_logs_rotate_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_FILE_BYTES", 500)
    rank_logs = logs.RankLogs(tmp_path / "logs")
    for number in range(50):
        rank_logs.write(2, "mac3", f"line {number}")
    rank_logs.close()
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["rank-2.log", "rank-2.log.1", "rank-2.log.2", "rank-2.log.3"]
    assert all(path.stat().st_size <= 500 for path in (tmp_path / "logs").iterdir())
    assert "[2 mac3] line 49" in (tmp_path / "logs" / "rank-2.log").read_text()


def test_what_an_earlier_mesh_said_is_put_behind(tmp_path: Path) -> None:
    for mesh in ("first", "second"):
        rank_logs = logs.RankLogs(tmp_path)
        rank_logs.begin()
        rank_logs.write(0, "mac1", f"of the {mesh}")
        if mesh == "first":
            rank_logs.write(1, "mac2", "only there")
        rank_logs.close()
    assert "of the second" in (tmp_path / "rank-0.log").read_text()
    assert "of the first" not in (tmp_path / "rank-0.log").read_text()
    assert "of the first" in (tmp_path / "rank-0.log.1").read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-0.log", "rank-0.log.1", "rank-1.log.1"]


def test_a_full_disk_does_not_end_a_mesh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, record: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(logging.handlers.RotatingFileHandler, "shouldRollover", full)
    rank_logs = logs.RankLogs(tmp_path)
    rank_logs.write(0, "mac1", "lost")
    rank_logs.close()
