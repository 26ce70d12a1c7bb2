"""The leader's side of a mesh: who is in, one epoch after the other, and an end that leaves nothing behind.

One flow of control (`run`) goes through the life of the mesh and waits at named barriers (`waits`); helper
tasks (`switchboard`) only note what they hear in the books (`roster`) and wake it. Who takes part is
`lineup`'s, bring-up is `bring_up`'s, requests are `desk`'s, blame is `mesh.membership`'s, what follows from
it is `recovery`'s, and another model is `model_changes`'.
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

from mlx_mesh.mesh.errors import BringUpError, ExitCode, MeshError
from mlx_mesh.mesh.membership import Verdict
from mlx_mesh.mesh.messages import (
    AgentConfig,
    ChangeNode,
    MeshDown,
    MeshReady,
    MeshStatus,
    Metric,
    NodeReply,
    ProxyConfig,
    Shutdown,
    StopEngine,
    SwitchModel,
    UnloadModel,
)
from mlx_mesh.mesh.survivors import Serve, StayDown
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.bring_up import Control, EpochPlan, bring_up
from mlx_mesh.node.channel import AgentsChannel
from mlx_mesh.node.counters import ChannelCounters, metrics_of
from mlx_mesh.node.desk import RETRY_AFTER_S, Desk
from mlx_mesh.node.epochs import SLACK_S, Epochs
from mlx_mesh.node.front_end import FrontEnd
from mlx_mesh.node.gathering import compare_hosts, seat_names, who_is_missing
from mlx_mesh.node.inspection import Inspector
from mlx_mesh.node.lineup import Lineup
from mlx_mesh.node.logs import RankLogs
from mlx_mesh.node.model_changes import ModelChanges
from mlx_mesh.node.output import Output
from mlx_mesh.node.recovery import Recovery
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.served_model import ServedModel
from mlx_mesh.node.status import rank_rows
from mlx_mesh.node.switchboard import Switchboard
from mlx_mesh.node.waits import TICK_S, EpochBroken, Stopped, Waits

_GOODBYE_S = 3.0
"""Agents whose engines are gone have this to say goodbye, before the coordinator's port closes."""


class _LeaveEpoch(Exception):
    """Nothing is wrong; other hosts shall serve. The message says why."""


class _SwitchModel(Exception):
    """Another model shall be served; `ModelChanges` has it."""


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
        self._channel = channel
        self._local_peer = local_peer
        self._url = url
        self._output = output
        self._front = front
        self._waits = Waits(self.roster, self.deadlines, lambda: self.desk.owed_s)
        self._started_at = self._waits.now()
        self.desk = Desk(
            send=front.send,
            command=lambda command: self._switchboard.command(0, command),
            now=self._waits.now,
            world_size=self.roster.world_size,
            max_open=self.mesh.max_sequences + self.mesh.max_queue,
            request_s=self.deadlines.request_s,
            pressure=self.roster.pressure,
        )
        self._switchboard = Switchboard(
            channel,
            self.roster,
            self.desk,
            deadlines=self.deadlines,
            output=output,
            logs=logs,
            now=self._waits.now,
            changed=self._waits.changed,
        )
        self._model = ServedModel(config, self.roster, inspector, output, model)
        self._lineup = Lineup(self.roster, self.deadlines, place=self._model.place, now=self._waits.now)
        self._epochs = Epochs(
            self.roster, self._waits, self.desk, self._switchboard, output, self.deadlines, front
        )
        self._changes = ModelChanges(
            self.mesh,
            config.model,
            self._model,
            self.roster,
            self._waits,
            self.desk,
            self._epochs,
            front,
            output,
        )
        self._recovery = Recovery(
            self.mesh,
            self.roster,
            self._waits,
            self.desk,
            self._epochs,
            self._changes,
            self._lineup,
            front,
            output,
        )

    # ------------------------------------------------------------ life

    async def run(self) -> None:
        """Until it is stopped (returns) or cannot go on (raises MeshError). Nothing of the mesh is left on
        any host that answers, and the open requests have their answer."""
        self._startup()
        reason, exit_code = "the coordinator was cancelled", ExitCode.FAILED
        try:
            await self._main_loop()
        except Stopped:
            reason, exit_code = self._waits.stop_reason or "stopped", self._waits.stop_code
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
        self._waits.stop(reason, hurry=hurry, is_failure=is_failure)

    def fail(self, error: BaseException) -> None:
        """Something that the mesh cannot do without ended with this."""
        self._waits.fail(error)

    def _startup(self) -> None:
        self._waits.help(self._switchboard.receive(), "coordinator receiver")
        self._waits.help(self._switchboard.watch_links(), "coordinator links")
        self._waits.help(self._watch_clock(), "coordinator clock")
        if self._model.folder is not None:
            self._waits.help(self._inspect(self._model.folder), "model sizes")

    async def _main_loop(self) -> None:
        control = Control(self.roster, self.deadlines, self._switchboard, self._waits)
        while True:
            try:
                if self._changes.must_unload:
                    await self._changes.unload()
                await self._gather()
                plan = await self._plan_epoch()
                self._epochs.begin()
                await bring_up(control, plan)
                await self._changes.wait_for_front()
                self._open()
                await self._serve()
            except EpochBroken as broken:
                await self._recovery.recover(broken.verdict)
            except _LeaveEpoch as leave:
                await self._epochs.leave(str(leave))
            except _SwitchModel:
                try:
                    await self._changes.switch()
                except EpochBroken as broken:  # before it began: the old model goes on, and its requests
                    await self._recovery.recover(broken.verdict)

    async def _shutdown(self, reason: str, exit_code: ExitCode) -> None:
        self.desk.drain()
        self.desk.pause(reason)
        if exit_code is ExitCode.OK:
            self.desk.fail_all("draining", f"The mesh was stopped: {reason}.", RETRY_AFTER_S)
        else:
            self.desk.fail_all("mesh_failed", f"The mesh ended: {reason}")
        is_gentle = exit_code is ExitCode.OK and not self._waits.is_hurried
        if is_gentle and self.roster.epoch.is_open and self._epochs.is_ready:
            self._switchboard.command(0, StopEngine())
            await self._waits.settle(self._all_exited, self.deadlines.stop_s)
        await self._epochs.stop(reason, gently=is_gentle)
        others = [m for _, m in self.roster.members() if m.peer != self._local_peer]
        for member in others:
            self._switchboard.send(member, Shutdown(reason=reason, exit_code=exit_code))
        await self._waits.settle(lambda: all(m.lost for m in others), _GOODBYE_S)
        await self._waits.end_helpers()

    def _all_exited(self) -> bool:
        return all(record.exit is not None for record in self.roster.ranks)

    # ------------------------------------------------------------ helpers

    async def _watch_clock(self) -> None:
        while True:
            if lag := self._waits.tick():
                self._output.note(f"this host did not run for {lag:.1f} s; nobody is blamed for that time")
            self._switchboard.expire_members(with_placed=not self.roster.epoch.is_open)
            self.desk.expire()
            self._waits.changed.set()
            await asyncio.sleep(TICK_S)

    async def _inspect(self, folder: Path) -> None:
        await self._model.inspect(folder)
        self._waits.changed.set()

    # ------------------------------------------------------------ one epoch

    async def _gather(self) -> None:
        """Until it is decided who takes part, and these are there with the same versions and model. At first
        all hosts must come."""
        if self._epochs.was_ready:
            await self._assemble()
            return
        limit_s = self.deadlines.join_s
        if missing := self.roster.missing():
            self.desk.pause(f"waiting for {seat_names(self.roster, missing)}")
        await self._waits.wait(
            lambda: not self.roster.missing(),
            self._waits.timer(limit_s),
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
            self._waits.check()
            decision = self._lineup.decide()
            if isinstance(decision, Serve):
                break
            words = self._lineup.describe_wait(decision)
            if isinstance(decision, StayDown) and not is_down:
                is_down = True
                self._output.event(MeshDown(reason=words))
                self._front.rescue()
                self.desk.go_down(words)
            self.desk.pause(words)
            await self._waits.pause(TICK_S)
        changed = self._lineup.settle(decision)
        if changed:
            self._epochs.add_cause(changed)
            self._output.note(
                f"going on with {len(decision.hosts)} of {len(self.roster.seats)} hosts: {changed}"
            )
        if changed or self._model.placement is None:
            placement = self._model.place(decision.hosts)
            self.roster.place(decision.hosts)
            self._model.set_placement(placement)

    async def _plan_epoch(self) -> EpochPlan:
        """Once the model's sizes are known. Raises PlacementError or BringUpError."""
        limit_s = self.deadlines.spawn_s + SLACK_S
        await self._waits.wait(
            lambda: self._model.footprint is not None,
            self._waits.timer(limit_s),
            lambda: BringUpError(f"the model's sizes are not known after {limit_s:g} s."),
        )
        return self._model.plan_epoch(is_first=not self._epochs.was_ready)

    def _open(self) -> None:
        """All ranks are ready."""
        epoch, age = self.roster.epoch, self._waits.age
        self._epochs.note_ready()
        self._lineup.note_ready()
        self._changes.end()
        lineup = self._lineup.describe()
        if lineup:
            self._output.note(lineup)
        footprint = self._model.footprint
        num_again = self.desk.open(
            epoch.number,
            self._model.context_length,
            self._model.kv_budget,
            world_size=self.roster.world_size,
            lineup=lineup,
            media=footprint.media if footprint is not None else (),
            media_refusals=footprint.media_refusals if footprint is not None else {},
            alone_reason=footprint.alone_reason if footprint is not None else "",
            whole_reason=footprint.whole_reason if footprint is not None else "",
        )
        if num_again:
            self._output.note(f"admitted {num_again} open requests again")
        self._output.event(
            MeshReady(
                url=self._url,
                epoch=epoch.number,
                seconds=age(epoch.began_at if epoch.number > 1 else self._started_at),
                restarted=epoch.number > 1,
                world_size=self.roster.world_size,
                lineup=lineup,
            )
        )

    async def _serve(self) -> None:
        """Until the end is asked for; raises Stopped after the open requests are done or drain_s is over,
        and _LeaveEpoch when other hosts shall serve."""
        other_hosts = ""

        def must_look() -> bool:
            nonlocal other_hosts
            other_hosts = self._lineup.wants()
            return self._waits.stop_reason is not None or bool(other_hosts) or self._changes.is_asked

        await self._waits.wait_for_ever(must_look)
        if self._waits.stop_reason is not None:
            await self._drain()
            raise Stopped
        if other_hosts:
            raise _LeaveEpoch(other_hosts)
        if not self._changes.must_unload:
            raise _SwitchModel
        await self._changes.unload()

    async def _drain(self) -> None:
        """The end was asked for: open requests may finish."""
        self.desk.drain()
        limit_s = self.deadlines.drain_s
        if count := len(self.desk.journal):
            self._output.note(
                f"{self._waits.stop_reason}: {count} open request{'s' if count > 1 else ''} may finish "
                f"within {limit_s:g} s (drain_s)"
            )
        with contextlib.suppress(EpochBroken):
            await self._waits.wait(
                lambda: not len(self.desk.journal),
                self._waits.timer(limit_s),
                lambda: Verdict(None, "", Phase.READY, "drain_s is over"),
            )

    # ------------------------------------------------------------ orders

    def order_switch(self, request: SwitchModel) -> None:
        self._changes.order_switch(request)

    def order_unload(self, request: UnloadModel) -> NodeReply:
        return self._changes.order_unload(request)

    def order_load(self, request: SwitchModel) -> NodeReply | None:
        return self._changes.order_load(request)

    def take_front_failure(self, error: str) -> bool:
        """See ModelChanges."""
        return self._changes.take_front_failure(error)

    def change_node(self, request: ChangeNode) -> NodeReply:
        """Go on without a host, or with it again."""
        if not self._epochs.was_ready:
            message = f"The mesh is not ready: {self.desk.readiness.reason}."
            return NodeReply(id=request.id, error="not_ready", message=message, epoch=0)
        reply = self._lineup.change(request)
        self._output.note(f"asked to {request.action} {request.host}: {reply.message}")
        self._waits.changed.set()
        return reply

    # ------------------------------------------------------------ telling

    def status(self, with_metrics: bool = False) -> MeshStatus:
        """From heartbeats only."""
        now = self._waits.now()
        epoch, leader = self.roster.epoch, self.roster.ranks[0]
        return MeshStatus(
            name=self.mesh.name,
            model=self._model.id,
            world_size=self.roster.world_size,
            sharding=self._model.placement.sharding if self._model.placement else self.mesh.sharding,
            backend=self._model.backend.backend,
            backend_reason=self._model.backend.reason,
            epoch=epoch.number,
            epoch_cause=epoch.cause,
            ready=self.desk.is_ready,
            reason=self.desk.readiness.reason,
            code=self.desk.readiness.code,
            placement=self._model.placement,
            ranks=rank_rows(self.roster, self._model.placement, self._model.addresses, epoch.number, now),
            num_running=leader.beat.num_sequences if leader.beat else 0,
            num_waiting=leader.beat.num_waiting if leader.beat else 0,
            num_open=len(self.desk.journal),
            uptime_s=round(now - self._started_at, 3),
            versions=leader.hello.versions if leader.hello else None,
            context_length=self._model.context_length,
            restarts=self._recovery.num_restarts,
            hosts=self._lineup.rows(),
            lineup=self._lineup.describe() if self._epochs.was_ready else "",
            metrics=self._metrics() if with_metrics else (),
            switch=self._changes.told,
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
            self._epochs.counters,
            channel,
            self.roster,
            self.desk,
            self._model.kv_budget,
            self._lineup.changes,
        )

    @property
    def host_names(self) -> tuple[str, ...]:
        return tuple(seat.host for seat in self.roster.seats)

    def has_host(self, name: str) -> bool:
        return name in self.host_names

    def log(self, line: str) -> None:
        """What another child of this process says, into the log of rank 0."""
        self._switchboard.log(0, line)

    def proxy_config(self) -> ProxyConfig:
        """Of the front end for the model that is served."""
        return self._model.proxy_config()
