"""One host's part in a mesh: it joins the coordinator, runs the engines it is told to, and reports.

It ends when the coordinator says so, refuses it or is gone, and always takes its engines with it:
`run` returns only when none is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from mlx_mesh.mesh.errors import ExitCode, MeshError, PreflightError
from mlx_mesh.mesh.membership import ObservedClock
from mlx_mesh.mesh.messages import (
    AgentBeat,
    AgentConfig,
    BeatAck,
    CoordinatorMessage,
    EpochStopped,
    Join,
    JoinAgain,
    Leaving,
    Load,
    PortsReserved,
    Refused,
    ReservePorts,
    Shutdown,
    StartEpoch,
    StopEpoch,
    ToEngine,
    Welcome,
)
from mlx_mesh.mesh.types import PROTOCOL_VERSION, HostFacts
from mlx_mesh.node.channel import AgentChannel, LinkDown, LinkUp, split_endpoint
from mlx_mesh.node.engines import Engines
from mlx_mesh.node.facts import resolve_model
from mlx_mesh.node.host_watch import HostCondition
from mlx_mesh.node.ports import reserve_data_ports
from mlx_mesh.node.pressure import read_pressure

TICK_S = 0.25
_UNKILLABLE_S = 5.0
_PROBE_S = 2.0
"""How long a plain TCP connection to a coordinator whose link broke may take."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """Why an agent ended. `is_error`: nobody else tells the user. `by_coordinator`: the mesh ends."""

    reason: str
    exit_code: ExitCode
    is_error: bool
    by_coordinator: bool = False


class Agent:
    """The conversation with the coordinator. `run` once."""

    def __init__(
        self,
        config: AgentConfig,
        channel: AgentChannel,
        engines: Engines,
        *,
        facts: HostFacts,
        address: str,
        model: Path | None,
        is_local: bool,
        note: Callable[[str], None],
        condition: Callable[[], HostCondition] = HostCondition,
    ) -> None:
        """`address`: IPv4 by which this host talks to the coordinator; `model`: this host's folder;
        `is_local`: the coordinator lives in this process, so its end is not ours to judge."""
        self._config = config
        self._channel = channel
        self._engines = engines
        self._facts = facts
        self._address = address
        self._model = model
        self._is_local = is_local
        self._note = note
        self._condition = condition
        self._deadlines = config.deadlines
        self._clock = ObservedClock(time.monotonic(), TICK_S)
        self._started_at = self._acked_at = self._now()
        self._link_is_up = False
        self._num_refused_links = 0
        self._has_joined = False
        self._epoch_address = ""
        self._seq = 0
        self._orders: asyncio.Queue[CoordinatorMessage] = asyncio.Queue()
        self._end: AgentEnd | None = None
        self._is_sent_away = False
        self._probe: asyncio.Task[None] | None = None

    async def run(self) -> AgentEnd:
        """Until the end, whatever it is; no engine is left then."""
        helpers = [
            asyncio.create_task(self._beat(), name="agent heartbeat"),
            asyncio.create_task(self._obey(), name="agent orders"),
        ]
        try:
            while self._end is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        self._hear(await self._channel.receive())
                self._clock.tick(time.monotonic())
                self._check_silence()
                for helper in helpers:
                    if helper.done():
                        helper.result()  # they end by exceptions only
            return self._end
        finally:
            if self._probe is not None:
                helpers.append(self._probe)
            for helper in helpers:
                helper.cancel()
            await asyncio.gather(*helpers, return_exceptions=True)
            leaving = Leaving(reason=self._end.reason if self._end else "it was stopped")
            if not self._is_sent_away:
                self._channel.send(leaving)  # the cause before its effects
            await self._end_engines()
            if self._is_sent_away:
                self._channel.send(leaving)  # the coordinator waits for this: nothing is left here

    async def _end_engines(self) -> None:
        """KILL is enough for all but a process stuck in a driver; that one is left to the run file."""
        limit_s = self._deadlines.stop_s + _UNKILLABLE_S
        try:
            async with asyncio.timeout(limit_s):
                await self._engines.stop(gently=False, stop_s=0.0)
        except TimeoutError:
            ranks = ", ".join(map(str, self._engines.ranks))
            self._note(
                f"the engine of rank {ranks} is still there {limit_s:g} s after SIGKILL, stuck in the "
                "system; the next start on this host looks for it"
            )

    def stop(self, reason: str) -> None:
        """End soon, on purpose."""
        self._finish(reason, ExitCode.OK, is_error=False)

    def _finish(self, reason: str, exit_code: ExitCode, *, is_error: bool) -> None:
        if self._end is None:
            self._end = AgentEnd(reason, exit_code, is_error, by_coordinator=self._is_sent_away)

    def _now(self) -> float:
        return self._clock.read(time.monotonic())

    # ------------------------------------------------------------ hearing

    def _hear(self, message: CoordinatorMessage | LinkUp | LinkDown) -> None:
        match message:
            case LinkUp():
                self._link_is_up = True
                self._join()
            case LinkDown():
                self._link_is_up = False
                self._lost_link(message.is_refused)
            case Welcome():
                self._welcome(message)
            case BeatAck():
                self._acked_at = self._now()
            case Refused():
                self._finish(message.reason, ExitCode.BRING_UP, is_error=True)
            case Shutdown():
                self._is_sent_away = True
                self._finish(message.reason, ExitCode(message.exit_code), is_error=False)
            case JoinAgain():
                self._note(f"the coordinator lost sight of this host ({message.reason}); joining again")
                self._join()
            case StartEpoch() | ReservePorts() | ToEngine() | StopEpoch():
                self._orders.put_nowait(message)

    def _join(self) -> None:
        config = self._config
        self._channel.send(
            Join(
                protocol=PROTOCOL_VERSION,
                mesh_name=config.mesh_name,
                host=config.host,
                agent_pid=os.getpid(),
                slots=config.slots,
                ranks=config.ranks,
                world_size=config.world_size,
                address=self._address,
                facts=self._facts,
            )
        )

    def _welcome(self, message: Welcome) -> None:
        if not self._has_joined:
            ranks = ", ".join(map(str, message.ranks))
            place = f"as rank {ranks} of {message.world_size}" if ranks else "and waits to be taken in"
            self._note(f"joined mesh {self._config.mesh_name} {place}")
        self._has_joined = True
        self._deadlines = message.deadlines
        self._acked_at = self._now()

    # ------------------------------------------------------------ the coordinator's life

    def _lost_link(self, is_refused: bool) -> None:
        if is_refused:
            self._num_refused_links += 1
            if self._num_refused_links == 1:
                self._note(
                    f"the coordinator at {self._config.coordinator} does not accept this agent's secret, "
                    "or something else listens there; trying on"
                )
        if self._has_joined and (self._probe is None or self._probe.done()):
            self._probe = asyncio.create_task(self._probe_coordinator(), name="coordinator probe")

    async def _probe_coordinator(self) -> None:
        """A broken link means a dead coordinator or a broken network; a plain connection tells which."""
        address, port = split_endpoint(self._config.coordinator)
        while not self._link_is_up:
            try:
                async with asyncio.timeout(_PROBE_S):
                    _, writer = await asyncio.open_connection(address, port)
            except ConnectionRefusedError:
                self._finish(
                    f"the coordinator at {self._config.coordinator} is gone (connection refused)",
                    ExitCode.FAILED,
                    is_error=True,
                )
                return
            except (OSError, TimeoutError):
                pass
            else:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
            await asyncio.sleep(TICK_S)

    def _check_silence(self) -> None:
        if self._is_local:
            return
        now, deadlines = self._now(), self._deadlines
        if not self._has_joined:
            if now - self._started_at > deadlines.join_s:
                self._finish(self._why_not_joined(), ExitCode.BRING_UP, is_error=True)
            return
        silent_s = now - self._acked_at
        if silent_s > deadlines.rejoin_timeout_s:
            self._finish(
                f"no answer from the coordinator at {self._config.coordinator} for {silent_s:.0f} s "
                f"(rejoin_timeout_s is {deadlines.rejoin_timeout_s:g})",
                ExitCode.FAILED,
                is_error=True,
            )
        elif silent_s > deadlines.heartbeat_timeout_s and len(self._engines) and self._orders.empty():
            reason = (
                f"no answer from the coordinator for {silent_s:.1f} s "
                f"(heartbeat_timeout_s is {deadlines.heartbeat_timeout_s:g})"
            )
            self._note(f"{reason}: ending the engines, looking for the coordinator")
            self._orders.put_nowait(StopEpoch(epoch=self._engines.epoch, gently=False, reason=reason))

    def _why_not_joined(self) -> str:
        config = self._config
        start = (
            f"no coordinator took this agent in at {config.coordinator} within {config.deadlines.join_s:g} s"
        )
        if self._num_refused_links:
            return (
                f"{start} (join_s): something answers there, but the handshake failed "
                f"{self._num_refused_links} times. Give all hosts the same MLX_MESH_SECRET, and check that "
                "no other program uses this port."
            )
        if self._link_is_up:
            return f"{start} (join_s): it answers, but did not say welcome."
        return (
            f"{start} (join_s): nothing answers there. Start the agent that serves on that host, and check "
            "the address, the port and any firewall between the hosts."
        )

    # ------------------------------------------------------------ heartbeats and orders

    async def _beat(self) -> None:
        while True:
            if self._has_joined:
                self._seq += 1
                condition = self._condition()
                self._channel.send(
                    AgentBeat(
                        seq=self._seq,
                        stopped=self._engines.stopped_ranks(),
                        pressure=read_pressure(),
                        awake=condition.awake,
                        events=condition.events,
                    )
                )
            await asyncio.sleep(self._deadlines.heartbeat_interval_s)

    async def _obey(self) -> None:
        """Orders one after the other: a start waits until the stop before it is done."""
        while True:
            order = await self._orders.get()
            match order:
                case StartEpoch():
                    await self._start_epoch(order)
                case ReservePorts():
                    self._channel.send(self._reserve_ports(order))
                case ToEngine():
                    self._forward(order)
                case StopEpoch():
                    await self._engines.stop(
                        gently=order.gently, stop_s=self._deadlines.stop_s, dump=order.dump
                    )
                    self._channel.send(EpochStopped(epoch=order.epoch))

    async def _start_epoch(self, order: StartEpoch) -> None:
        await self._engines.stop(gently=False, stop_s=0.0)
        self._epoch_address = order.address
        await self._engines.start(
            order.epoch,
            order.ranks,
            order.world_size,
            order.plan_address,
            self._deadlines.heartbeat_interval_s,
        )

    def _reserve_ports(self, order: ReservePorts) -> PortsReserved:
        try:
            addresses = reserve_data_ports(self._epoch_address, self._engines.ranks, order.num_per_rank)
        except MeshError as error:
            return PortsReserved(epoch=order.epoch, error=str(error))
        return PortsReserved(epoch=order.epoch, addresses=addresses)

    def _forward(self, order: ToEngine) -> None:
        command = order.command
        if isinstance(command, Load) and self._model is not None:
            # Each host keeps the first model and its adapter where it likes.
            if not command.is_switched:
                folder, adapter = self._model, self._config.adapter
            else:
                folder, adapter = _folder_of(command.model), ""
            command = msgspec.structs.replace(command, model=str(folder), adapter=adapter)
        self._engines.command(order.epoch, order.rank, command)


def _folder_of(model: str) -> Path:
    """Of a model that was switched to. One that is not here is the engine's to name, as it fails."""
    try:
        return resolve_model(model)
    except PreflightError:
        return Path(model)
