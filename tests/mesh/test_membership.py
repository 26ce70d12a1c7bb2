"""Verdicts: the right cause, the right name, and no verdict while nothing is known."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.membership import (
    STABLE_S,
    AgentView,
    ObservedClock,
    RankView,
    RestartBudget,
    VerdictKind,
    judge,
)
from mlx_mesh.mesh.messages import Deadlines, EngineFailed
from mlx_mesh.mesh.types import Phase

LIMITS = Deadlines()


def rank(number: int, **changes: Any) -> RankView:
    values: dict[str, Any] = {"phase": Phase.READY, "heartbeat_age_s": 0.3, "agent_beats_since": 0}
    return RankView(rank=number, host=f"mac{number + 1}", **(values | changes))


def agent(number: int, **changes: Any) -> AgentView:
    values: dict[str, Any] = {"beat_age_s": 0.5}
    return AgentView(host=f"mac{number + 1}", ranks=(number,), **(values | changes))


def failure(kind: Any, phase: Phase = Phase.LOADING) -> EngineFailed:
    return EngineFailed(phase=phase, kind=kind, message=f"said {kind}")


HEALTHY = [agent(0), agent(1)]


def test_a_healthy_mesh_gets_no_verdict() -> None:
    assert judge([rank(0), rank(1)], HEALTHY, LIMITS) is None


def test_a_killed_engine_is_named_with_its_signal() -> None:
    verdict = judge([rank(0), rank(1, exited="was killed by SIGKILL")], HEALTHY, LIMITS)
    assert verdict is not None and verdict.rank == 1 and verdict.retryable
    assert str(verdict) == "rank 1 on mac2, phase ready: its engine was killed by SIGKILL"


@pytest.mark.parametrize("kind", ["config", "memory", "version"])
def test_a_deterministic_failure_is_never_retried(kind: str) -> None:
    verdict = judge([rank(0, failure=failure(kind), exited="ended with status 2"), rank(1)], HEALTHY, LIMITS)
    assert verdict is not None and not verdict.retryable
    assert verdict.phase == Phase.LOADING and verdict.evidence == f"said {kind}"


@pytest.mark.parametrize("kind", ["bind", "stray_peer", "internal"])
def test_other_failures_may_be_retried(kind: str) -> None:
    verdict = judge([rank(0, failure=failure(kind)), rank(1)], HEALTHY, LIMITS)
    assert verdict is not None and verdict.retryable and verdict.rank == 0


def test_a_rank_that_lost_its_peer_is_a_witness_and_not_the_cause() -> None:
    witness = rank(0, failure=failure("peer_lost"), failure_age_s=0.1, exited="ended with status 4")
    assert judge([witness, rank(1)], HEALTHY, LIMITS) is None
    verdict = judge([witness, rank(1, exited="was killed by SIGSEGV")], HEALTHY, LIMITS)
    assert verdict is not None and verdict.rank == 1


def test_a_lost_peer_without_a_better_cause_is_a_broken_link() -> None:
    witness = rank(0, failure=failure("peer_lost", Phase.READY), failure_age_s=0.6)
    verdict = judge([witness, rank(1)], HEALTHY, LIMITS)
    assert verdict is not None and verdict.rank == 0 and "data link broke" in verdict.evidence


@pytest.mark.parametrize(
    ("lost_s", "suspects"),
    [
        ({0: 0.6, 1: 0.55, 2: 0.3}, ("mac1", "mac2", "mac3")),  # the third lost an engine that ended
        ({0: 0.6, 1: 0.3, 2: 0.55}, ("mac1", "mac3", "mac2")),
        ({1: 0.6, 2: 0.6}, ("mac2", "mac3")),
        ({0: 0.3, 1: 0.55, 2: 0.6}, ("mac3", "mac2", "mac1")),
        ({0: 0.6}, ("mac1", "mac2", "mac3")),
        ({2: 0.6}, ("mac3", "mac1", "mac2")),
    ],
)
def test_either_end_of_a_broken_link_may_be_at_fault(
    lost_s: dict[int, float], suspects: tuple[str, ...]
) -> None:
    lost = failure("peer_lost", Phase.READY)
    ranks = [rank(n, failure=lost, failure_age_s=lost_s[n]) if n in lost_s else rank(n) for n in range(3)]
    verdict = judge(ranks, [agent(n) for n in range(3)], LIMITS)
    assert verdict is not None and verdict.suspects == suspects


@pytest.mark.parametrize(
    ("lost", "suspects"),
    [
        ({0: (0.6, (2,))}, ("mac1", "mac3")),  # not the neighbour on the other side
        ({0: (0.6, (2,)), 1: (0.55, (0,))}, ("mac1", "mac3", "mac2")),  # rank 1 lost one that had ended
        ({2: (0.6, (0,)), 0: (0.55, (2,)), 1: (0.5, (2,))}, ("mac3", "mac1", "mac2")),
        ({1: (0.6, (2,)), 0: (0.55, (2,))}, ("mac3", "mac2", "mac1")),  # one host explains both
        ({0: (0.6, (1,)), 2: (0.55, (1,)), 1: (0.5, ())}, ("mac2", "mac1", "mac3")),
        ({0: (0.6, ()), 1: (0.55, (2,))}, ("mac1", "mac2", "mac3")),
        ({0: (0.6, (7,))}, ("mac1", "mac2", "mac3")),  # no such rank
    ],
)
def test_whom_an_engine_says_it_lost_is_suspected_before_others(
    lost: dict[int, tuple[float, tuple[int, ...]]], suspects: tuple[str, ...]
) -> None:
    ranks = [rank(n) for n in range(3)]
    for n, (age_s, lost_ranks) in lost.items():
        told = msgspec.structs.replace(failure("peer_lost", Phase.READY), lost_ranks=lost_ranks)
        ranks[n] = rank(n, failure=told, failure_age_s=age_s)
    verdict = judge(ranks, [agent(n) for n in range(3)], LIMITS)
    assert verdict is not None and verdict.suspects == suspects
    if verdict.rank not in (0, max(lost, key=lambda n: lost[n][0])):
        assert "lost the connection to its engine" in verdict.evidence


def test_a_lost_host_explains_its_dead_engine() -> None:
    ranks = [rank(0), rank(1, exited="was killed by SIGKILL")]
    verdict = judge(ranks, [agent(0), agent(1, lost="its connection ended")], LIMITS)
    assert verdict is not None and verdict.rank is None and verdict.host == "mac2"
    assert str(verdict) == "host mac2, phase ready: its connection ended"


def test_a_silent_agent_is_lost_after_heartbeat_timeout_and_not_before() -> None:
    assert judge([rank(0), rank(1)], [agent(0), agent(1, beat_age_s=14.9)], LIMITS) is None
    verdict = judge([rank(0), rank(1)], [agent(0), agent(1, beat_age_s=15.1)], LIMITS)
    assert verdict is not None and verdict.host == "mac2" and "heartbeat_timeout_s" in verdict.evidence


def test_a_silent_engine_is_frozen_after_three_seconds() -> None:
    assert judge([rank(0), rank(1, heartbeat_age_s=2.9, agent_beats_since=2)], HEALTHY, LIMITS) is None
    verdict = judge([rank(0), rank(1, heartbeat_age_s=3.1, agent_beats_since=3)], HEALTHY, LIMITS)
    assert verdict is not None and verdict.rank == 1 and "engine_silence_s" in verdict.evidence


def test_an_engine_whose_agent_is_late_too_is_not_called_frozen() -> None:
    """The host slept: its agent's first beat may overtake the engine's."""
    woken = rank(1, heartbeat_age_s=9.0, agent_beats_since=1)
    assert judge([rank(0), woken], HEALTHY, LIMITS) is None
    late = rank(1, heartbeat_age_s=9.0, agent_beats_since=5)
    assert judge([rank(0), late], [agent(0), agent(1, beat_age_s=6.0)], LIMITS) is None


def test_an_engine_without_a_first_heartbeat_is_left_to_the_deadlines_of_bring_up() -> None:
    assert judge([rank(0), rank(1, heartbeat_age_s=None)], HEALTHY, LIMITS) is None


def test_a_stuck_step_names_the_rank_that_got_least_far() -> None:
    ranks = [
        rank(0, step=7, layer=30, busy_s=40.0, progress_age_s=40.0),
        rank(1, step=7, layer=4, busy_s=40.0, progress_age_s=39.0),
    ]
    verdict = judge(ranks, HEALTHY, LIMITS)
    assert verdict is not None and verdict.rank == 1
    assert "step 7" in verdict.evidence and "layer 4" in verdict.evidence


def test_a_long_step_that_moves_through_its_layers_is_not_stuck() -> None:
    moving = rank(0, step=1, layer=12, busy_s=300.0, progress_age_s=4.0)
    assert judge([moving, rank(1)], HEALTHY, LIMITS, open_s=300.0) is None


def test_open_requests_without_a_step_are_the_leaders_fault() -> None:
    ranks = [rank(0, progress_age_s=500.0), rank(1, progress_age_s=500.0)]
    assert judge(ranks, HEALTHY, LIMITS, open_s=1.0) is None
    verdict = judge(ranks, HEALTHY, LIMITS, open_s=31.0)
    assert verdict is not None and verdict.rank == 0 and "no step began" in verdict.evidence


def test_an_idle_mesh_is_not_stuck_however_long_it_idles() -> None:
    ranks = [rank(0, progress_age_s=1e6), rank(1, progress_age_s=1e6)]
    assert judge(ranks, HEALTHY, LIMITS, open_s=0.0) is None


# ---------------------------------------------------------------- restart budget


def test_the_first_bring_up_has_one_more_try() -> None:
    budget = RestartBudget(3).epoch_ended("first", completed_step=False, ready_s=0.0)
    assert not budget.is_exhausted
    budget = budget.epoch_ended("second", completed_step=False, ready_s=0.0)
    assert budget.is_exhausted and budget.first_cause == "first"


def test_epochs_that_complete_no_step_use_up_the_budget() -> None:
    budget = RestartBudget(2)
    for _ in range(2):
        budget = budget.epoch_ended("crash", completed_step=False, ready_s=1.0)
        assert not budget.is_exhausted
    assert budget.epoch_ended("crash", completed_step=False, ready_s=1.0).is_exhausted


def test_a_completed_step_starts_the_count_anew() -> None:
    budget = RestartBudget(1).epoch_ended("a", completed_step=False, ready_s=1.0)
    budget = budget.epoch_ended("b", completed_step=True, ready_s=1.0)
    assert (budget.num_failed, budget.first_cause) == (0, "")


def test_an_idle_epoch_that_was_ready_for_long_is_no_crash_loop() -> None:
    budget = RestartBudget(0).epoch_ended("a", completed_step=False, ready_s=STABLE_S + 1)
    assert not budget.is_exhausted


def test_the_next_try_waits_longer_each_time() -> None:
    budget, delays = RestartBudget(9), []
    for _ in range(7):
        budget = budget.epoch_ended("a", completed_step=False, ready_s=1.0)
        delays.append(budget.delay_s)
    assert delays == [0.0, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


# ---------------------------------------------------------------- the observed clock


def test_time_that_nobody_observed_does_not_count() -> None:
    clock = ObservedClock(100.0, 0.25)
    assert clock.tick(100.25) == 0.0
    before = clock.read(100.25)
    assert clock.tick(160.5) == pytest.approx(60.0)  # the machine slept
    assert clock.read(160.5) - before == pytest.approx(0.25)


def test_what_is_read_before_the_late_tick_does_not_count_the_sleep_either() -> None:
    clock = ObservedClock(100.0, 0.25)
    assert clock.read(160.0) <= 101.25


def test_a_small_lag_is_ordinary_time() -> None:
    clock = ObservedClock(0.0, 0.25)
    assert clock.tick(1.0) == 0.0
    assert clock.read(1.5) == pytest.approx(1.5)


# ---------------------------------------------------------------- what kind of failure


def test_a_stopped_process_is_named_also_before_its_first_heartbeat() -> None:
    starting = rank(1, phase=Phase.STARTING, heartbeat_age_s=None, stopped_s=2.5)
    verdict = judge([rank(0, phase=Phase.STARTING, heartbeat_age_s=None), starting], HEALTHY, LIMITS)
    assert verdict is not None and verdict.rank == 1 and "is stopped for 2.5 s" in verdict.evidence
    assert judge([rank(0), rank(1, stopped_s=1.0)], HEALTHY, LIMITS) is None


def test_running_out_of_memory_is_final_while_loading_and_a_requests_fault_later() -> None:
    for phase, is_retryable in ((Phase.LOADING, False), (Phase.READY, True)):
        verdict = judge([rank(0, failure=failure("memory", phase)), rank(1)], HEALTHY, LIMITS)
        assert verdict is not None and verdict.retryable is is_retryable and verdict.by_itself


def test_a_step_may_take_ten_times_what_its_rank_predicted() -> None:
    def stuck(seconds: float, expected_s: float) -> Any:
        view = rank(1, busy_s=seconds, progress_age_s=seconds, expected_s=expected_s)
        return judge([rank(0), view], HEALTHY, LIMITS)

    assert stuck(29.0, 0.1) is None
    floor = stuck(31.0, 0.1)
    assert floor is not None and "step_floor_s is 30" in floor.evidence and floor.silent_s == 31.0
    assert stuck(199.0, 20.0) is None  # a slow prefill is not a hang
    slow = stuck(201.0, 20.0)
    assert slow is not None and "10 times the 20.0 s predicted" in slow.evidence


def test_the_first_step_after_loading_has_a_limit_of_its_own() -> None:
    def first(seconds: float) -> Any:
        view = rank(1, busy_s=seconds, progress_age_s=seconds, expected_s=-1.0)
        return judge([rank(0), view], HEALTHY, LIMITS)

    assert first(119.0) is None
    verdict = first(121.0)
    assert verdict is not None and "first_step_s is 120" in verdict.evidence


def test_pictures_have_a_limit_of_their_own_and_are_to_blame_when_it_is_over() -> None:
    def reading(seconds: float, expected_s: float = 0.1) -> Any:
        view = rank(
            0, busy_s=seconds, progress_age_s=seconds, expected_s=expected_s, reads_media=True, step=3
        )
        return judge([view, rank(1, progress_age_s=seconds)], HEALTHY, LIMITS, open_s=seconds)

    assert reading(299.0) is None and reading(299.0, expected_s=-1.0) is None
    verdict = reading(301.0)
    assert verdict is not None and verdict.rank == 0 and verdict.by_itself
    assert verdict.evidence == "the pictures of a prompt are not read after 301.0 s (media_s is 300)"


@pytest.mark.parametrize(
    ("changes", "kind", "by_itself"),
    [
        ({"exited": "was killed by SIGKILL", "was_killed": True}, VerdictKind.DEAD_ENGINE, False),
        ({"exited": "was killed by SIGSEGV", "exited_by_itself": True}, VerdictKind.DEAD_ENGINE, True),
        ({"failure": failure("internal", Phase.READY)}, VerdictKind.REPORTED, True),
        ({"failure": failure("peer_lost"), "failure_age_s": 9.0}, VerdictKind.LOST_PEER, False),
        ({"heartbeat_age_s": 3.5, "agent_beats_since": 3}, VerdictKind.SILENT_ENGINE, False),
    ],
)
def test_a_verdict_says_its_kind_and_whether_the_engine_ended_by_itself(
    changes: dict[str, Any], kind: VerdictKind, by_itself: bool
) -> None:
    verdict = judge([rank(0), rank(1, **changes)], HEALTHY, LIMITS)
    assert verdict is not None and (verdict.kind, verdict.by_itself) == (kind, by_itself)
    assert verdict.was_killed is changes.get("was_killed", False)
    assert verdict.wants_stacks == (kind in (VerdictKind.LOST_PEER, VerdictKind.SILENT_ENGINE))
