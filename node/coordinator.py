"""The leader's side of a mesh: who is in, one epoch after the other, and an end that leaves nothing behind.

One flow of control (`run`) goes through the life of the mesh and waits at named barriers; helper tasks
(`switchboard`) only note what they hear in the books (`roster`) and wake it. Blame is `mesh.membership`'s,
bring-up is `bring_up`'s, requests are `desk`'s.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from mlx_mesh.mesh.capacity import usable_context
from mlx_mesh.mesh.errors import BringUpError, ExitCode, MeshError, PlacementError, PreflightError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.kv_budget import KvBudget, kv_budget
from mlx_mesh.mesh.kv_options import with_kv_options
from mlx_mesh.mesh.membership import ObservedClock, RestartBudget, Verdict, VerdictKind, judge
from mlx_mesh.mesh.messages import (
    AgentConfig,
    ChangeNode,
    CoordinatorMessage,
    EngineCommand,
    EpochEnded,
    MeshDown,
    MeshReady,
    MeshStatus,
    Metric,
    NodeReply,
    PlanChosen,
    ProxyConfig,
    ProxyEvent,
    Shutdown,
    StopEngine,
    StopEpoch,
    SwitchModel,
    UnloadModel,
)
from mlx_mesh.mesh.rdma import BackendChoice
from mlx_mesh.mesh.survivors import Serve, StayDown
from mlx_mesh.mesh.topology import AddressPlan
from mlx_mesh.mesh.types import Backend, Phase, Placement, Sharding, VisionMode
from mlx_mesh.node.bring_up import EpochPlan, bring_up
from mlx_mesh.node.channel import AgentsChannel
from mlx_mesh.node.counters import ChannelCounters, MeshCounters, metrics_of
from mlx_mesh.node.desk import RETRY_AFTER_S, Desk
from mlx_mesh.node.facts import digest_with_revision, resolve_model
from mlx_mesh.node.gathering import (
    backend_of,
    compare_hosts,
    place_model,
    plan_links,
    seat_names,
    who_is_missing,
)
from mlx_mesh.node.inspection import Inspector
from mlx_mesh.node.lineup import Lineup
from mlx_mesh.node.logs import RankLogs
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Member, Roster
from mlx_mesh.node.stacks import where_it_stood, without_stacks
from mlx_mesh.node.status import rank_rows
from mlx_mesh.node.switchboard import Switchboard
from mlx_mesh.node.switching import Served, Switch, refusal
from mlx_mesh.node.tokenizer_files import tokenizer_problem

TICK_S = 0.25
_GOODBYE_S = 3.0
"""Agents whose engines are gone have this to say goodbye, before the coordinator's port closes."""

HOW_TO_LOAD = "POST /v1/models/load or `mlx-mesh model load` brings it back."

REST_S = 60.0
"""A replica that failed too often is tried again after so long, while others serve."""

_SLACK_S = 3.0
_NUM_LINES = 15
_PIPELINE_PREFILL = 512  # chunks small enough that all stages work on one prompt
_PREFILL = 2048  # mlx-lm's default


class FrontEnd(Protocol):
    """The proxy as a coordinator sees it, which may be one of several behind it."""

    @property
    def is_ready(self) -> bool: ...
    def send(self, event: ProxyEvent) -> None: ...
    async def replace(self, config: ProxyConfig, stop_s: float) -> None: ...

    def rescue(self) -> int:
        """Let other replicas go on with the open requests that no engine has; returns how many went."""
        ...

    def others_serve(self) -> bool:
        """Some other replica serves, or will soon."""
        ...


class EpochBroken(Exception):
    """This epoch cannot go on; the verdict says whether another one may be tried."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class _LeaveEpoch(Exception):
    """Nothing is wrong; other hosts shall serve. The message says why."""


class _SwitchModel(Exception):
    """Another model shall be served; `Coordinator._switch` has it."""


class _Stopped(Exception):
    """Somebody asked for the end."""


class Coordinator:
    """Runs one mesh. `run` once; `stop` from anywhere in the same loop."""

    def __init__(
        self,
        config: AgentConfig,
        channel: AgentsChannel,
        *,
        local_peer: bytes,
        model: Path | None,
        inspector: Inspector,
        front: FrontEnd,
        url: str,
        output: Output,
        logs: RankLogs,
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
        self._inspector = inspector
        self._url = url
        self._output = output
        self._clock = ObservedClock(time.monotonic(), TICK_S)
        self._started_at = self._now()
        self._changed = asyncio.Event()
        self._helpers: list[asyncio.Task[Any]] = []
        self._helper_error: BaseException | None = None
        self._stop_reason: str | None = None
        self._stop_code = ExitCode.OK
        self._is_hurried = False
        self._footprint: ModelFootprint | None = None
        self._placement: Placement | None = None
        self._backend = BackendChoice(backend=Backend.AUTO, reason="")
        self._addresses = AddressPlan()
        self._served_name = self._config.model
        self._served_digest = ""
        self._switch: Switch | None = None
        self._is_switching = False
        self._is_unloaded = self._must_unload = self._must_load = False
        self._front_refusal = ""  # why the front end cannot serve the model that was switched to
        self._told_of_switch = ""
        self._next_cause = "start"
        self._was_ready = False
        self._num_restarts = 0
        self._counters = MeshCounters()
        self._broke_at: float | None = None
        self._front = front
        self.desk = self._desk = Desk(
            send=front.send,
            command=lambda command: self.command(0, command),
            now=self._now,
            world_size=self.roster.world_size,
            max_open=self.mesh.max_sequences + self.mesh.max_queue,
            request_s=self.deadlines.request_s,
            pressure=self.roster.pressure,
        )
        self._lineup = Lineup(self.roster, self.deadlines, place=self._place, now=self._now)
        self._switchboard = Switchboard(
            channel,
            self.roster,
            self._desk,
            deadlines=self.deadlines,
            output=output,
            logs=logs,
            now=self._now,
            changed=self._changed,
        )

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Until it is stopped (returns) or cannot go on (raises MeshError). Nothing of the mesh is left on
        any host that answers, and the open requests have their answer."""
        self._startup()
        reason, exit_code = "the coordinator was cancelled", ExitCode.FAILED
        try:
            await self._main_loop()
        except _Stopped:
            reason, exit_code = self._stop_reason or "stopped", self._stop_code
        except MeshError as error:
            reason, exit_code = f"the mesh failed: {error}", error.exit_code
            raise
        except Exception as error:
            reason = f"the coordinator failed: {error}"
            raise
        finally:
            await self._shutdown(reason, exit_code)

    def stop(self, reason: str, *, hurry: bool, is_failure: bool = False) -> None:
        """Ask for the end: open requests may finish within drain_s, or not at all when in a hurry.
        `is_failure`: it is no wish of the user's, and clients are told so."""
        self._stop_code = ExitCode.FAILED if is_failure else self._stop_code
        self._stop_reason = self._stop_reason or reason
        self._is_hurried = self._is_hurried or hurry
        self._changed.set()

    def _startup(self) -> None:
        self._help(self._switchboard.receive(), "coordinator receiver")
        self._help(self._switchboard.watch_links(), "coordinator links")
        self._help(self._watch_clock(), "coordinator clock")
        if self._model is not None:
            self._help(self._inspect(self._model), "model sizes")

    def _help(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._helper_done)
        self._helpers.append(task)

    def _helper_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """Something that the mesh cannot do without ended with this."""
        self._helper_error = self._helper_error or error
        self._changed.set()

    def take_front_failure(self, error: str) -> bool:
        """The front end cannot serve its model. True when that is one that was just switched to: the old one
        comes back, for which another front end is to be started."""
        if self._switch is None or not self._switch.has_begun:
            return False
        self._front_refusal = error
        self._changed.set()
        return True

    async def _main_loop(self) -> None:
        budget = RestartBudget(self.mesh.max_restarts)
        while True:
            try:
                if self._must_unload:
                    await self._unload()
                await self._gather()
                plan = await self._plan_epoch()
                self._begin_epoch()
                await bring_up(self, plan)
                await self._wait_for_front()
                self._open()
                await self._serve()
            except EpochBroken as broken:
                budget = await self._recover(broken.verdict, budget)
            except _LeaveEpoch as leave:
                await self._leave_epoch(str(leave))
            except _SwitchModel:
                try:
                    await self._begin_switch()
                except EpochBroken as broken:  # before it began: the old model goes on, and its requests
                    budget = await self._recover(broken.verdict, budget)

    async def _shutdown(self, reason: str, exit_code: ExitCode) -> None:
        self._desk.drain()
        self._desk.pause(reason)
        if exit_code is ExitCode.OK:
            self._desk.fail_all("draining", f"The mesh was stopped: {reason}.", RETRY_AFTER_S)
        else:
            self._desk.fail_all("mesh_failed", f"The mesh ended: {reason}")
        is_gentle = exit_code is ExitCode.OK and not self._is_hurried
        if is_gentle and self.roster.epoch.is_open and self._is_ready:
            self.command(0, StopEngine())
            await self._settle(self._all_exited, self.deadlines.stop_s)
        await self._stop_epoch(reason, gently=is_gentle)
        others = [m for _, m in self.roster.members() if m.peer != self._local_peer]
        for member in others:
            self.send(member, Shutdown(reason=reason, exit_code=exit_code))
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
        if self._front_refusal:
            refusal, self._front_refusal = self._front_refusal, ""
            raise EpochBroken(Verdict(None, self.roster.host_of(0), Phase.LOADING, refusal, retryable=False))
        if self._stop_reason is not None and (self._is_hurried or not self._is_ready):
            raise _Stopped
        if self.roster.epoch.is_open:
            now = self._now()
            verdict = judge(
                self.roster.rank_views(now),
                self.roster.agent_views(now),
                self.deadlines,
                self._desk.owed_s,
            )
            verdict = verdict or self._divergence()
            if verdict is not None:
                raise EpochBroken(verdict)

    def _divergence(self) -> Verdict | None:
        found = self.roster.epoch.divergence
        if found is None:
            return None
        record = self.roster.ranks[found.odd]
        return Verdict(
            found.odd, self.roster.host_of(found.odd), record.phase, str(found), kind=VerdictKind.DIVERGED
        )

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
        """Until it is decided who takes part, and these are there with the same versions and model. At first
        all hosts must come."""
        if self._was_ready:
            await self._assemble()
            return
        limit_s = self.deadlines.join_s
        if missing := self.roster.missing():
            self._desk.pause(f"waiting for {seat_names(self.roster, missing)}")
        await self.wait(
            lambda: not self.roster.missing(),
            self.timer(limit_s),
            lambda: BringUpError(
                who_is_missing(
                    self.roster,
                    limit_s,
                    "join_s",
                    self._channel.endpoint,
                    self._channel.num_failed_handshakes,
                )
            ),
        )
        compare_hosts(self.roster)

    async def _assemble(self) -> None:
        """Of a mesh that was ready: wait for those who may come back, then go on with who is there; or wait,
        down, until the model fits."""
        is_down = False
        while True:
            self._check()
            decision = self._lineup.decide()
            if isinstance(decision, Serve):
                break
            words = self._lineup.describe_wait(decision)
            if isinstance(decision, StayDown) and not is_down:
                is_down = True
                self._output.event(MeshDown(reason=words))
                self._front.rescue()
                self._desk.go_down(words)
            self._desk.pause(words)
            await self._pause(TICK_S)
        changed = self._lineup.settle(decision)
        if changed:
            self._next_cause = "; ".join(filter(None, (self._next_cause, changed)))
            self._output.note(
                f"going on with {len(decision.hosts)} of {len(self.roster.seats)} hosts: {changed}"
            )
        if changed or self._placement is None:
            placement = self._place(decision.hosts)
            self.roster.place(decision.hosts)
            self._set_placement(placement)

    async def _inspect(self, model: Path) -> None:
        self._footprint = await self._sizes_of(model, self._config.adapter, self.mesh.vision)
        if not self._footprint.media and (why := self._footprint.media_refusals.get("image")):
            self._output.note(f"prompts hold text only: {why}")
        if self._footprint.alone_reason:
            self._output.note(f"one sequence at a time: {self._footprint.alone_reason}")
        if self._footprint.whole_reason:
            self._output.note(f"each prompt is read in one piece: {self._footprint.whole_reason}")
        self._changed.set()

    async def _sizes_of(
        self, model: Path, adapter: str, vision: VisionMode = VisionMode.AUTO
    ) -> ModelFootprint:
        """With caches as this mesh keeps them. Raises PlacementError."""
        folder = Path(adapter) if adapter else None
        found = await self._inspector.sizes_of(model, self.deadlines.spawn_s, folder, vision)
        return with_kv_options(found, self.mesh.kv_options)

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
            self._set_placement(self._place(tuple(range(len(self.roster.seats)))))
        assert self._placement is not None
        self._addresses = plan_links(self.roster, self._backend.backend)
        is_pipeline = self._placement.sharding is Sharding.PIPELINE
        return EpochPlan(
            epoch=self.roster.epoch.number + 1,
            placement=self._placement,
            backend=self._backend.backend,
            rdma=self._backend.devices,
            addresses=self._addresses,
            model=self._served_name,
            is_switched=self._served_name != self._config.model,
            model_digest=self._served_digest,
            max_sequences=1 if self._footprint.alone_reason else self.mesh.max_sequences,
            prefill_step_size=self.mesh.prefill_step_size or (_PIPELINE_PREFILL if is_pipeline else _PREFILL),
            context_length=self._context_length(),
            kv=self._kv_budget(),
            prefix=self.mesh.prefix,
            kv_options=self.mesh.kv_options,
            with_vision=bool(self._footprint.media),
            is_first=not self._was_ready,
            is_paranoid=self.mesh.paranoid,
        )

    def _place(self, hosts: tuple[int, ...]) -> Placement:
        assert self._footprint is not None
        return place_model(self.roster, self._footprint, hosts)

    def _set_placement(self, placement: Placement) -> None:
        self._placement = placement
        self._backend = backend_of(self.roster)
        self._output.event(
            PlanChosen(
                placement=placement, backend=self._backend.backend, backend_reason=self._backend.reason
            )
        )

    def _context_length(self) -> int:
        own = self._footprint.context_length if self._footprint is not None else 0
        return usable_context(self.mesh.context_length, own)

    def _kv_budget(self) -> KvBudget:
        if self._footprint is None or self._placement is None:
            return KvBudget()
        return kv_budget(self._footprint, self._placement)

    @property
    def _is_ready(self) -> bool:
        return self.roster.epoch.ready_at is not None

    def _begin_epoch(self) -> None:
        self.roster.begin_epoch(self._next_cause or "planned anew", self._now())
        self._counters.num_epochs += 1
        self._desk.pause("loading the model")

    def _open(self) -> None:
        """All ranks are ready."""
        epoch = self.roster.epoch
        epoch.ready_at = self._now()
        self._was_ready = True
        self._lineup.note_ready()
        self._end_switch()
        self._counters.note_ready(
            self.age(epoch.began_at), None if self._broke_at is None else self.age(self._broke_at)
        )
        lineup = self._lineup.describe()
        if lineup:
            self._output.note(lineup)
        num_again = self._desk.open(
            epoch.number,
            self._context_length(),
            self._kv_budget(),
            world_size=self.roster.world_size,
            lineup=lineup,
            media=self._footprint.media if self._footprint is not None else (),
            media_refusals=self._footprint.media_refusals if self._footprint is not None else {},
            alone_reason=self._footprint.alone_reason if self._footprint is not None else "",
            whole_reason=self._footprint.whole_reason if self._footprint is not None else "",
        )
        if num_again:
            self._output.note(f"admitted {num_again} open requests again")
        self._output.event(
            MeshReady(
                url=self._url,
                epoch=epoch.number,
                seconds=self.age(epoch.began_at if epoch.number > 1 else self._started_at),
                restarted=epoch.number > 1,
                world_size=self.roster.world_size,
                lineup=lineup,
            )
        )

    async def _serve(self) -> None:
        """Until the end is asked for; raises _Stopped after the open requests are done or drain_s is over,
        and _LeaveEpoch when other hosts shall serve."""
        never: Callable[[], float | None] = lambda: None  # noqa: E731
        other_hosts = ""

        def must_look() -> bool:
            nonlocal other_hosts
            other_hosts = self._lineup.wants()
            is_asked = self._switch is not None or self._must_unload
            return self._stop_reason is not None or bool(other_hosts) or is_asked

        await self.wait(must_look, never, _no_verdict)
        if self._stop_reason is None and other_hosts:
            raise _LeaveEpoch(other_hosts)
        if self._stop_reason is None and self._must_unload:
            await self._unload()
            return
        if self._stop_reason is None:
            raise _SwitchModel
        self._desk.drain()
        if count := len(self._desk.journal):
            limit_s = self.deadlines.drain_s
            self._output.note(
                f"{self._stop_reason}: {count} open request{'s' if count > 1 else ''} may finish within "
                f"{limit_s:g} s (drain_s)"
            )
        with contextlib.suppress(EpochBroken):
            await self.wait(
                lambda: not len(self._desk.journal),
                self.timer(self.deadlines.drain_s),
                lambda: Verdict(None, "", Phase.READY, "drain_s is over"),
            )
        raise _Stopped

    async def _leave_epoch(self, why: str) -> None:
        """End an epoch with which nothing is wrong. Open requests go on in the next one."""
        epoch = self.roster.epoch
        epoch.ready_at = None
        self._broke_at = self._now()
        self._desk.epoch_left()
        self._output.event(EpochEnded(epoch=epoch.number, cause=why, final=False))
        self._desk.pause(f"planning anew: {why}")
        self._front.rescue()
        await self._stop_epoch(why, gently=False)
        self._next_cause = ""  # what changes then will be the cause

    async def _recover(self, verdict: Verdict, budget: RestartBudget) -> RestartBudget:
        """End the broken epoch on all hosts; returns when the next one may begin. Raises MeshError when there
        is none."""
        epoch = self.roster.epoch
        ready_s = self.age(epoch.ready_at) if epoch.ready_at is not None else 0.0
        epoch.ready_at = None
        self._broke_at = self._now()
        self._count(verdict)
        num_convicted = self._desk.epoch_ended(by_itself=verdict.by_itself, was_killed=verdict.was_killed)
        self._counters.num_convicted += num_convicted
        # An epoch that a request is to blame for says nothing about the mesh, nor does a host that went away
        # from one that was ready: the others can go on without it.
        is_elsewhere = num_convicted > 0 or (verdict.rank is None and ready_s > 0)
        budget = budget.epoch_ended(
            str(verdict), completed_step=epoch.has_completed_step or is_elsewhere, ready_s=ready_s
        )
        if self._switch is not None and self._switch.has_begun and not ready_s:
            return await self._give_up_switch(verdict)
        is_final = not verdict.retryable or budget.is_exhausted
        if is_final and self._was_ready and self._give_up_one_of(verdict):
            is_final, budget = False, RestartBudget(self.mesh.max_restarts, was_ready=True)
        must_rest = is_final and self._was_ready and self._front.others_serve()
        is_final = is_final and not must_rest
        self._output.event(EpochEnded(epoch=epoch.number, cause=str(verdict), final=is_final))
        self._desk.pause(f"recovering: {verdict}" if self._was_ready else str(verdict))
        self._front.rescue()
        await self._stop_epoch(str(verdict), gently=False, dump=verdict.wants_stacks)
        if must_rest:
            return await self._rest(verdict)
        if is_final:
            raise self._final_error(verdict, budget)
        if verdict.phase == Phase.CONNECTING:
            self._output.note(
                "a listener left over by another program, or a stray client, may have taken part; trying "
                "again with new engines on new ports"
            )
        self._num_restarts += 1
        self._next_cause = str(verdict) + self._stacks()
        await self._settle(lambda: self._stop_reason is not None, budget.delay_s)
        return budget

    async def _rest(self, verdict: Verdict) -> RestartBudget:
        """This replica cannot go on now, and others serve: the mesh does not end. It is tried again later."""
        words = f"down: {verdict}. It is tried again every {REST_S:g} s while other replicas serve."
        self._output.event(MeshDown(reason=words))
        self._desk.go_down(words)
        self._next_cause = f"tried again after: {verdict}"
        await self._settle(
            lambda: self._stop_reason is not None or not self._front.others_serve(),
            REST_S,
        )
        return RestartBudget(self.mesh.max_restarts, was_ready=True)

    # ------------------------------------------------------------ another model

    def order_switch(self, request: SwitchModel) -> None:
        """Answers at once when it is refused, else when the new model is planned."""
        served, epoch = self._served_name, self.roster.epoch.number
        code, words = refusal(request.model, self._config.model, self.mesh.allowed_models, self._is_switching)
        if (not code and not (self._desk.is_ready or self._is_unloaded)) or self._must_unload:
            code, words = "not_ready", f"The mesh is not ready: {self._desk.readiness.reason}."
        if code or request.model == served:
            words = words or f"{served} is served."
            self._front.send(NodeReply(id=request.id, error=code, message=words, epoch=epoch))
            return
        self._is_switching = True
        self._help(self._prepare_switch(request), "switch of models")

    async def _prepare_switch(self, request: SwitchModel) -> None:
        """Plan the new model beside the old one, which serves on."""
        assert self._footprint is not None and self._model is not None
        epoch = self.roster.epoch.number
        was_first = self._served_name == self._config.model
        old = Served(
            self._served_name,
            self._model,
            self._footprint,
            self._placement,
            self._served_digest,
            is_first=was_first,
        )
        try:
            folder = await asyncio.to_thread(resolve_model, request.model)
            if problem := await asyncio.to_thread(tokenizer_problem, folder):
                raise PreflightError(problem)
            is_first = request.model == self._config.model
            digest = "" if is_first else await asyncio.to_thread(digest_with_revision, folder)
            footprint = await (
                self._sizes_of(folder, self._config.adapter, self.mesh.vision)
                if is_first
                else self._sizes_of(folder, "")
            )
            is_there = self._desk.is_ready or (self._is_unloaded and not self._must_load)
            if not is_there or self.roster.epoch.number != epoch:
                raise BringUpError("the mesh began anew meanwhile; ask again when it is ready")
            placement = place_model(self.roster, footprint, [seat.index for seat, _ in self.roster.placed()])
        except (MeshError, OSError) as error:
            self._is_switching = False
            known = {PlacementError: "model_does_not_fit", BringUpError: "not_ready"}
            code = known.get(type(error), "model_unusable")
            self._front.send(NodeReply(id=request.id, error=code, message=str(error), epoch=epoch))
            return
        new = Served(request.model, folder, footprint, placement, digest, is_first=is_first)
        self._switch = Switch(new, old)
        message = f"{request.model} is loaded in place of {old.name}; /ready says when it serves."
        self._front.send(NodeReply(id=request.id, message=message, epoch=epoch, is_changing=True))
        self._changed.set()

    async def _wait_for_front(self) -> None:
        """After a switch: a model is served once there is a front end that can put its text into tokens."""
        if self._switch is None or not self._switch.has_begun:
            return
        limit_s = self.deadlines.spawn_s + _SLACK_S
        late = Verdict(
            None,
            self.roster.host_of(0),
            Phase.READY,
            f"its front end is not there after {limit_s:g} s (spawn_s)",
        )
        await self.wait(lambda: self._front.is_ready, self.timer(limit_s), lambda: late)

    async def _begin_switch(self) -> None:
        """Let open requests finish, then end the epoch of the old model. Raises EpochBroken when that breaks
        meanwhile: then nothing is switched."""
        assert self._switch is not None
        switch = self._switch
        why = f"switching from {switch.old.name} to {switch.new.name}"
        self._output.note(why)
        self._desk.close("switching_model", f"The mesh is {why}. Try again later.")
        await self._let_finish()
        self._desk.fail_all("switching_model", f"The mesh is {why}.", RETRY_AFTER_S)
        switch.has_begun = True
        await self._leave_epoch(why)
        await self._serve_instead(switch.new, why)

    async def _let_finish(self) -> None:
        """Wait for open requests, as long as drain_s. Raises EpochBroken when the epoch breaks meanwhile."""
        over = Verdict(None, "", Phase.READY, "drain_s is over")
        try:
            await self.wait(
                lambda: not len(self._desk.journal), self.timer(self.deadlines.drain_s), lambda: over
            )
        except EpochBroken as broken:
            if broken.verdict is not over:
                raise

    # ------------------------------------------------------------ no model

    def order_unload(self, request: UnloadModel) -> NodeReply:
        """End the engines, and begin none until somebody asks for a model again."""
        epoch, name = self.roster.epoch.number, self._model_id()
        error, is_changing = "", False
        if self._is_unloaded or self._must_unload:
            words = f"{name} is not loaded, or will not be for long."
        elif self._is_switching:
            error, words = "switch_in_progress", "Another model is being loaded; ask again when it is there."
        elif not self._was_ready:
            error, words = "not_ready", f"The mesh is not ready: {self._desk.readiness.reason}."
        else:
            is_changing = self._must_unload = True
            words = f"{name} is unloaded when open requests are done. {HOW_TO_LOAD}"
            self._desk.close("model_unloaded", f"{name} is being unloaded. {HOW_TO_LOAD}")
            self._changed.set()
        return NodeReply(id=request.id, message=words, epoch=epoch, error=error, is_changing=is_changing)

    def order_load(self, request: SwitchModel) -> NodeReply | None:
        """Load the model that was unloaded; None when another one is asked for."""
        epoch, name = self.roster.epoch.number, self._model_id()
        if request.model not in ("", "local", "default", name, self._served_name):
            return None
        if self._is_unloaded and not self._must_load:
            self._must_load = True
            self._changed.set()
            words = f"{name} is loaded again; /ready says when it serves."
            return NodeReply(id=request.id, message=words, epoch=epoch, is_changing=True)
        if self._must_unload:
            return NodeReply(
                id=request.id,
                error="switch_in_progress",
                message=f"{name} is being unloaded; ask again when that is done.",
                epoch=epoch,
            )
        if self._is_unloaded or not self._is_switching:
            words = "is being loaded" if self._is_unloaded else "is served"
            return NodeReply(id=request.id, message=f"{name} {words}.", epoch=epoch)
        return None

    async def _unload(self) -> None:
        """Let open requests finish, end the epoch, and wait until a model is wanted. Raises EpochBroken when
        the epoch breaks meanwhile."""
        why = f"{self._model_id()} was unloaded by a request"
        if self._is_ready:
            await self._let_finish()
            self._desk.fail_all("model_unloaded", f"{why}. {HOW_TO_LOAD}")
            await self._leave_epoch(why)
        self._desk.fail_all("model_unloaded", f"{why}. {HOW_TO_LOAD}")
        self._is_unloaded, self._must_unload = True, False
        self._desk.close("model_unloaded", f"{why}. {HOW_TO_LOAD}")
        self._desk.pause(f"{why}. {HOW_TO_LOAD}", "model_unloaded")
        self._output.event(MeshDown(reason=f"without a model: {why}"))
        await self.wait(lambda: self._must_load or self._switch is not None, lambda: None, _no_verdict)
        self._next_cause = "the model was asked for again"
        self._broke_at = None  # nobody waited for it
        if self._switch is not None:
            self._switch.has_begun = True
            await self._serve_instead(self._switch.new, f"{self._switch.new.name} was asked for")
        self._is_unloaded = self._must_load = False
        self._desk.reopen()
        self._desk.pause("loading the model")

    async def _serve_instead(self, served: Served, why: str) -> None:
        """From the next epoch on; the proxy that knows this model's text begins at once."""
        self._served_name, self._model, self._footprint = served.name, served.folder, served.footprint
        self._served_digest = served.digest
        self._next_cause = why
        seated = [self.roster.host_of(rank) for rank in range(self.roster.world_size)]
        if served.placement is not None and [one.host for one in served.placement.shards] == seated:
            self._set_placement(served.placement)
        else:  # hosts came or went: it is planned for those that are there
            self._placement = None
        await self._front.replace(self.proxy_config(), self.deadlines.stop_s)

    async def _give_up_switch(self, verdict: Verdict) -> RestartBudget:
        """The new model did not come up: the old one comes back, with a full budget."""
        assert self._switch is not None
        switch = self._switch
        why = f"{switch.new.name} did not come up ({verdict}); {switch.old.name} comes back"
        self._output.event(EpochEnded(epoch=self.roster.epoch.number, cause=why, final=False))
        self._desk.pause(why)
        await self._stop_epoch(why, gently=False)
        self._told_of_switch, self._switch = why, None
        await self._serve_instead(switch.old, why)
        return RestartBudget(self.mesh.max_restarts, was_ready=True)

    def _end_switch(self) -> None:
        """An epoch is ready: of the new model, or of the old one again."""
        switch, self._switch = self._switch, None
        if switch is not None and switch.has_begun:
            self._told_of_switch = f"{switch.new.name} is served"
        elif switch is not None:  # it was planned for ranks that may be others now
            self._told_of_switch = f"{switch.new.name} is not loaded: the mesh began anew before; ask again"
        if (
            self._must_unload or self._desk.reopen() or switch is not None
        ):  # it is closed for that, and stays so
            self._is_switching = False

    def _give_up_one_of(self, verdict: Verdict) -> bool:
        """Go on without the likeliest suspect that the mesh can do without; False when there is none."""
        return any(self._lineup.give_up(host, str(verdict)) for host in verdict.suspects)

    def _count(self, verdict: Verdict) -> None:
        who = f"host {verdict.host}" if verdict.rank is None else f"rank {verdict.rank}"
        self._counters.verdicts[verdict.kind, str(verdict.phase), who] += 1
        self._counters.silent_s += verdict.silent_s
        self._counters.num_divergences += verdict.kind is VerdictKind.DIVERGED

    def _stacks(self) -> str:
        """Where the engines of the epoch that was just ended stood, as far as they said so."""
        stood = [(record.rank, where_it_stood(tuple(record.lines))) for record in self.roster.ranks]
        return "".join(f"; rank {rank} stood in {where}" for rank, where in stood if where)

    def _final_error(self, verdict: Verdict, budget: RestartBudget) -> MeshError:
        text = str(verdict)
        if not text.endswith("."):
            text += "."
        if budget.num_failed > 1:
            text += f" That was try {budget.num_failed}"
            first = budget.first_cause
            text += f"; the first ended with: {first}." if first != str(verdict) else "."
        guilty = [
            record
            for record in self.roster.ranks
            if record.rank == verdict.rank
            or (verdict.rank is None and self.roster.host_of(record.rank) == verdict.host)
        ]
        for record in guilty:
            lines = without_stacks(record.last_lines())[-_NUM_LINES:]
            if where := where_it_stood(record.last_lines()):
                lines.append(f"it stood in {where}")
            if lines:
                text += f"\nLast lines of rank {record.rank}:\n  " + "\n  ".join(lines)
        if budget.was_ready:
            return MeshError(f"the mesh cannot go on: {text}")
        return BringUpError(f"the mesh did not come up: {text}")

    async def _stop_epoch(self, reason: str, *, gently: bool, dump: bool = False) -> None:
        """End the engines on all hosts; those that do not answer are no members any more."""
        number = self.roster.epoch.number
        self.roster.epoch.is_open = False
        self._switchboard.expire_members()
        stopping = list(self.roster.placed())
        for _, member in stopping:
            self.send(member, StopEpoch(epoch=number, gently=gently, reason=reason, dump=dump))
        limit_s = self.deadlines.stop_s + _SLACK_S
        await self._settle(
            lambda: all(m.lost or seat.member is not m or m.stopped_epoch >= number for seat, m in stopping),
            limit_s,
        )
        for seat, member in stopping:
            if not member.lost and seat.member is member and member.stopped_epoch < number:
                member.lost = f"its agent did not end its engines within {limit_s:g} s"

    def _all_exited(self) -> bool:
        return all(record.exit is not None for record in self.roster.ranks)

    # ------------------------------------------------------------ helpers

    async def _watch_clock(self) -> None:
        while True:
            if lag := self._clock.tick(time.monotonic()):
                self._output.note(f"this host did not run for {lag:.1f} s; nobody is blamed for that time")
            self._switchboard.expire_members(with_placed=not self.roster.epoch.is_open)
            self._desk.expire()
            self._changed.set()
            await asyncio.sleep(TICK_S)

    # ------------------------------------------------------------ for bring_up

    def send(self, member: Member, message: CoordinatorMessage) -> None:
        self._switchboard.send(member, message)

    def command(self, rank: int, command: EngineCommand) -> None:
        self._switchboard.command(rank, command)

    def enter(self, phase: Phase) -> None:
        self._switchboard.enter(phase)

    # ------------------------------------------------------------ telling

    def status(self, with_metrics: bool = False) -> MeshStatus:
        """From heartbeats only."""
        now = self._now()
        epoch, leader = self.roster.epoch, self.roster.ranks[0]
        return MeshStatus(
            name=self.mesh.name,
            model=self._model_id(),
            world_size=self.roster.world_size,
            sharding=self._placement.sharding if self._placement else self.mesh.sharding,
            backend=self._backend.backend,
            backend_reason=self._backend.reason,
            epoch=epoch.number,
            epoch_cause=epoch.cause,
            ready=self._desk.is_ready,
            reason=self._desk.readiness.reason,
            code=self._desk.readiness.code,
            placement=self._placement,
            ranks=rank_rows(self.roster, self._placement, self._addresses, epoch.number, now),
            num_running=leader.beat.num_sequences if leader.beat else 0,
            num_waiting=leader.beat.num_waiting if leader.beat else 0,
            num_open=len(self._desk.journal),
            uptime_s=round(now - self._started_at, 3),
            versions=leader.hello.versions if leader.hello else None,
            context_length=self._context_length(),
            restarts=self._num_restarts,
            hosts=self._lineup.rows(),
            lineup=self._lineup.describe() if self._was_ready else "",
            metrics=self._metrics() if with_metrics else (),
            switch=self._told_of_switch,
        )

    def _metrics(self) -> tuple[Metric, ...]:
        channel = ChannelCounters(
            failed_handshakes=self._channel.num_failed_handshakes,
            rejected_frames=self._channel.num_rejected_frames,
            rejected_messages=self._switchboard.rejected,
            lost_links=self._channel.num_lost_links,
            lost_agents=self._switchboard.num_lost_agents,
        )
        return metrics_of(
            self._counters, channel, self.roster, self._desk, self._kv_budget(), self._lineup.changes
        )

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(seat.host for seat in self.roster.seats)

    def has_host(self, name: str) -> bool:
        return name in self.host_names

    def log(self, line: str) -> None:
        """What another child of this process says, into the log of rank 0."""
        self._switchboard.log(0, line)

    def change_node(self, request: ChangeNode) -> NodeReply:
        """Go on without a host, or with it again."""
        if not self._was_ready:
            message = f"The mesh is not ready: {self._desk.readiness.reason}."
            return NodeReply(id=request.id, error="not_ready", message=message, epoch=0)
        reply = self._lineup.change(request)
        self._output.note(f"asked to {request.action} {request.host}: {reply.message}")
        self._changed.set()
        return reply

    def _model_id(self) -> str:
        """The id in answers: a hub id as it is, of a folder its name."""
        if self._served_name != self._config.model:
            return _name_of(self._served_name)
        if self.mesh.served_model_names:
            return self.mesh.served_model_names[0]
        return _name_of(self._config.model)

    def proxy_config(self) -> ProxyConfig:
        """Of the front end for the model that is served."""
        is_first = self._served_name == self._config.model
        return ProxyConfig(
            model=str(self._model or self._config.model),
            model_id=self._model_id(),
            served_model_names=self.mesh.served_model_names if is_first else (),
            serve_host=self.mesh.serve_host,
            serve_port=self.mesh.serve_port,
            listen_fd=-1,
            api_keys=self.mesh.api_keys,
            allowed_origins=self.mesh.allowed_origins,
            allowed_media_domains=self.mesh.allowed_media_domains,
            chat_template=self.mesh.chat_template if is_first else "",
            strip_thinking=self.mesh.strip_thinking,
            keeps_prefixes=self.mesh.prefix.is_enabled,
            has_prefixes_per_key=self.mesh.prefix.is_per_key,
            kv_bits=self.mesh.kv_options.bits,
            kv_group_size=self.mesh.kv_options.group_size,
            version=metadata.version("mlx-mesh"),
            embedding_model=_name_of(self.mesh.embedding_model) if self.mesh.embedding_model else "",
        )


def _name_of(model: str) -> str:
    """A hub id as it is, of a folder its name."""
    given = Path(model).expanduser()
    return given.resolve().name if given.is_dir() else model


def _no_verdict() -> Verdict:
    raise AssertionError("a wait without a limit is never late")
