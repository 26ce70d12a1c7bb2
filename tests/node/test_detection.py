"""How soon each kind of failure is noticed, and who is named: books and judge on a clock of their own.

Messages arrive as agents and engines send them, one a second, at every offset to the failure; the coordinator
looks as often as it does in life.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from mlx_mesh.mesh.membership import Verdict, VerdictKind, judge
from mlx_mesh.mesh.messages import AgentBeat, Deadlines, Heartbeat, HostPlan, MeshConfig, RankExited
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.waits import TICK_S

LIMITS = Deadlines()
QUARTERS = 4  # of a second: the clock's steps
FAULT_S = 20.0
OFFSETS = [(agent / QUARTERS, engine / QUARTERS) for agent, engine in itertools.product(range(4), repeat=2)]


@dataclass
class Host:
    """What still comes from one host."""

    agent_beats: bool = True
    engine_beats: bool = True
    stopped: tuple[int, ...] = ()
    step: int = 5
    layer: int = 0
    busy_since: float | None = None


def noticed(
    seat_all: Callable[[Roster], None],
    offsets: tuple[float, float],
    fault: Callable[[Roster, list[Host], float], None],
    limit_s: float,
) -> tuple[Verdict, float] | None:
    """The verdict and how long after FAULT_S it came; None = not within `limit_s`. `fault` is called at each
    step of the clock from then on, with the time since."""
    roster = Roster(MeshConfig(name="m", hosts=tuple(HostPlan(name=f"mac{n}") for n in (1, 2, 3))))
    seat_all(roster)
    roster.begin_epoch("start", 0.0)
    hosts = [Host() for _ in roster.seats]
    assert TICK_S * QUARTERS == 1
    for quarter in range(int((FAULT_S + limit_s) * QUARTERS) + 1):
        now = quarter * TICK_S
        if now >= FAULT_S:
            fault(roster, hosts, now - FAULT_S)
        for rank, (host, seat) in enumerate(zip(hosts, roster.seats, strict=True)):
            assert seat.member is not None
            if host.agent_beats and (now - offsets[0]) % 1 == 0:
                beat = AgentBeat(seq=quarter + 1, stopped=host.stopped)
                roster.note_agent_beat(seat, seat.member, beat, now)
            if host.engine_beats and (now - offsets[1]) % 1 == 0:
                since = host.busy_since
                report = Heartbeat(
                    phase=Phase.READY, step=host.step, layer=host.layer,
                    busy=since is not None, busy_s=0.0 if since is None else now - since, expected_s=0.1,
                )  # fmt: skip
                roster.ranks[rank].take(report, now)
        verdict = judge(roster.rank_views(now), roster.agent_views(now), LIMITS)
        if verdict is not None:
            return verdict, now - FAULT_S
    return None


@pytest.mark.parametrize("offsets", OFFSETS)
def test_a_killed_rank_is_named_within_a_second(
    seat_all: Callable[[Roster], None], offsets: tuple[float, float]
) -> None:
    def kill(roster: Roster, hosts: list[Host], since_s: float) -> None:
        hosts[1].engine_beats = False
        roster.ranks[1].exit = RankExited(epoch=1, rank=1, exit_code=None, signal=9, expected=False)

    found = noticed(seat_all, offsets, kill, 5.0)
    assert found is not None and found[1] < 1.0
    assert (found[0].rank, found[0].host, found[0].kind) == (1, "mac2", VerdictKind.DEAD_ENGINE)


@pytest.mark.parametrize("offsets", OFFSETS)
@pytest.mark.parametrize("is_seen_stopped", [True, False], ids=["stopped", "silent"])
def test_a_frozen_rank_is_named_within_four_seconds(
    seat_all: Callable[[Roster], None], offsets: tuple[float, float], is_seen_stopped: bool
) -> None:
    def freeze(roster: Roster, hosts: list[Host], since_s: float) -> None:
        hosts[2].engine_beats = False
        hosts[2].stopped = (2,) if is_seen_stopped else ()

    found = noticed(seat_all, offsets, freeze, 10.0)
    assert found is not None and found[1] < 4.0
    assert (found[0].rank, found[0].host, found[0].kind) == (2, "mac3", VerdictKind.SILENT_ENGINE)


@pytest.mark.parametrize("offsets", OFFSETS)
def test_a_silent_link_is_named_by_its_host_a_second_after_heartbeat_timeout_s(
    seat_all: Callable[[Roster], None], offsets: tuple[float, float]
) -> None:
    def cut(roster: Roster, hosts: list[Host], since_s: float) -> None:
        hosts[1].agent_beats = hosts[1].engine_beats = False

    found = noticed(seat_all, offsets, cut, 60.0)
    assert found is not None and found[1] < LIMITS.heartbeat_timeout_s + 1
    assert LIMITS.heartbeat_timeout_s - 1 < found[1]
    assert (found[0].rank, found[0].host, found[0].kind) == (None, "mac2", VerdictKind.SILENT_AGENT)


@pytest.mark.parametrize("offsets", OFFSETS)
def test_a_stuck_step_is_named_by_the_rank_that_got_least_far_a_second_after_its_limit(
    seat_all: Callable[[Roster], None], offsets: tuple[float, float]
) -> None:
    def hang(roster: Roster, hosts: list[Host], since_s: float) -> None:
        for host in hosts:
            host.busy_since, host.step = FAULT_S, 6
            host.layer = 3 if host is hosts[2] else 9

    found = noticed(seat_all, offsets, hang, 60.0)
    assert found is not None and found[1] <= LIMITS.step_floor_s + 1
    assert LIMITS.step_floor_s <= found[1]
    assert (found[0].rank, found[0].host, found[0].kind) == (2, "mac3", VerdictKind.STUCK_STEP)


def test_a_slow_step_that_moves_is_never_called_stuck(seat_all: Callable[[Roster], None]) -> None:
    """A layer in 25 s, for an hour."""

    def crawl(roster: Roster, hosts: list[Host], since_s: float) -> None:
        for host in hosts:
            host.busy_since, host.step, host.layer = FAULT_S, 6, int(since_s / 25)

    assert noticed(seat_all, (0.0, 0.5), crawl, 3600.0) is None
