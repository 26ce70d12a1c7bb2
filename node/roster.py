"""The coordinator's books: which host sits where, and what each rank of the current epoch said last.

Plain data and its rules; no sockets and no clock of its own (`now` is observed seconds).
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from mlx_mesh.mesh.divergence import DigestBook, Divergence
from mlx_mesh.mesh.membership import AgentView, RankView
from mlx_mesh.mesh.messages import (
    AgentBeat,
    EngineFailed,
    EngineHello,
    EngineReport,
    Heartbeat,
    HostPlan,
    Join,
    MeshConfig,
    PhaseReached,
    PortsReserved,
    Progress,
    RankExited,
)
from mlx_mesh.mesh.types import PROTOCOL_VERSION, Phase

NUM_LINES = 120  # a dump of all stacks among them

CRASHES = frozenset(
    {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGTRAP}
)
"""Signals that a process earns by what it does; others come from outside."""

_ORDER = {phase: place for place, phase in enumerate(Phase)}


@dataclass(slots=True)
class RankRecord:
    """What is known of one rank in the current epoch."""

    rank: int
    phase: Phase = Phase.STARTING
    pid: int = 0
    hello: EngineHello | None = None
    beat: Heartbeat | None = None
    beat_at: float | None = None
    agent_beats_since: int = 0
    stopped_at: float | None = None  # since when its agent sees the process stopped
    moved_at: float = 0.0  # when phase, step, layer or progress last changed
    reached: dict[Phase, PhaseReached] = field(default_factory=dict)
    progress: Progress | None = None
    failure: EngineFailed | None = None
    failed_at: float = 0.0
    exit: RankExited | None = None
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LINES))

    def take(self, report: EngineReport, now: float) -> None:
        """Note what the engine reported. Any report is a sign of life: after mx.distributed.init, which
        holds the interpreter's lock for as long as it waits, the first one is no heartbeat."""
        if self.beat_at is not None:
            self.beat_at, self.agent_beats_since = now, 0
        match report:
            case EngineHello():
                self.hello = report
                self.enter(Phase.IMPORTED, now)
            case PhaseReached():
                self.reached[report.phase] = report
                self.enter(report.phase, now)
            case Progress():
                self.progress = report
                self.moved_at = now
            case Heartbeat():
                self._take_beat(report, now)
            case EngineFailed():
                self.failure = report
                self.failed_at = now

    def _take_beat(self, beat: Heartbeat, now: float) -> None:
        last = self.beat
        if last is None or (last.step, last.layer, last.busy) != (beat.step, beat.layer, beat.busy):
            self.moved_at = now
        self.beat, self.beat_at, self.agent_beats_since = beat, now, 0
        # A beat may have been sent before the engine saw the command that began a phase.
        if _ORDER[beat.phase] > _ORDER[self.phase]:
            self.enter(beat.phase, now)

    def enter(self, phase: Phase, now: float) -> None:
        if phase is not self.phase:
            self.phase = phase
            self.moved_at = now

    @property
    def exited_by_itself(self) -> bool:
        """Its engine ended, and nobody made it."""
        if self.exit is None or self.exit.expected:
            return False
        return self.exit.signal is None or self.exit.signal in CRASHES

    @property
    def was_killed(self) -> bool:
        """Somebody else than its agent killed its engine."""
        return self.exit is not None and not self.exit.expected and self.exit.signal == signal.SIGKILL

    def exit_words(self) -> str:
        """How the engine ended; '' while it runs."""
        if self.exit is None:
            return ""
        if self.exit.signal is not None:
            try:
                how = f"was killed by {signal.Signals(self.exit.signal).name}"
            except ValueError:
                how = f"was killed by signal {self.exit.signal}"
        else:
            how = f"ended with status {self.exit.exit_code}"
        return f"{how}, stopped by its agent" if self.exit.expected else how

    def last_lines(self) -> tuple[str, ...]:
        """The end of the engine's output."""
        if self.exit is not None and self.exit.last_lines:
            return self.exit.last_lines
        return tuple(self.lines)


@dataclass(slots=True)
class EpochRecord:
    """Where the mesh is in its life."""

    number: int = 0  # 0 = none has begun
    cause: str = "start"  # why it was begun
    began_at: float = 0.0
    is_open: bool = False  # its engines run, and whatever happens to them is judged
    ready_at: float | None = None
    has_completed_step: bool = False
    digests: DigestBook = field(default_factory=lambda: DigestBook(1))
    divergence: Divergence | None = None


@dataclass(slots=True)
class Member:
    """An agent that joined."""

    peer: bytes
    join: Join
    beat_at: float
    joined_at: float = 0.0
    last_seq: int = 0
    lost: str = ""  # in words; '' = connected
    broke_epoch: str = ""  # it is here, but cannot go on in the current epoch, and why
    stopped_epoch: int = 0
    ports: PortsReserved | None = None
    pressure: str = ""  # see AgentBeat; so the next two
    awake: str = ""
    events: tuple[str, ...] = ()


@dataclass(slots=True)
class Seat:
    """One host that the mesh expects. Who has no ranks now takes no part."""

    index: int
    plan: HostPlan
    planned_ranks: tuple[int, ...]  # when all hosts take part; a manual bootstrap knows them by these
    ranks: tuple[int, ...]
    member: Member | None = None
    is_wanted: bool = True
    has_served: bool = False  # the mesh was ready with it since it was taken in
    is_drained: bool = False
    failure: str = ""
    num_lost: int = 0

    @property
    def host(self) -> str:
        """The planned name, or in a manual bootstrap the one that the agent gave."""
        if self.plan.name:
            return self.plan.name
        return self.member.join.host if self.member is not None else f"of rank {self.planned_ranks[0]}"

    @property
    def is_taken(self) -> bool:
        return self.member is not None and not self.member.lost


class Roster:
    """All seats and ranks of one mesh."""

    def __init__(self, mesh: MeshConfig) -> None:
        self.mesh = mesh
        self.seats: list[Seat] = []
        first = 0
        for index, plan in enumerate(mesh.hosts):
            ranks = tuple(range(first, first + plan.slots))
            self.seats.append(Seat(index=index, plan=plan, planned_ranks=ranks, ranks=ranks))
            first += plan.slots
        self.full_size = self.world_size = first
        self.ranks = [RankRecord(rank=rank) for rank in range(first)]
        self.epoch = EpochRecord()
        self.refusals: list[str] = []

    # ------------------------------------------------------------ members

    def members(self) -> Iterator[tuple[Seat, Member]]:
        """Seats whose agent is connected."""
        for seat in self.seats:
            if seat.member is not None and not seat.member.lost:
                yield seat, seat.member

    def placed(self) -> Iterator[tuple[Seat, Member]]:
        """Of these the ones that have ranks."""
        return ((seat, member) for seat, member in self.members() if seat.ranks)

    def pressure(self) -> str:
        """Which host that serves is short of memory, and how; '' = none is."""
        return "; ".join(
            f"{seat.host}: {member.pressure}" for seat, member in self.placed() if member.pressure
        )

    def place(self, hosts: Sequence[int]) -> None:
        """Give ranks to these hosts, by their places, and to no other. Not while an epoch is open."""
        assert not self.epoch.is_open
        first = 0
        for seat in self.seats:
            count = seat.plan.slots if seat.index in hosts else 0
            seat.ranks = tuple(range(first, first + count))
            first += count
        self.world_size = first
        self.ranks = [RankRecord(rank=rank) for rank in range(first)]

    def find(self, peer: bytes) -> tuple[Seat, Member] | None:
        """The connected member with this socket identity."""
        return next(((seat, member) for seat, member in self.members() if member.peer == peer), None)

    def seat_of(self, rank: int) -> Seat:
        return next(seat for seat in self.seats if rank in seat.ranks)

    def host_of(self, rank: int) -> str:
        return self.seat_of(rank).host

    def missing(self) -> list[Seat]:
        return [seat for seat in self.seats if not seat.is_taken]

    def choose_seat(self, join: Join) -> Seat | str:
        """Where an agent belongs, or in words why it may not join."""
        if join.protocol != PROTOCOL_VERSION:
            return (
                f"host {join.host} speaks protocol {join.protocol}, the coordinator {PROTOCOL_VERSION}. "
                "Install the same version of mlx-mesh on all hosts."
            )
        if join.mesh_name != self.mesh.name:
            return f"this is mesh {self.mesh.name}, not {join.mesh_name}: check the coordinator's address."
        if join.world_size and join.world_size != self.full_size:
            return (
                f"host {join.host} expects world size {join.world_size}, the coordinator has "
                f"{self.full_size}. Give all ranks the same WORLD_SIZE."
            )
        seat = self._seat_for(join)
        if seat is None:
            expected = ", ".join(f"{s.host} (rank {_ranks(s.planned_ranks)})" for s in self.seats)
            asked = f" with rank {_ranks(join.ranks)}" if join.ranks else ""
            return (
                f"host {join.host}{asked} is not expected in mesh {self.mesh.name}; expected are: {expected}."
            )
        if join.slots != seat.plan.slots:
            return f"host {join.host} offers {join.slots} slots, the plan has {seat.plan.slots}."
        return seat

    def _seat_for(self, join: Join) -> Seat | None:
        for seat in self.seats:
            if join.ranks:
                if seat.planned_ranks == join.ranks and seat.plan.name in ("", join.host):
                    return seat
            elif seat.plan.name == join.host:
                return seat
        return None

    # ------------------------------------------------------------ an epoch

    def begin_epoch(self, cause: str, now: float) -> None:
        """The next one, open; what the ranks of the last one said is forgotten."""
        self.epoch = EpochRecord(
            number=self.epoch.number + 1,
            cause=cause,
            began_at=now,
            is_open=True,
            digests=DigestBook(self.world_size),
        )
        self.ranks = [RankRecord(rank=rank, moved_at=now) for rank in range(self.world_size)]
        for _, member in self.members():
            member.broke_epoch = ""
            member.ports = None

    def note_digest(self, rank: int, step: int, digest: str) -> None:
        """Compare a rank's history with the others'."""
        epoch = self.epoch
        epoch.divergence = epoch.divergence or epoch.digests.note(rank, step, digest)

    def note_agent_beat(self, seat: Seat, member: Member, beat: AgentBeat, now: float) -> None:
        member.beat_at, member.last_seq, member.pressure = now, beat.seq, beat.pressure
        member.awake, member.events = beat.awake, beat.events
        for rank in seat.ranks:
            record = self.ranks[rank]
            record.agent_beats_since += 1
            if rank not in beat.stopped:
                record.stopped_at = None
            elif record.stopped_at is None:
                record.stopped_at = now

    def rank_views(self, now: float) -> list[RankView]:
        """For mesh.membership."""
        return [self._rank_view(record, now) for record in self.ranks]

    def _rank_view(self, record: RankRecord, now: float) -> RankView:
        beat = record.beat
        # mx.distributed.init holds the interpreter's lock while it waits for peers, so no heartbeat comes;
        # connect_s limits that phase.
        is_mute = record.beat_at is None or record.phase is Phase.CONNECTING
        busy_s = 0.0
        if beat is not None and beat.busy and record.beat_at is not None:
            busy_s = beat.busy_s + max(0.0, now - record.beat_at)
        return RankView(
            rank=record.rank,
            host=self.host_of(record.rank),
            phase=record.phase,
            step=beat.step if beat else 0,
            layer=beat.layer if beat else 0,
            busy_s=busy_s,
            expected_s=beat.expected_s if beat else 0.0,
            reads_media=beat.reads_media if beat else False,
            progress_age_s=max(0.0, now - record.moved_at),
            heartbeat_age_s=None if is_mute else max(0.0, now - (record.beat_at or 0.0)),
            stopped_s=0.0 if record.stopped_at is None else max(0.0, now - record.stopped_at),
            agent_beats_since=record.agent_beats_since,
            exited=record.exit_words(),
            exited_by_itself=record.exited_by_itself,
            was_killed=record.was_killed,
            failure=record.failure,
            failure_age_s=max(0.0, now - record.failed_at),
        )

    def agent_views(self, now: float) -> list[AgentView]:
        """For mesh.membership. A seat whose agent is lost is in the list; one that is empty or takes no part
        is not."""
        return [
            AgentView(
                host=seat.host,
                ranks=seat.ranks,
                beat_age_s=max(0.0, now - seat.member.beat_at),
                lost=seat.member.lost or seat.member.broke_epoch,
            )
            for seat in self.seats
            if seat.member is not None and seat.ranks
        ]


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks))
