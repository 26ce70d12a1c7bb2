"""Between the coordinator's books and its agents: what is heard goes into the books, what cannot be sent
tells who is gone. It decides nothing but who may join."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable

from mlx_mesh.mesh.messages import (
    AgentBeat,
    AgentMessage,
    BeatAck,
    CoordinatorMessage,
    Deadlines,
    EngineCommand,
    EngineFailed,
    EngineReport,
    EpochStopped,
    Heartbeat,
    Join,
    JoinAgain,
    Leaving,
    LogLine,
    PhaseReached,
    PortsReserved,
    Progress,
    RankExited,
    RankLog,
    RankProgress,
    RankReport,
    RankStarted,
    Refused,
    RequestFailed,
    StepDigest,
    StopEpoch,
    ToEngine,
    Tokens,
    Welcome,
)
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.channel import AgentsChannel
from mlx_mesh.node.desk import Desk
from mlx_mesh.node.gathering import mismatch
from mlx_mesh.node.logs import RankLogs
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Member, Roster

_PROBES_S = (0.0, 0.02, 0.1, 0.3)
"""After a connection ended somewhere: when to ask who it was. zmq drops the peer a moment after its event."""


class Switchboard:
    """Runs as two tasks, `receive` and `watch_links`; `changed` is set when the main flow must look."""

    def __init__(
        self,
        channel: AgentsChannel,
        roster: Roster,
        desk: Desk,
        *,
        deadlines: Deadlines,
        output: Output,
        logs: RankLogs,
        now: Callable[[], float],
        changed: asyncio.Event,
    ) -> None:
        self._channel = channel
        self._roster = roster
        self._desk = desk
        self._deadlines = deadlines
        self._output = output
        self._logs = logs
        self._now = now
        self._changed = changed
        self._held: deque[Tokens | RequestFailed] = deque()  # under --paranoid, in the engine's order
        self._held_epoch = 0
        self.rejected: Counter[str] = Counter()
        """Messages that changed nothing, by what was wrong: sender, rank, epoch or sequence."""
        self.num_lost_agents = 0
        """Connections of members that ended without a bye."""

    # ------------------------------------------------------------ tasks

    async def receive(self) -> None:
        while True:
            self._hear(*await self._channel.receive())

    async def watch_links(self) -> None:
        """A broken connection shows at once, but not whose it was: sending tells."""
        while True:
            await self._channel.link_lost.wait()
            self._channel.link_lost.clear()
            for delay_s in _PROBES_S:
                await asyncio.sleep(delay_s)
                for _, member in list(self._roster.members()):
                    self._probe(member)

    def expire_members(self, *, with_placed: bool = True) -> None:
        """Agents that were silent for too long are no members any more. Without `with_placed` only those that
        have no ranks: the others are judged."""
        limit_s, now = self._deadlines.heartbeat_timeout_s, self._now()
        for seat, member in list(self._roster.members()):
            if now - member.beat_at > limit_s and (with_placed or not seat.ranks):
                member.lost = f"no heartbeat of its agent for heartbeat_timeout_s = {limit_s:g} s"
                self._changed.set()

    # ------------------------------------------------------------ sending

    def send(self, member: Member, message: CoordinatorMessage) -> None:
        """To an agent; one that cannot take it is lost."""
        if not member.lost and not self._channel.send(member.peer, message):
            member.lost = "the connection to its agent ended"
            self.num_lost_agents += 1
            self._changed.set()

    def command(self, rank: int, command: EngineCommand) -> None:
        """To the engine of a rank."""
        member = self._roster.seat_of(rank).member
        if member is not None:
            self.send(member, ToEngine(epoch=self._roster.epoch.number, rank=rank, command=command))

    def enter(self, phase: Phase) -> None:
        """All ranks begin a phase."""
        now = self._now()
        for record in self._roster.ranks:
            record.enter(phase, now)
            self._show(record.rank)

    def _probe(self, member: Member) -> None:
        self.send(member, BeatAck(seq=member.last_seq))

    # ------------------------------------------------------------ hearing

    def _hear(self, peer: bytes, message: AgentMessage) -> None:
        if isinstance(message, Join):
            self._admit(peer, message)
            self._changed.set()
            return
        found = self._roster.find(peer)
        if found is None:
            self.rejected["sender"] += 1
            if isinstance(message, AgentBeat):
                self._channel.send(peer, JoinAgain(reason="no heartbeat arrived for too long"))
            return
        seat, member = found
        match message:
            case AgentBeat(seq=seq) if seq <= member.last_seq:
                self.rejected["sequence"] += 1
                return
            case AgentBeat():
                self._roster.note_agent_beat(seat, member, message, self._now())
                self._probe(member)
                return
            case Leaving():
                member.lost = f"it left: {message.reason}"
            case PortsReserved():
                if message.epoch == self._roster.epoch.number:
                    member.ports = message
            case EpochStopped():
                member.stopped_epoch = max(member.stopped_epoch, message.epoch)
            case RankStarted() | RankReport() | RankExited() | RankLog():
                if message.rank not in seat.ranks:
                    self.rejected["rank"] += 1
                    return
                if not self._hear_rank(message):
                    return
        self._changed.set()

    def _hear_rank(self, message: RankStarted | RankReport | RankExited | RankLog) -> bool:
        """Returns whether the main flow must look at it."""
        if isinstance(message, RankLog):
            self.log(message.rank, message.line)
            return False
        if message.epoch != self._roster.epoch.number:
            self.rejected["epoch"] += 1
            return False
        record = self._roster.ranks[message.rank]
        match message:
            case RankStarted():
                record.pid = message.pid
                self._note(message.rank, f"its engine started (pid {message.pid})")
            case RankExited():
                record.exit = message
                self._note(message.rank, f"its engine {record.exit_words()}")
            case RankReport():
                return self._roster.epoch.is_open and self._hear_engine(message.rank, message.report)
        return True

    def _hear_engine(self, rank: int, report: EngineReport) -> bool:
        epoch = self._roster.epoch
        is_leader_at_work = rank == 0 and epoch.ready_at is not None
        match report:
            case Tokens():
                if is_leader_at_work:
                    self._take_tokens(report)
                return self._desk.is_draining
            case RequestFailed():
                if is_leader_at_work:
                    self._take_failure(report)
                return self._desk.is_draining
            case StepDigest():
                self._roster.note_digest(rank, report.step, report.digest)
                self._release_tokens()
                return epoch.divergence is not None
        self._roster.ranks[rank].take(report, self._now())
        if isinstance(report, Heartbeat):
            for step, digest in report.digests:
                self._roster.note_digest(rank, step, digest)
            self._release_tokens()
        if isinstance(report, PhaseReached):
            self._note(rank, f"{report.phase} after {report.seconds:.1f} s")
        if isinstance(report, PhaseReached | Progress | EngineFailed):
            self._show(rank)
        return (
            isinstance(report, PhaseReached | EngineFailed)
            or epoch.ready_at is None
            or epoch.divergence is not None
        )

    def _take_tokens(self, report: Tokens) -> None:
        self._desk.note_admitted(report.admitted, report.cached, report.prompts)
        if not self._roster.mesh.paranoid or self._roster.world_size == 1:
            self._pass_on(report)
            return
        if self._held_epoch != self._roster.epoch.number:
            self._held_epoch = self._roster.epoch.number
            self._held.clear()
        self._held.append(report)
        self._release_tokens()

    def _take_failure(self, report: RequestFailed) -> None:
        """It must not overtake tokens of its request that are held."""
        if self._held and self._held_epoch == self._roster.epoch.number:
            self._held.append(report)
        else:
            self._desk.take_failure(report)

    def _release_tokens(self) -> None:
        """Under --paranoid, what a step gave waits until all ranks have the same history up to it."""
        epoch = self._roster.epoch
        if self._held_epoch != epoch.number:
            return
        while self._held:
            first = self._held[0]
            if isinstance(first, Tokens) and first.step > epoch.digests.verified_step:
                return
            self._held.popleft()
            if isinstance(first, Tokens):
                self._pass_on(first)
            else:
                self._desk.take_failure(first)

    def _pass_on(self, report: Tokens) -> None:
        if self._desk.take(report.chunks):
            self._roster.epoch.has_completed_step = True

    # ------------------------------------------------------------ joining

    def _admit(self, peer: bytes, join: Join) -> None:
        seat = self._roster.choose_seat(join)
        if isinstance(seat, str):
            self._refuse(peer, seat)
            return
        if self._roster.epoch.number and (why := mismatch(self._roster, join)):
            self._refuse(peer, why)
            return
        old = seat.member
        if old is not None and not old.lost and old.peer != peer:
            self._probe(old)
            if not old.lost and self._now() - old.beat_at < 2 * self._deadlines.heartbeat_interval_s:
                self._refuse(
                    peer,
                    f"host {join.host} is in mesh {self._roster.mesh.name} already, with agent pid "
                    f"{old.join.agent_pid} of {old.join.facts.hostname}. Stop that one first, or correct "
                    "the rank.",
                )
                return
        now = self._now()
        seat.member = Member(peer=peer, join=join, beat_at=now, joined_at=now)
        if old is not None:
            seat.num_lost += 1
            if seat.ranks and self._roster.epoch.is_open:
                seat.member.broke_epoch = "its agent lost the connection and joined again"
        self.send(
            seat.member,
            Welcome(ranks=seat.ranks, world_size=self._roster.world_size, deadlines=self._deadlines),
        )
        if not seat.ranks:  # it may have slept with engines of an epoch that is over
            epoch = self._roster.epoch.number
            self.send(seat.member, StopEpoch(epoch=epoch, gently=False, reason="it takes no part now"))
        self._output.note(
            f"host {seat.host} joined from {join.address or 'this process'} (agent pid {join.agent_pid})"
        )

    def _refuse(self, peer: bytes, reason: str) -> None:
        self._roster.refusals.append(reason)
        self._output.note(f"refused an agent: {reason}")
        self._channel.send(peer, Refused(reason=reason))

    # ------------------------------------------------------------ showing

    def log(self, rank: int, line: str) -> None:
        """One line of a rank: into the books, its file and the launcher's output."""
        host = self._roster.host_of(rank)
        self._roster.ranks[rank].lines.append(line)
        number = self._roster.mesh.first_rank + rank
        self._logs.write(number, host, line)
        self._output.event(LogLine(rank=number, host=host, line=line))

    def _note(self, rank: int, what: str) -> None:
        """What becomes of a rank, into its file. The launcher's output has its progress line for that."""
        number = self._roster.mesh.first_rank + rank
        self._logs.write(number, self._roster.host_of(rank), f"epoch {self._roster.epoch.number}: {what}")

    def _show(self, rank: int) -> None:
        """The launcher's progress line of a rank."""
        record = self._roster.ranks[rank]
        progress = record.progress if record.phase is Phase.LOADING else None
        self._output.event(
            RankProgress(
                rank=self._roster.mesh.first_rank + rank,
                host=self._roster.host_of(rank),
                phase=Phase.FAILED if record.failure is not None else record.phase,
                done=progress.done if progress else 0,
                total=progress.total if progress else 0,
                detail=record.failure.message if record.failure is not None else "",
            )
        )
