"""Who is to blame when an epoch breaks, and whether another one may be tried. Values in, verdict out.

The coordinator turns what it heard into `RankView` and `AgentView`; ages are seconds of *observed* time
(`ObservedClock`), so that a leader that slept does not accuse everybody when it wakes up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from mlx_mesh.mesh.messages import Deadlines, EngineFailed
from mlx_mesh.mesh.types import Phase

MAX_LOOP_LAG_S = 1.0
"""A coordinator that was not scheduled for longer than this gives no verdict about others' silence."""

SYMPTOM_GRACE_S = 0.5
"""A rank that only says "my peer is gone" is a witness: for so long a better explanation is awaited."""

STABLE_S = 600.0
"""An epoch that was ready for so long is no part of a crash loop, even when nobody asked it anything."""

DETERMINISTIC_KINDS = frozenset({"config", "memory", "version"})
"""Kinds of EngineFailed that would happen again: never retried. Once ready, only requests ask for memory, and
the rule for suspects finds the one that asks for too much."""

STEP_FACTOR = 10.0
"""A step may take so many times as long as its rank predicted for it."""


class VerdictKind(StrEnum):
    """What kind of failure ended an epoch; a label of the metrics."""

    REPORTED = "reported"  # an engine said why it ends
    LOST_AGENT = "lost_agent"
    DEAD_ENGINE = "dead_engine"
    SILENT_AGENT = "silent_agent"
    SILENT_ENGINE = "silent_engine"
    STUCK_STEP = "stuck_step"
    LOST_PEER = "lost_peer"
    DIVERGED = "diverged"
    LATE = "late"  # a phase of bring-up missed its deadline


@dataclass(frozen=True, slots=True)
class RankView:
    """One rank as the coordinator sees it now. Ages in seconds; None = it never happened."""

    rank: int
    host: str
    phase: Phase
    step: int = 0
    layer: int = 0
    busy_s: float = 0.0  # how long its current step has taken; 0 = not in a step
    expected_s: float = 0.0  # what it predicted for that step; below 0 = its first one
    reads_media: bool = False  # it is busy with a prompt's pictures instead
    progress_age_s: float = 0.0  # since phase, step or layer last moved
    heartbeat_age_s: float | None = None
    stopped_s: float = 0.0  # since when its agent sees the process stopped; 0 = it is not
    agent_beats_since: int = 0  # beats of its agent that came after its last heartbeat
    exited: str = ""  # "ended with status 3", "was killed by SIGKILL"; '' = alive
    exited_by_itself: bool = False  # a status or a crash, not a signal from outside
    was_killed: bool = False  # by a SIGKILL that is not its agent's
    failure: EngineFailed | None = None
    failure_age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AgentView:
    """One host's agent as the coordinator sees it now."""

    host: str
    ranks: tuple[int, ...]
    beat_age_s: float
    lost: str = ""  # how its connection ended, in words; '' = connected


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why an epoch must end. `rank` is None when a whole host is at fault."""

    rank: int | None
    host: str
    phase: str
    evidence: str
    retryable: bool = True
    kind: VerdictKind = VerdictKind.LATE
    by_itself: bool = False
    """An engine ended on its own account: what it was computing may be the reason."""
    was_killed: bool = False
    """An engine was killed from outside, as a system does that is short of memory."""
    silent_s: float = 0.0
    """For how long there was no sign of life or progress; 0 = the cause was heard of at once."""
    others: tuple[str, ...] = ()
    """Hosts that may be at fault as well as `host`, the likeliest first: a link has two ends."""

    @property
    def suspects(self) -> tuple[str, ...]:
        """Every host that may be at fault, the likeliest first."""
        return (self.host, *self.others)

    @property
    def wants_stacks(self) -> bool:
        """Where the engines stand explains it: nobody said why they do not go on."""
        return self.kind in (
            VerdictKind.SILENT_ENGINE,
            VerdictKind.STUCK_STEP,
            VerdictKind.LOST_PEER,
            VerdictKind.DIVERGED,
            VerdictKind.LATE,
        )

    def __str__(self) -> str:
        who = f"host {self.host}" if self.rank is None else f"rank {self.rank} on {self.host}"
        return f"{who}, phase {self.phase}: {self.evidence}"


def judge(
    ranks: Sequence[RankView],
    agents: Sequence[AgentView],
    deadlines: Deadlines,
    open_s: float = 0.0,
) -> Verdict | None:
    """The first cause among what is wrong now, or None when nothing is.

    `open_s`: since when the leader owes tokens for some request; 0 = it owes none. Causes come before
    symptoms: a deterministic error, a lost host, a dead process, any other error that an engine reported,
    silence, a stuck step, and last a rank that merely lost its peer.
    """
    return (
        _reported_failure(ranks, deterministic=True)
        or _lost_agent(ranks, agents)
        or _dead_engine(ranks)
        or _reported_failure(ranks, deterministic=False)
        or _silent_agent(ranks, agents, deadlines)
        or _stopped_engine(ranks, deadlines)
        or _silent_engine(ranks, agents, deadlines)
        or _stuck_step(ranks, deadlines, open_s)
        or _lost_peer(ranks)
    )


def _reported_failure(ranks: Sequence[RankView], *, deterministic: bool) -> Verdict | None:
    for view in ranks:
        failure = view.failure
        if failure is None or failure.kind == "peer_lost":
            continue
        if is_deterministic(failure) == deterministic:
            return Verdict(
                view.rank,
                view.host,
                failure.phase,
                failure.message,
                retryable=not deterministic,
                kind=VerdictKind.REPORTED,
                by_itself=True,
            )
    return None


def is_deterministic(failure: EngineFailed) -> bool:
    """It would happen again."""
    if failure.kind == "memory":
        return failure.phase is not Phase.READY
    return failure.kind in DETERMINISTIC_KINDS


def _lost_agent(ranks: Sequence[RankView], agents: Sequence[AgentView]) -> Verdict | None:
    for agent in agents:
        if agent.lost:
            return Verdict(None, agent.host, _phase_of(agent, ranks), agent.lost, kind=VerdictKind.LOST_AGENT)
    return None


def _dead_engine(ranks: Sequence[RankView]) -> Verdict | None:
    for view in ranks:
        if view.exited and view.failure is None:
            return Verdict(
                view.rank,
                view.host,
                view.phase,
                f"its engine {view.exited}",
                kind=VerdictKind.DEAD_ENGINE,
                by_itself=view.exited_by_itself,
                was_killed=view.was_killed,
            )
    return None


def _silent_agent(
    ranks: Sequence[RankView], agents: Sequence[AgentView], deadlines: Deadlines
) -> Verdict | None:
    for agent in agents:
        if agent.beat_age_s > deadlines.heartbeat_timeout_s:
            evidence = (
                f"no heartbeat of its agent for {agent.beat_age_s:.1f} s "
                f"(heartbeat_timeout_s is {deadlines.heartbeat_timeout_s:g}): the host is frozen, asleep "
                "or cut off"
            )
            return Verdict(
                None,
                agent.host,
                _phase_of(agent, ranks),
                evidence,
                kind=VerdictKind.SILENT_AGENT,
                silent_s=agent.beat_age_s,
            )
    return None


def _stopped_engine(ranks: Sequence[RankView], deadlines: Deadlines) -> Verdict | None:
    for view in ranks:
        # The agent looks once in each interval, so the first sight is that much late at worst.
        if view.stopped_s > deadlines.engine_silence_s - deadlines.heartbeat_interval_s:
            evidence = (
                f"its engine process is stopped for {view.stopped_s:.1f} s "
                f"(engine_silence_s is {deadlines.engine_silence_s:g})"
            )
            return Verdict(
                view.rank,
                view.host,
                view.phase,
                evidence,
                kind=VerdictKind.SILENT_ENGINE,
                silent_s=view.stopped_s,
            )
    return None


def _silent_engine(
    ranks: Sequence[RankView], agents: Sequence[AgentView], deadlines: Deadlines
) -> Verdict | None:
    # Only an agent that beats steadily is a witness: after a host slept, its agent's first beat may
    # overtake the engine's, and while the agent itself is late nothing is known of the engine.
    steady = {
        rank
        for agent in agents
        if agent.beat_age_s < 2 * deadlines.heartbeat_interval_s
        for rank in agent.ranks
    }
    silent = [
        view
        for view in ranks
        if view.heartbeat_age_s is not None
        and view.heartbeat_age_s > deadlines.engine_silence_s
        and view.agent_beats_since >= 2
        and view.rank in steady
    ]
    if not silent:
        return None
    view = max(silent, key=lambda v: v.heartbeat_age_s or 0.0)
    silent_s = view.heartbeat_age_s or 0.0
    evidence = (
        f"no heartbeat of its engine for {view.heartbeat_age_s:.1f} s "
        f"(engine_silence_s is {deadlines.engine_silence_s:g}) while its agent answers: "
        "the process is stopped or frozen"
    )
    return Verdict(
        view.rank, view.host, view.phase, evidence, kind=VerdictKind.SILENT_ENGINE, silent_s=silent_s
    )


def step_limit(view: RankView, deadlines: Deadlines) -> tuple[float, str]:
    """How long the rank's current step may take without a sign of progress, and in words why."""
    if view.reads_media:
        return deadlines.media_s, f"media_s is {deadlines.media_s:g}"
    if view.expected_s < 0:
        return deadlines.first_step_s, f"first_step_s is {deadlines.first_step_s:g}"
    predicted_s = STEP_FACTOR * view.expected_s
    if predicted_s > deadlines.step_floor_s:
        return predicted_s, (
            f"its limit is {predicted_s:.1f}: {STEP_FACTOR:g} times the {view.expected_s:.1f} s predicted"
        )
    return deadlines.step_floor_s, f"step_floor_s is {deadlines.step_floor_s:g}"


def _stuck_step(ranks: Sequence[RankView], deadlines: Deadlines, open_s: float) -> Verdict | None:
    stuck = [view for view in ranks if min(view.busy_s, view.progress_age_s) > step_limit(view, deadlines)[0]]
    if stuck:
        # Everyone waits for the rank that got least far.
        view = min(stuck, key=lambda v: (v.step, v.layer, -v.progress_age_s))
        stuck_s = min(view.busy_s, view.progress_age_s)
        where = (
            f"the pictures of a prompt are not read after {stuck_s:.1f} s"
            if view.reads_media
            else f"step {view.step} has not moved past layer {view.layer} for {stuck_s:.1f} s"
        )
        return Verdict(
            view.rank,
            view.host,
            view.phase,
            f"{where} ({step_limit(view, deadlines)[1]})",
            kind=VerdictKind.STUCK_STEP,
            by_itself=view.reads_media,  # no other rank takes part: it is that prompt
            silent_s=stuck_s,
        )
    limit_s = deadlines.step_floor_s
    leader = next((view for view in ranks if view.rank == 0 and view.phase is Phase.READY), None)
    if leader is not None and leader.busy_s == 0.0 and min(open_s, leader.progress_age_s) > limit_s:
        idle_s = min(open_s, leader.progress_age_s)
        evidence = f"requests are open but no step began for {idle_s:.1f} s (step_floor_s is {limit_s:g})"
        return Verdict(
            leader.rank, leader.host, leader.phase, evidence, kind=VerdictKind.STUCK_STEP, silent_s=idle_s
        )
    return None


def _lost_peer(ranks: Sequence[RankView]) -> Verdict | None:
    # The first to lose a peer comes first: the engines that end then let others lose theirs.
    witnesses = sorted(
        (view for view in ranks if view.failure is not None and view.failure.kind == "peer_lost"),
        key=lambda view: -view.failure_age_s,
    )
    if not witnesses or witnesses[0].failure_age_s <= SYMPTOM_GRACE_S:
        return None
    first, failure = witnesses[0], witnesses[0].failure
    assert failure is not None
    by_rank = {view.rank: view for view in ranks}
    links = _broken_links(witnesses, by_rank.keys())
    num_links = Counter(end for link in links for end in link)
    # In doubt the one that spoke first; whoever is at the end of several broken links explains them all.
    most = max((first.rank, *num_links), key=lambda end: num_links[end])
    culprit = by_rank[most] if num_links[most] > 1 else first
    if culprit is first:
        evidence = failure.message
    else:
        ends = sorted(link[0] for link in links if culprit.rank in link)
        evidence = f"the engines of ranks {', '.join(map(str, ends))} lost the connection to its engine"
    order = [first.rank, *(end for link in links for end in link), *(view.rank for view in witnesses)]
    if len(set(order)) == 1:  # nobody knows where the link led
        order += [(first.rank + step) % len(ranks) for step in (1, -1)]
    order.sort(key=lambda end: -num_links[end])
    hosts = [by_rank[end].host for end in order if end in by_rank]
    return Verdict(
        culprit.rank,
        culprit.host,
        failure.phase,
        f"{evidence} (no rank ended before it: the data link broke)",
        kind=VerdictKind.LOST_PEER,
        silent_s=first.failure_age_s,
        others=tuple(dict.fromkeys(host for host in hosts if host != culprit.host)),
    )


def _broken_links(witnesses: Sequence[RankView], known: Collection[int]) -> list[tuple[int, int]]:
    """(who lost it, whom it lost), in the order in which they said so. Whoever lost an engine that had said
    so before lost it because that one ended: no link of theirs is broken."""
    links, told = [], set()
    for view in witnesses:
        told.add(view.rank)
        lost = view.failure.lost_ranks if view.failure is not None else ()
        links += [(view.rank, rank) for rank in lost if rank in known and rank not in told]
    return links


def _phase_of(agent: AgentView, ranks: Sequence[RankView]) -> str:
    """The phase of a host: that of its rank that is least far."""
    order = list(Phase)
    phases = [view.phase for view in ranks if view.rank in agent.ranks]
    return min(phases, key=order.index) if phases else Phase.STARTING


@dataclass(frozen=True, slots=True)
class RestartBudget:
    """How many epochs in a row may end before completing a step. A completed step starts the count anew.

    Until the mesh was ready once, one more try is all there is: what fails twice at the start is a fact
    about the setup, and the user waits for an answer.
    """

    max_restarts: int
    num_failed: int = 0
    first_cause: str = ""
    was_ready: bool = False

    def epoch_ended(self, cause: str, *, completed_step: bool, ready_s: float) -> RestartBudget:
        """Count an epoch that broke for `cause` after being ready for `ready_s` seconds (0 = never)."""
        was_ready = self.was_ready or ready_s > 0
        if completed_step or ready_s > STABLE_S:
            return replace(self, num_failed=0, first_cause="", was_ready=was_ready)
        return replace(
            self,
            num_failed=self.num_failed + 1,
            first_cause=self.first_cause or cause,
            was_ready=was_ready,
        )

    @property
    def limit(self) -> int:
        return self.max_restarts if self.was_ready else min(1, self.max_restarts)

    @property
    def is_exhausted(self) -> bool:
        return self.num_failed > self.limit

    @property
    def delay_s(self) -> float:
        """How long to wait before the next epoch: none at first, then 1, 2, 4 ... at most 10 s."""
        return 0.0 if self.num_failed <= 1 else min(10.0, 2.0 ** (self.num_failed - 2))


class ObservedClock:
    """A clock that stands still while nobody watched it.

    `tick` is called at a steady rate; a gap of more than MAX_LOOP_LAG_S over the rate means that this process
    did not run (the machine slept, the loop was blocked), and that time counts for nobody.
    """

    def __init__(self, now: float, interval_s: float) -> None:
        self._interval_s = interval_s
        self._last_tick = now
        self._unobserved_s = 0.0

    def tick(self, now: float) -> float:
        """Note that the loop runs; returns the lag in seconds when it was over the limit, else 0."""
        lag = now - self._last_tick - self._interval_s
        self._last_tick = now
        if lag <= MAX_LOOP_LAG_S:
            return 0.0
        self._unobserved_s += lag
        return lag

    def read(self, now: float) -> float:
        """Observed seconds. After a tick at most the interval and the tolerated lag go by, however late."""
        since_tick = min(now - self._last_tick, self._interval_s + MAX_LOOP_LAG_S)
        return self._last_tick + since_tick - self._unobserved_s
