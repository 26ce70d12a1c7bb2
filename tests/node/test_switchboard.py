"""What ranks say goes to the desk in the order in which it happened, with a scripted channel and desk."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.messages import (
    AgentMessage,
    Deadlines,
    EngineReport,
    Heartbeat,
    HostPlan,
    MeshConfig,
    RankReport,
    RequestFailed,
    StepDigest,
    TokenChunk,
    Tokens,
)
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.logs import RankLogs
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.switchboard import Switchboard


class NotingDesk:
    """Notes what it is given."""

    is_draining = False

    def __init__(self) -> None:
        self.said: list[str] = []

    def note_admitted(self, request_ids: tuple[str, ...], *_: tuple[int, ...]) -> None:
        pass

    def take(self, chunks: tuple[TokenChunk, ...]) -> bool:
        self.said += [f"{chunk.id} {chunk.token_ids[0]}" for chunk in chunks]
        return True

    def take_failure(self, failed: RequestFailed) -> None:
        self.said.append(f"{failed.id} {failed.code}")


class Line:
    """A mesh of two ranks that is ready; `say` is what one of them reports."""

    def __init__(self, folder: Path, seat_all: Callable[[Roster], None], *, is_paranoid: bool) -> None:
        mesh = MeshConfig(
            name="m", hosts=(HostPlan(name="mac1"), HostPlan(name="mac2")), paranoid=is_paranoid
        )
        self.roster = Roster(mesh)
        seat_all(self.roster)
        self.desk = NotingDesk()
        channel: Any = None  # nothing is sent
        desk: Any = self.desk
        self._board = Switchboard(
            channel,
            self.roster,
            desk,
            deadlines=Deadlines(),
            output=Output(""),
            logs=RankLogs(folder),
            now=lambda: 1.0,
            changed=asyncio.Event(),
        )
        self.begin()

    def begin(self) -> None:
        self.roster.begin_epoch("test", 0.0)
        self.roster.epoch.ready_at = 0.0

    def say(self, rank: int, report: EngineReport) -> None:
        epoch = self.roster.epoch.number
        message: AgentMessage = RankReport(epoch=epoch, rank=rank, report=report)
        self._board._hear(self.roster.host_of(rank).encode(), message)


def tokens(step: int, token: int) -> Tokens:
    return Tokens(step=step, chunks=(TokenChunk(id="a", token_ids=(token,)),))


FAILED = RequestFailed(id="a", code="grammar_failed", message="no way on")


def test_under_paranoid_a_failed_request_waits_for_its_tokens(tmp_path: Path, seat_all: Any) -> None:
    line = Line(tmp_path, seat_all, is_paranoid=True)
    line.say(0, tokens(1, 11))
    line.say(0, FAILED)
    line.say(0, tokens(2, 12))
    line.say(0, StepDigest(step=1, digest="x"))
    assert line.desk.said == []
    line.say(1, StepDigest(step=1, digest="x"))
    assert line.desk.said == ["a 11", "a grammar_failed"]


def test_under_paranoid_a_failure_with_nothing_before_it_does_not_wait(tmp_path: Path, seat_all: Any) -> None:
    line = Line(tmp_path, seat_all, is_paranoid=True)
    line.say(0, FAILED)
    assert line.desk.said == ["a grammar_failed"]
    line.say(0, tokens(1, 11))
    line.begin()  # what was held belongs to an epoch that is over
    line.say(0, FAILED)
    assert line.desk.said == ["a grammar_failed"] * 2


def test_a_digest_in_a_heartbeat_releases_tokens_too(tmp_path: Path, seat_all: Any) -> None:
    line = Line(tmp_path, seat_all, is_paranoid=True)
    line.say(0, tokens(16, 11))
    for rank in (0, 1):
        assert line.desk.said == []
        line.say(rank, Heartbeat(phase=Phase.READY, step=16, digests=((16, "x"),)))
    assert line.desk.said == ["a 11"]


@pytest.mark.parametrize("report", [tokens(1, 11), FAILED])
def test_otherwise_nothing_is_held(tmp_path: Path, seat_all: Any, report: Any) -> None:
    line = Line(tmp_path, seat_all, is_paranoid=False)
    line.say(0, report)
    assert len(line.desk.said) == 1
