"""The leader's side of a mesh: who is in, one epoch after the other, and an end that leaves nothing behind.

One flow of control (`run`) goes through the life of the mesh and waits at named barriers; helper tasks
only note what they hear in the books (`roster`) and wake it. Blame is `mesh.membership`'s, bring-up is
`bring_up`'s, requests are `desk`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from importlib import metadata
from pathlib import Path
from socket import socket
from typing import Any

from mlx_mesh.mesh.errors import BringUpError, ExitCode, MeshError, PreflightError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.membership import ObservedClock, RestartBudget, Verdict, judge
from mlx_mesh.mesh.messages import (
    AgentBeat,
    AgentConfig,
    AgentMessage,
    BeatAck,
    CoordinatorMessage,
    EngineCommand,
    EngineFailed,
    EngineReport,
    EpochEnded,
    EpochStopped,
    Join,
    JoinAgain,
    Leaving,
    LogLine,
    MeshReady,
    MeshStatus,
    PhaseReached,
    PlanChosen,
    PortsReserved,
    Progress,
    ProxyConfig,
    RankExited,
    RankLog,
    RankProgress,
    RankReport,
    RankStarted,
    Refused,
    RequestFailed,
    Shutdown,
    StopEngine,
    StopEpoch,
    ToEngine,
    Tokens,
    Welcome,
)
from mlx_mesh.mesh.placement import HostCapacity, PlacementRequest, plan_placement
from mlx_mesh.mesh.topology import HostLink, plan_addresses
from mlx_mesh.mesh.types import Backend, Phase, Placement, Sharding
from mlx_mesh.node.bring_up import EpochPlan, bring_up, choose_backend, table, version_differences
from mlx_mesh.node.channel import CoordinatorChannel
from mlx_mesh.node.children import Programs
from mlx_mesh.node.desk import RETRY_AFTER_S, Desk
from mlx_mesh.node.front import Front
from mlx_mesh.node.inspection import inspect_model
from mlx_mesh.node.logs import RankLogs
from mlx_mesh.node.output import Output
from mlx_mesh.node.processes import ProcessId
from mlx_mesh.node.roster import Member, Roster, Seat
from mlx_mesh.node.status import rank_rows

TICK_S = 0.25
_PROBES_S = (0.0, 0.02, 0.1, 0.3)
"""After a connection ended somewhere: when to ask who it was. zmq drops the peer a moment after its event."""

_GOODBYE_S = 3.0
"""Agents whose engines are gone have this to say goodbye, before the coordinator's port closes."""

_SLACK_S = 3.0
_NUM_LINES = 15
_PIPELINE_PREFILL = 512  # chunks small enough that all stages work on one prompt
_PREFILL = 2048  # mlx-lm's default


class EpochBroken(Exception):
    """This epoch cannot go on; the verdict says whether another one may be tried."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class _Stopped(Exception):
    """Somebody asked for the end."""


class Coordinator:
    """Runs one mesh. `run` once; `stop` from anywhere in the same loop."""

    def __init__(
        self,
        config: AgentConfig,
        channel: CoordinatorChannel,
        *,
        local_peer: bytes,
        model: Path | None,
        programs: Programs,
        listen: socket,
        url: str,
        output: Output,
        logs: RankLogs,
        on_proxy: Callable[[ProcessId], None],
    ) -> None:
        """`local_peer`: identity of the agent in this process, which outlives the mesh; `model`: the
        folder on this host, None when it is missing (the agent's facts say why)."""
        assert config.mesh is not None
        self.mesh = config.mesh
        self.deadlines = config.mesh.deadlines
        self.roster = Roster(config.mesh)
        self._config = config
        self._channel = channel
        self._local_peer = local_peer
        self._model = model
        self._programs = programs
        self._url = url
        self._output = output
        self._logs = logs
        self._clock = ObservedClock(time.monotonic(), TICK_S)
        self._started_at = self._now()
        self._changed = asyncio.Event()
        self._helpers: list[asyncio.Task[Any]] = []
        self._helper_error: BaseException | None = None
        self._stop_reason: str | None = None
        self._is_hurried = False
        self._footprint: ModelFootprint | None = None
        self._placement: Placement | None = None
        self._backend = Backend.AUTO
        self._addresses: dict[str, str] = {}
        self._epoch = 0
        self._epoch_cause = "start"
        self._epoch_is_open = False
        self._epoch_began_at = 0.0
        self._ready_at: float | None = None
        self._has_completed_step = False
        self._was_ready = False
        self._num_restarts = 0
        self.num_rejected_messages = 0
        """Of another epoch, rank or host than their sender's."""
        self._front = Front(
            program=programs.proxy,
            config=self._proxy_config(),
            listen=listen,
            start_s=self.deadlines.spawn_s,
            on_request=lambda request: self._desk.hear(request),
            on_lost=self._lost_proxy,
            on_line=lambda line: self._log(0, f"proxy: {line}"),
            on_change=on_proxy,
        )
        self._desk = Desk(
            send=self._front.send,
            command=lambda command: self.command(0, command),
            status=self.status,
            now=self._now,
            world_size=self.roster.world_size,
            max_open=self.mesh.max_sequences + self.mesh.max_queue,
            request_s=self.deadlines.request_s,
        )
        self._front.greet_with(lambda: self._desk.readiness)

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Until it is stopped (returns) or cannot go on (raises MeshError). Nothing of the mesh is left on
        any host that answers, and the open requests have their answer."""
        self._startup()
        reason, exit_code = "the coordinator was cancelled", ExitCode.FAILED
        try:
            await self._main_loop()
        except _Stopped:
            reason, exit_code = self._stop_reason or "stopped", ExitCode.OK
        except MeshError as error:
            reason, exit_code = f"the mesh failed: {error}", error.exit_code
            raise
        except Exception as error:
            reason = f"the coordinator failed: {error}"
            raise
        finally:
            await self._shutdown(reason, exit_code)

    def stop(self, reason: str, *, hurry: bool) -> None:
        """Ask for the end: open requests may finish within drain_s, or not at all when in a hurry."""
        self._stop_reason = self._stop_reason or reason
        self._is_hurried = self._is_hurried or hurry
        self._changed.set()

    def _startup(self) -> None:
        self._help(self._receive(), "coordinator receiver")
        self._help(self._watch_clock(), "coordinator clock")
        self._help(self._watch_links(), "coordinator links")
        if self._model is not None:
            self._help(self._front.run(), "proxy")
            self._help(self._inspect(self._model), "model sizes")

    def _help(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._helper_done)
        self._helpers.append(task)

    def _helper_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._helper_error = self._helper_error or error
            self._changed.set()

    async def _main_loop(self) -> None:
        budget = RestartBudget(self.mesh.max_restarts)
        while True:
            try:
                await self._gather()
                plan = await self._plan_epoch()
                self._begin_epoch(plan)
                await bring_up(self, plan)
                self._open()
                await self._serve()
            except EpochBroken as broken:
                budget = await self._recover(broken.verdict, budget)

    async def _shutdown(self, reason: str, exit_code: ExitCode) -> None:
        self._desk.pause(reason)
        if exit_code is ExitCode.OK:
            self._desk.fail_all("draining", "The mesh was stopped.", RETRY_AFTER_S)
        else:
            self._desk.fail_all("mesh_failed", f"The mesh ended: {reason}")
        is_gentle = exit_code is ExitCode.OK and not self._is_hurried
        if is_gentle and self._epoch_is_open and self._ready_at is not None:
            self.command(0, StopEngine())
            await self._settle(self._all_exited, self.deadlines.stop_s)
        await self._stop_epoch(reason, gently=is_gentle)
        others = [m for _, m in self.roster.members() if m.peer != self._local_peer]
        for member in others:
            self.send(member, Shutdown(reason=reason, exit_code=exit_code))
        await self._front.stop(self.deadlines.stop_s)
        await self._settle(lambda: all(m.lost for m in others), _GOODBYE_S)
        for helper in reversed(self._helpers):
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)

    # ------------------------------------------------------------ waiting

    def _now(self) -> float:
        return self._clock.read(time.monotonic())

    def age(self, at: float) -> float:
        return max(0.0, self._now() - at)

    def timer(self, seconds: float) -> Callable[[], float | None]:
        until = self._now() + seconds
        return lambda: until - self._now()

    async def wait(
        self,
        done: Callable[[], bool],
        limit_s: Callable[[], float | None],
        late: Callable[[], Verdict | MeshError],
    ) -> None:
        """See bring_up.Control. `late` gives what to raise: a verdict on the epoch, or the mesh's end."""
        while True:
            self._check()
            if done():
                return
            left = limit_s()
            if left is not None and left <= 0:
                end = late()
                raise EpochBroken(end) if isinstance(end, Verdict) else end
            await self._pause(TICK_S if left is None else min(left, TICK_S))

    def _check(self) -> None:
        """Raise what must end the wait."""
        if self._helper_error is not None:
            raise self._helper_error
        if self._stop_reason is not None and (self._is_hurried or self._ready_at is None):
            raise _Stopped
        if self._epoch_is_open:
            now = self._now()
            verdict = judge(
                self.roster.rank_views(now),
                self.roster.agent_views(now),
                self.deadlines,
                self._desk.owed_s,
            )
            if verdict is not None:
                raise EpochBroken(verdict)

    async def _settle(self, done: Callable[[], bool], limit_s: float) -> None:
        """Wait without judging anybody; the end of the mesh does not depend on it."""
        left = self.timer(limit_s)
        while not done() and (left() or 0) > 0:
            await self._pause(TICK_S)

    async def _pause(self, seconds: float) -> None:
        self._changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # ------------------------------------------------------------ epochs

    async def _gather(self) -> None:
        """Until an agent sits on every seat, and all have the same versions and model."""
        if self._was_ready:
            limit_s, name = self.deadlines.rejoin_timeout_s, "rejoin_timeout_s"
        else:
            limit_s, name = self.deadlines.join_s, "join_s"
        if missing := self.roster.missing():
            self._desk.pause(f"waiting for {self._names(missing)}")
        await self.wait(
            lambda: not self.roster.missing(),
            self.timer(limit_s),
            lambda: BringUpError(self._who_is_missing(limit_s, name)),
        )
        self._compare_hosts()

    def _who_is_missing(self, limit_s: float, limit_name: str) -> str:
        missing = self.roster.missing()
        text = f"{self._names(missing)} did not join within {limit_s:g} s ({limit_name})."
        for seat in missing:
            if seat.member is not None:
                text += f" Host {seat.host} was here before: {seat.member.lost}."
        if self.roster.refusals:
            text += " Refused were: " + " ".join(self.roster.refusals[-3:])
        if self._channel.num_failed_handshakes:
            text += (
                f" {self._channel.num_failed_handshakes} connections failed the handshake: an agent with "
                "another secret, or a program that is not of this mesh."
            )
        if self._channel.endpoint:
            text += (
                f" Start the missing agents so that they reach the coordinator at {self._channel.endpoint}, "
                "and check any firewall between the hosts."
            )
        return text

    def _compare_hosts(self) -> None:
        """Raises PreflightError with a table of what differs."""
        facts = {seat.host: member.join.facts for seat, member in self.roster.members()}
        errors = [f"  {host}: {fact.model_error}" for host, fact in facts.items() if fact.model_error]
        if errors:
            raise PreflightError("the model is not on every host:\n" + "\n".join(errors))
        if differences := version_differences({host: fact.versions for host, fact in facts.items()}):
            raise PreflightError(
                f"the hosts have different versions:\n{differences}\nInstall the same ones on all hosts."
            )
        if len({fact.model_digest for fact in facts.values()}) > 1:
            rows = [["", "model digest"], *([host, fact.model_digest[:16]] for host, fact in facts.items())]
            raise PreflightError(
                "the hosts have different models (config.json, index, names and sizes of weight files):\n"
                f"{table(rows)}\nCopy the same model folder to all hosts."
            )

    def _names(self, seats: list[Seat]) -> str:
        """ "rank 1 (host mac2), rank 2 (host mac3)"; with the user's number where it is another one."""
        parts = []
        for seat in seats:
            about = []
            if seat.plan.name or seat.member is not None:
                about.append(f"host {seat.host}")
            if self.mesh.server_rank:
                user_ranks = ((r + self.mesh.server_rank) % self.roster.world_size for r in seat.ranks)
                about.append("RANK=" + ",".join(map(str, user_ranks)))
            ranks = ", ".join(map(str, seat.ranks))
            parts.append(f"rank {ranks} ({', '.join(about)})" if about else f"rank {ranks}")
        return ", ".join(parts)

    async def _inspect(self, model: Path) -> None:
        self._footprint = await inspect_model(self._programs.inspect, model, self.deadlines.spawn_s)
        self._changed.set()

    async def _plan_epoch(self) -> EpochPlan:
        """Placement (once) and addresses. Raises PlacementError or BringUpError."""
        limit_s = self.deadlines.spawn_s + _SLACK_S
        await self.wait(
            lambda: self._footprint is not None,
            self.timer(limit_s),
            lambda: BringUpError(f"the model's sizes are not known after {limit_s:g} s."),
        )
        assert self._footprint is not None
        if self._placement is None:
            self._placement = self._place(self._footprint)
            self._backend = choose_backend(self.mesh.backend, self.roster.world_size)
            self._output.event(PlanChosen(placement=self._placement, backend=self._backend))
        self._addresses = plan_addresses(
            [
                HostLink(
                    host=seat.host,
                    planned=seat.plan.address,
                    joined=member.join.address,
                    addresses=member.join.facts.addresses,
                )
                for seat, member in self.roster.members()
            ]
        )
        is_pipeline = self._placement.sharding is Sharding.PIPELINE
        return EpochPlan(
            epoch=self._epoch + 1,
            placement=self._placement,
            backend=self._backend,
            addresses=self._addresses,
            model=self._config.model,
            max_sequences=self.mesh.max_sequences,
            prefill_step_size=self.mesh.prefill_step_size or (_PIPELINE_PREFILL if is_pipeline else _PREFILL),
            context_length=self._context_length(),
            is_first=not self._was_ready,
        )

    def _place(self, footprint: ModelFootprint) -> Placement:
        hosts = [
            HostCapacity(
                name=seat.host,
                slots=seat.plan.slots,
                usable_memory_bytes=member.join.facts.usable_memory_bytes,
                layers=seat.plan.layers,
                memory_limit_bytes=seat.plan.memory_limit_bytes,
            )
            for seat, member in self.roster.members()
        ]
        request = PlacementRequest(
            sharding=self.mesh.sharding,
            context_tokens=self.mesh.plan_context,
            num_sequences=self.mesh.plan_sequences,
        )
        return plan_placement(footprint, hosts, request)

    def _context_length(self) -> int:
        model = self._footprint.context_length if self._footprint is not None else 0
        return self.mesh.context_length or model

    def _begin_epoch(self, plan: EpochPlan) -> None:
        self._epoch = plan.epoch
        self._ready_at = None
        self._has_completed_step = False
        self.roster.begin_epoch(self._now())
        self._epoch_began_at = self._now()
        self._epoch_is_open = True
        self._desk.pause("loading the model")

    def _open(self) -> None:
        """All ranks are ready."""
        self._ready_at = self._now()
        self._was_ready = True
        num_again = self._desk.open(self._epoch, self._context_length())
        if num_again:
            self._output.note(f"admitted {num_again} open requests again")
        self._output.event(
            MeshReady(
                url=self._url,
                epoch=self._epoch,
                seconds=self.age(self._epoch_began_at if self._num_restarts else self._started_at),
                restarted=self._num_restarts > 0,
            )
        )

    async def _serve(self) -> None:
        """Until the end is asked for; raises _Stopped after the open requests are done or drain_s is over."""
        never: Callable[[], float | None] = lambda: None  # noqa: E731
        await self.wait(lambda: self._stop_reason is not None, never, _no_verdict)
        self._desk.drain()
        self._output.note(f"{self._stop_reason}: {len(self._desk.journal)} open requests may finish")
        with contextlib.suppress(EpochBroken):
            await self.wait(
                lambda: not len(self._desk.journal),
                self.timer(self.deadlines.drain_s),
                lambda: Verdict(None, "", Phase.READY, "drain_s is over"),
            )
        raise _Stopped

    async def _recover(self, verdict: Verdict, budget: RestartBudget) -> RestartBudget:
        """End the broken epoch on all hosts; returns when the next one may begin. Raises MeshError when there
        is none."""
        ready_s = self.age(self._ready_at) if self._ready_at is not None else 0.0
        self._ready_at = None
        budget = budget.epoch_ended(str(verdict), completed_step=self._has_completed_step, ready_s=ready_s)
        is_final = not verdict.retryable or budget.is_exhausted
        self._output.event(EpochEnded(epoch=self._epoch, cause=str(verdict), final=is_final))
        self._desk.pause(f"recovering: {verdict}" if self._was_ready else str(verdict))
        await self._stop_epoch(str(verdict), gently=False)
        if is_final:
            raise self._final_error(verdict, budget)
        if verdict.phase == Phase.CONNECTING:
            self._output.note(
                "a listener left over by another program, or a stray client, may have taken part; trying "
                "again with new engines on new ports"
            )
        self._num_restarts += 1
        self._epoch_cause = str(verdict)
        await self._settle(lambda: self._stop_reason is not None, budget.delay_s)
        return budget

    def _final_error(self, verdict: Verdict, budget: RestartBudget) -> MeshError:
        text = str(verdict)
        if not text.endswith("."):
            text += "."
        if budget.num_failed > 1:
            text += f" That was try {budget.num_failed}"
            first = budget.first_cause
            text += f"; the first ended with: {first}." if first != str(verdict) else "."
        ranks = self.roster.seat_of(verdict.rank).ranks if verdict.rank is not None else ()
        for rank in (verdict.rank,) if verdict.rank is not None else ranks:
            lines = [line for line in self.roster.ranks[rank].last_lines()][-_NUM_LINES:]
            if lines:
                text += f"\nLast lines of rank {rank}:\n  " + "\n  ".join(lines)
        if budget.was_ready:
            return MeshError(f"the mesh cannot go on: {text}")
        return BringUpError(f"the mesh did not come up: {text}")

    async def _stop_epoch(self, reason: str, *, gently: bool) -> None:
        """End the engines on all hosts; those that do not answer are no members any more."""
        self._epoch_is_open = False
        self._expire_members()
        stopping = list(self.roster.members())
        for _, member in stopping:
            self.send(member, StopEpoch(epoch=self._epoch, gently=gently, reason=reason))
        limit_s = self.deadlines.stop_s + _SLACK_S
        await self._settle(
            lambda: all(
                m.lost or seat.member is not m or m.stopped_epoch >= self._epoch for seat, m in stopping
            ),
            limit_s,
        )
        for seat, member in stopping:
            if not member.lost and seat.member is member and member.stopped_epoch < self._epoch:
                member.lost = f"its agent did not end its engines within {limit_s:g} s"

    def _all_exited(self) -> bool:
        return all(record.exit is not None for record in self.roster.ranks)

    # ------------------------------------------------------------ helpers

    async def _receive(self) -> None:
        while True:
            self._hear(*await self._channel.receive())

    async def _watch_clock(self) -> None:
        while True:
            if lag := self._clock.tick(time.monotonic()):
                self._output.note(f"this host did not run for {lag:.1f} s; nobody is blamed for that time")
            if not self._epoch_is_open:
                self._expire_members()
            self._desk.expire()
            self._changed.set()
            await asyncio.sleep(TICK_S)

    async def _watch_links(self) -> None:
        while True:
            await self._channel.link_lost.wait()
            self._channel.link_lost.clear()
            for delay_s in _PROBES_S:
                await asyncio.sleep(delay_s)
                for _, member in list(self.roster.members()):
                    self.send(member, BeatAck(seq=member.last_seq))

    def _expire_members(self) -> None:
        now = self._now()
        for _, member in list(self.roster.members()):
            if now - member.beat_at > self.deadlines.heartbeat_timeout_s:
                limit = self.deadlines.heartbeat_timeout_s
                member.lost = f"no heartbeat of its agent for heartbeat_timeout_s = {limit:g} s"
                self._changed.set()

    def _lost_proxy(self, how: str) -> None:
        self._output.note(f"the HTTP proxy {how}; {len(self._desk.journal)} open requests are lost with it")
        self._desk.lost_proxy()

    # ------------------------------------------------------------ sending

    def send(self, member: Member, message: CoordinatorMessage) -> None:
        """To an agent; one that cannot take it is lost."""
        if not member.lost and not self._channel.send(member.peer, message):
            member.lost = "the connection to its agent ended"
            self._changed.set()

    def command(self, rank: int, command: EngineCommand) -> None:
        """To the engine of a rank."""
        member = self.roster.seat_of(rank).member
        if member is not None:
            self.send(member, ToEngine(epoch=self._epoch, rank=rank, command=command))

    def enter(self, phase: Phase) -> None:
        now = self._now()
        for record in self.roster.ranks:
            record.enter(phase, now)
            self._show(record.rank)

    # ------------------------------------------------------------ hearing

    def _hear(self, peer: bytes, message: AgentMessage) -> None:
        if isinstance(message, Join):
            self._admit(peer, message)
            self._changed.set()
            return
        found = self.roster.find(peer)
        if found is None:
            self.num_rejected_messages += 1
            if isinstance(message, AgentBeat):
                self._channel.send(peer, JoinAgain(reason="no heartbeat arrived for too long"))
            return
        seat, member = found
        match message:
            case AgentBeat():
                self.roster.note_agent_beat(seat, member, message.seq, self._now())
                self.send(member, BeatAck(seq=message.seq))
                return
            case Leaving():
                member.lost = f"it left: {message.reason}"
            case PortsReserved():
                if message.epoch == self._epoch:
                    member.ports = message
            case EpochStopped():
                member.stopped_epoch = max(member.stopped_epoch, message.epoch)
            case RankStarted() | RankReport() | RankExited() | RankLog():
                if message.rank not in seat.ranks:
                    self.num_rejected_messages += 1
                    return
                if not self._hear_rank(message):
                    return
        self._changed.set()

    def _hear_rank(self, message: RankStarted | RankReport | RankExited | RankLog) -> bool:
        """Returns whether the main flow must look at it."""
        if isinstance(message, RankLog):
            self._log(message.rank, message.line)
            return False
        if message.epoch != self._epoch:
            self.num_rejected_messages += 1
            return False
        record = self.roster.ranks[message.rank]
        match message:
            case RankStarted():
                record.pid = message.pid
            case RankExited():
                record.exit = message
            case RankReport():
                return self._epoch_is_open and self._hear_engine(message.rank, message.report)
        return True

    def _hear_engine(self, rank: int, report: EngineReport) -> bool:
        match report:
            case Tokens():
                if rank == 0 and self._ready_at is not None and self._desk.take(report.chunks):
                    self._has_completed_step = True
                return self._stop_reason is not None
            case RequestFailed():
                if rank == 0 and self._ready_at is not None:
                    self._desk.take_failure(report)
                return self._stop_reason is not None
        self.roster.ranks[rank].take(report, self._now())
        if isinstance(report, PhaseReached | Progress | EngineFailed):
            self._show(rank)
        return isinstance(report, PhaseReached | EngineFailed) or self._ready_at is None

    def _admit(self, peer: bytes, join: Join) -> None:
        seat = self.roster.choose_seat(join)
        if isinstance(seat, str):
            self._refuse(peer, seat)
            return
        old = seat.member
        if old is not None and not old.lost and old.peer != peer:
            self.send(old, BeatAck(seq=old.last_seq))  # is it really there?
            if not old.lost and self.age(old.beat_at) < 2 * self.deadlines.heartbeat_interval_s:
                self._refuse(
                    peer,
                    f"host {join.host} is in mesh {self.mesh.name} already, with agent pid "
                    f"{old.join.agent_pid} of {old.join.facts.hostname}. Stop that one first, or correct "
                    "the rank.",
                )
                return
        seat.member = Member(peer=peer, join=join, beat_at=self._now())
        if old is not None and self._epoch_is_open:
            seat.member.broke_epoch = "its agent lost the connection and joined again"
        self.send(
            seat.member,
            Welcome(ranks=seat.ranks, world_size=self.roster.world_size, deadlines=self.deadlines),
        )
        self._output.note(
            f"host {seat.host} joined from {join.address or 'this process'} (agent pid {join.agent_pid})"
        )

    def _refuse(self, peer: bytes, reason: str) -> None:
        self.roster.refusals.append(reason)
        self._output.note(f"refused an agent: {reason}")
        self._channel.send(peer, Refused(reason=reason))

    def _log(self, rank: int, line: str) -> None:
        host = self.roster.host_of(rank)
        self.roster.ranks[rank].lines.append(line)
        self._logs.write(rank, host, line)
        self._output.event(LogLine(rank=rank, host=host, line=line))

    def _show(self, rank: int) -> None:
        """The launcher's progress line of a rank."""
        record = self.roster.ranks[rank]
        is_loading = record.phase is Phase.LOADING and record.progress is not None
        self._output.event(
            RankProgress(
                rank=rank,
                host=self.roster.host_of(rank),
                phase=Phase.FAILED if record.failure is not None else record.phase,
                done=record.progress.done if is_loading and record.progress else 0,
                total=record.progress.total if is_loading and record.progress else 0,
                detail=record.failure.message if record.failure is not None else "",
            )
        )

    # ------------------------------------------------------------ telling

    def status(self) -> MeshStatus:
        """From heartbeats only."""
        now = self._now()
        leader = self.roster.ranks[0]
        return MeshStatus(
            name=self.mesh.name,
            model=self._model_id(),
            world_size=self.roster.world_size,
            sharding=self._placement.sharding if self._placement else self.mesh.sharding,
            backend=self._backend,
            epoch=self._epoch,
            epoch_cause=self._epoch_cause,
            ready=self._desk.is_ready,
            reason=self._desk.readiness.reason,
            placement=self._placement,
            ranks=rank_rows(self.roster, self._placement, self._addresses, self._epoch, now),
            num_running=leader.beat.num_sequences if leader.beat else 0,
            num_waiting=leader.beat.num_waiting if leader.beat else 0,
            num_open=len(self._desk.journal),
            uptime_s=round(now - self._started_at, 3),
            versions=leader.hello.versions if leader.hello else None,
            context_length=self._context_length(),
            restarts=self._num_restarts,
        )

    def _model_id(self) -> str:
        """The id in answers: a hub id as it is, of a folder its name."""
        if self.mesh.served_model_names:
            return self.mesh.served_model_names[0]
        given = Path(self._config.model).expanduser()
        return given.resolve().name if given.is_dir() else self._config.model

    def _proxy_config(self) -> ProxyConfig:
        return ProxyConfig(
            model=str(self._model or self._config.model),
            model_id=self._model_id(),
            served_model_names=self.mesh.served_model_names,
            serve_host=self.mesh.serve_host,
            serve_port=self.mesh.serve_port,
            listen_fd=-1,
            api_keys=self.mesh.api_keys,
            chat_template=self.mesh.chat_template,
            version=metadata.version("mlx-mesh"),
        )


def _no_verdict() -> Verdict:
    raise AssertionError("a wait without a limit is never late")
