"""Agents of one mesh: start the leader's, then the others, tell what they say, and end all of them.

The launcher knows an agent by its command line, the lines it prints and its exit only. An attached agent ends
by itself when its stdin closes, so a launcher that is killed leaves nothing behind. When a follower's agent
is gone while the mesh runs, or the connection to it, it is started again (`revival`).
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from mlx_mesh.launcher.config import LaunchConfig, is_hub_id, plan_size
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.measured import read_measurements
from mlx_mesh.launcher.plan import reserved_bytes
from mlx_mesh.launcher.preflight import ReadyHost
from mlx_mesh.launcher.programs import processes
from mlx_mesh.launcher.remote import (
    Exit,
    LocalHost,
    RemoteHost,
    RemoteProcess,
    Stream,
    new_marker,
    run_program,
)
from mlx_mesh.launcher.revival import SHORT_LIFE_S, reach_again
from mlx_mesh.launcher.state import AgentProcess
from mlx_mesh.mesh.errors import BringUpError, ExitCode, MeshError
from mlx_mesh.mesh.measurements import rates_of, slowest_link
from mlx_mesh.mesh.messages import (
    AgentConfig,
    AgentFailed,
    AgentListening,
    AgentStarted,
    AgentStopped,
    EpochEnded,
    Farewell,
    HostPlan,
    LauncherEvent,
    LogLine,
    MeshConfig,
    MeshDown,
    MeshReady,
    PlanChosen,
    RankProgress,
)
from mlx_mesh.mesh.types import Placement

SECRET_BYTES = 32
NUM_LAST_LINES = 12
IDENTIFY_TIMEOUT_S = 20.0
LAST_WORDS_S = 2.0  # after the first agent ended, how long the others may still name the cause
STOP_MARGIN_S = 5.0
HURRY_S = 1.5  # for clients to be told, when nobody wants to wait for the answers; then KILL


@dataclass(frozen=True, slots=True)
class _Said:
    """An agent's event."""

    index: int
    event: LauncherEvent


@dataclass(frozen=True, slots=True)
class _Printed:
    """A line that is no event."""

    index: int
    line: str


@dataclass(frozen=True, slots=True)
class _Ended:
    index: int
    exit: Exit


@dataclass(frozen=True, slots=True)
class _Identified:
    index: int
    started: str


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Somebody wants the mesh to end, `why` in words."""

    why: str


@dataclass(frozen=True, slots=True)
class _StartFailed:
    fault: HostFault


@dataclass(frozen=True, slots=True)
class _Reached:
    """A host whose connection was lost; nothing of its old agent is left."""

    index: int
    remote: RemoteHost


@dataclass(frozen=True, slots=True)
class _NotReached:
    index: int
    why: str


_Item = _Said | _Printed | _Ended | _Identified | StopAsked | _StartFailed | _Reached | _NotReached


class LaunchFailed(MeshError):
    """The mesh did not come up, or broke. The exit status is the agent's own where it gave one."""

    def __init__(self, message: str, exit_code: ExitCode) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(slots=True)
class _Agent:
    """What is known of one agent."""

    host: ReadyHost
    process: RemoteProcess | None = None
    pid: int = 0
    started: str = ""
    is_asked: bool = False  # its start time is being asked for
    exit: Exit | None = None
    has_said_its_end: bool = False  # then it has cleaned up after itself
    was_sent_away: bool = False  # by the coordinator, because the whole mesh ends
    started_at: float = 0.0  # time.monotonic()
    num_short_lives: int = 0  # in a row
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=NUM_LAST_LINES))

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.exit is None


class Supervisor:
    """One mesh, from `start` to `stop`. All methods but `ask_to_stop` belong to one thread."""

    def __init__(
        self,
        config: LaunchConfig,
        hosts: Sequence[ReadyHost],
        console: Console,
        on_agents: Callable[[tuple[AgentProcess, ...]], None],
        planned: tuple[Placement, ...] = (),
    ) -> None:
        """`planned`: by replica, what hosts were brought parts of the model for, if any were."""
        self.run_id = secrets.token_hex(8)
        self._config = config
        self._console = console
        self._on_agents = on_agents
        self._planned = planned
        self._agents = [_Agent(host) for host in hosts]
        self._items: queue.SimpleQueue[_Item] = queue.SimpleQueue()
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._coordinator = ""
        self._ready: MeshReady | None = None
        self._failed: AgentFailed | None = None
        self._failed_index = 0
        self._cause = ""  # why the mesh broke, as the user is told
        self._broken = ""  # the first thing that went wrong without an AgentFailed
        self._stop_asked = ""
        self._is_closing = threading.Event()  # nobody is to be reached again
        self._reopened: list[RemoteHost] = []
        self._is_stopping = False
        self._is_hurried = False  # asked again while stopping: go straight to KILL

    # ------------------------------------------------------------ from any thread or signal handler

    def ask_to_stop(self, why: str) -> None:
        """End the mesh soon. Safe in a signal handler."""
        self._items.put(StopAsked(why))

    # ------------------------------------------------------------ up

    def start(self) -> MeshReady | None:
        """Start all agents and wait until the mesh is ready; None when somebody asked to stop meanwhile.
        Raises LaunchFailed; `stop` is the caller's duty in any case."""
        self._start_agent(0)
        if len(self._agents) > 1:
            deadlines = self._config.deadlines
            self._wait(
                lambda: bool(self._coordinator), deadlines.join_s, "the leader's agent to listen (join_s)"
            )
            if not self._stop_asked:
                self._start_followers()
        # The coordinator has a deadline for every phase; this one is for a coordinator that is gone silent.
        self._wait(lambda: self._ready is not None, 0.0, "")
        self._wait(lambda: not any(agent.is_asked for agent in self._agents), IDENTIFY_TIMEOUT_S + 5.0, "ps")
        return self._ready

    def run(self) -> str:
        """Show what happens until somebody asks to stop (the answer says who) or the mesh breaks
        (raises LaunchFailed)."""
        while not self._stop_asked:
            self._take(timeout_s=None)
            self._raise_if_broken()
        return self._stop_asked

    def _start_agent(self, index: int) -> None:
        agent = self._agents[index]
        agent.started_at = time.monotonic()  # also of a start that fails, which is a short life
        marker = new_marker()
        decoder = msgspec.json.Decoder(LauncherEvent)

        def on_line(stream: Stream, line: str) -> None:
            if stream == "stdout" and line.startswith(marker + " "):
                try:
                    self._items.put(_Said(index, decoder.decode(line[len(marker) + 1 :])))
                except msgspec.MsgspecError as error:
                    self._items.put(_Printed(index, f"unreadable event ({error}): {line[:200]}"))
            elif line.strip():
                self._items.put(_Printed(index, line))

        words = [agent.host.python, "-I", "-u", "-m", "mlx_mesh.node", "--launched"]
        process = agent.host.remote.start(words, on_line, lambda exit: self._items.put(_Ended(index, exit)))
        process.send(msgspec.json.encode(self.agent_config(index, marker)) + b"\n")
        agent.process = process

    def _start_followers(self) -> None:
        def start(index: int) -> None:
            try:
                self._start_agent(index)
            except HostFault as fault:
                self._items.put(_StartFailed(fault))

        threads = [
            threading.Thread(target=start, args=(index,), daemon=True)
            for index in range(1, len(self._agents))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(self._config.deadlines.join_s)  # a connection that hangs is told by the coordinator

    def agent_config(self, index: int, marker: str) -> AgentConfig:
        """What agent `index` is told on its stdin."""
        config, agent = self._config, self._agents[index]
        leader = self._agents[0].host
        alone = len(self._agents) == 1
        bind = "" if alone else f"{leader.address}:0"
        return AgentConfig(
            mesh_name=config.name,
            run_id=self.run_id,
            host=agent.host.entry.name,
            model=agent.host.model,
            adapter=agent.host.adapter,
            secret=self._secret,
            coordinator=bind if index == 0 else self._coordinator,
            slots=agent.host.entry.slots,
            world_size=config.world_size,
            address=agent.host.address,
            marker=marker,
            attached=True,
            deadlines=config.deadlines,
            offline=config.is_offline,
            mesh=self._mesh_config() if index == 0 else None,
            announce=self._announces(agent.host.address),
            faults=config.faults,
        )

    def _mesh_config(self) -> MeshConfig:
        return mesh_config(self._config, [agent.host for agent in self._agents], self._planned)

    def _announces(self, address: str) -> bool:
        """A mesh of one host, or on loopback, is nobody else's business."""
        if self._config.announce is not None:
            return self._config.announce
        return len(self._agents) > 1 and not address.startswith("127.")

    # ------------------------------------------------------------ what the agents say

    def _wait(self, is_done: Callable[[], bool], limit_s: float, what: str) -> None:
        """Handle what comes until `is_done` or somebody asks to stop. `limit_s` counts from now; 0: from
        the last sign of life, by the longest deadline that a coordinator has."""
        deadlines = self._config.deadlines
        silence_s = max(
            deadlines.join_s,
            deadlines.spawn_s,
            deadlines.connect_s,
            deadlines.load_stall_s,
            deadlines.warmup_s,
        )
        give_up = time.monotonic() + (limit_s or silence_s + 2 * STOP_MARGIN_S)
        while not is_done() and not self._stop_asked:
            if self._take(timeout_s=max(0.0, give_up - time.monotonic())):
                if not limit_s:
                    give_up = time.monotonic() + silence_s + 2 * STOP_MARGIN_S
            elif limit_s:
                raise BringUpError(
                    f"Waited {limit_s:g} s on {self._agents[0].host.entry.name} for {what}. "
                    f"{self._words_of(0)}"
                )
            else:
                raise BringUpError(
                    f"No agent said anything for {silence_s + 2 * STOP_MARGIN_S:g} s while the mesh was "
                    f"coming up: the agent on {self._agents[0].host.entry.name} hangs or is stopped."
                )
            self._raise_if_broken()

    def _take(self, timeout_s: float | None) -> bool:
        """Handle one item; False when none came in time."""
        try:
            item = self._items.get(timeout=timeout_s)
        except queue.Empty:
            return False
        match item:
            case _Said(index, event):
                self._handle(index, event)
            case _Printed(index, line):
                self._agents[index].last_lines.append(line)
                self._console.log("agent", self._agents[index].host.entry.name, line)
            case _Identified(index, started):
                self._agents[index].started = started
                self._agents[index].is_asked = False
                self._tell_agents()
            case _Ended(index, exit):
                self._agents[index].exit = exit
                if not self._is_stopping:
                    self._ended(index, exit)
            case _StartFailed(fault):
                self._break(str(fault), None)
            case _Reached(index, remote):
                self._start_again(index, remote)
            case _NotReached(index, why):
                name = self._agents[index].host.entry.name
                self._console.warn(f"{name} cannot be reached yet, trying on: {why}")
            case StopAsked(why):
                self._is_hurried = self._is_stopping
                self._stop_asked = self._stop_asked or why
        return True

    def _handle(self, index: int, event: LauncherEvent) -> None:
        console = self._console
        match event:
            case AgentListening():
                self._coordinator = event.coordinator
                self._set_pid(index, event.agent_pid)
            case AgentStarted():
                self._set_pid(index, event.agent_pid)
            case PlanChosen():
                placement = event.placement
                console.say(
                    f"Coordinator: {placement.world_size} rank{'s' if placement.world_size > 1 else ''}, "
                    f"sharding {placement.sharding}, backend {event.backend} ({event.backend_reason})"
                )
            case RankProgress():
                console.progress(event.rank, event.host, event.phase, event.done, event.total, event.detail)
            case LogLine():
                self._agents[index].last_lines.append(f"[{event.rank} {event.host}] {event.line}")
                console.log(str(event.rank), event.host, event.line)
            case MeshReady():
                if self._ready is not None:
                    console.finish_progress()
                    lineup = f": {event.lineup}" if event.lineup else ""
                    console.say(f"Ready again after {event.seconds:.1f} s (epoch {event.epoch}){lineup}.")
                self._ready = self._ready or event
                for agent in self._agents:
                    agent.host.remote.be_patient(self._config.deadlines.rejoin_timeout_s)
            case MeshDown():
                console.finish_progress()
                console.warn(f"The mesh is {event.reason}")
            case EpochEnded():
                console.finish_progress()
                console.say(f"Epoch {event.epoch} ended: {event.cause}")
            case AgentFailed():
                self._agents[index].has_said_its_end = True
                if self._failed is None and (index == 0 or self._ready is None):
                    self._failed, self._failed_index = event, index
                if index != 0:  # the leader's own reason stands in the final error
                    console.log("agent", self._agents[index].host.entry.name, event.message)
            case AgentStopped():
                self._agents[index].has_said_its_end = True
                self._agents[index].was_sent_away = event.by_coordinator
                if event.reason and not self._is_stopping:
                    console.log("agent", self._agents[index].host.entry.name, f"stopped: {event.reason}")

    def _set_pid(self, index: int, pid: int) -> None:
        agent = self._agents[index]
        if agent.pid == pid:
            return
        agent.pid = pid
        if isinstance(agent.host.remote, LocalHost):
            agent.started = processes.started(pid)
        else:
            agent.is_asked = True
            threading.Thread(target=self._identify, args=(index, pid), daemon=True).start()
        self._tell_agents()

    def _identify(self, index: int, pid: int) -> None:
        host = self._agents[index].host
        request = {"do": "identify", "pids": [pid]}
        since = ""  # then it can only be ended by closing its stdin
        with contextlib.suppress(MeshError):
            answer = run_program(host.remote, host.python, "processes", request, IDENTIFY_TIMEOUT_S)
            since = str(answer.get(str(pid), ""))
        self._items.put(_Identified(index, since))

    def _tell_agents(self) -> None:
        self._on_agents(
            tuple(
                AgentProcess(host=agent.host.entry.name, pid=agent.pid, started=agent.started)
                for agent in self._agents
                if agent.pid
            )
        )

    # ------------------------------------------------------------ an agent that is gone

    def _ended(self, index: int, exit: Exit) -> None:
        agent = self._agents[index]
        name = agent.host.entry.name
        if index == 0 or self._ready is None or agent.was_sent_away:
            self._break(f"The agent on {name} is gone: {exit}.", index)
            return
        limit_s = self._config.deadlines.rejoin_timeout_s
        what = (
            f"The SSH connection to {name} was lost ({exit.lost})."
            if exit.lost
            else f"The agent on {name} is gone: {exit}."
        )
        self._console.finish_progress()
        self._console.warn(
            f"{what} It is started again as soon as {name} can be reached. After {limit_s:g} s without a "
            "sign of life (rejoin_timeout_s) the mesh goes on without it, if the model fits."
        )
        is_short = time.monotonic() - agent.started_at < SHORT_LIFE_S
        agent.num_short_lives = agent.num_short_lives + 1 if is_short else 0
        threading.Thread(target=self._revive, args=(index, agent.num_short_lives), daemon=True).start()

    def _revive(self, index: int, num_tries: int) -> None:
        """In a thread."""
        agent = self._agents[index]
        last = ""

        def on_trouble(why: str) -> None:
            nonlocal last
            if why != last:
                last = why
                self._items.put(_NotReached(index, why))

        remote = reach_again(
            agent.host.entry,
            self._config.ssh_config,
            (agent.pid, agent.started),
            num_tries,
            self._is_closing,
            on_trouble,
        )
        if remote is not None:
            self._items.put(_Reached(index, remote))

    def _start_again(self, index: int, remote: RemoteHost) -> None:
        agent = self._agents[index]
        self._reopened.append(remote)
        agent.host = replace(agent.host, remote=remote)
        if self._is_stopping:
            return
        remote.be_patient(self._config.deadlines.rejoin_timeout_s)
        agent.exit, agent.pid, agent.started, agent.has_said_its_end = None, 0, "", False
        try:
            self._start_agent(index)
        except HostFault as fault:
            agent.process = None
            self._items.put(_Ended(index, Exit(lost=str(fault))))
            return
        self._console.say(f"Reached {agent.host.entry.name} again; its agent is started anew.")

    # ------------------------------------------------------------ failure

    def _break(self, what: str, index: int | None) -> None:
        if not self._broken:
            self._broken = what if index is None else f"{what} {self._words_of(index)}".rstrip()

    def _words_of(self, index: int) -> str:
        lines = list(self._agents[index].last_lines)
        return "Its last lines:\n  " + "\n  ".join(lines) if lines else "It said nothing."

    def _raise_if_broken(self) -> None:
        """Turn the first failure into an exception, after giving all agents a moment to name the cause. What
        followers say of a leader that is gone is a symptom: how it ended is known here."""
        if not self._broken and self._failed is None:
            return
        end = time.monotonic() + LAST_WORDS_S
        leader = self._agents[0]
        while (left := end - time.monotonic()) > 0:
            if leader.exit is not None or (self._failed is not None and self._failed_index == 0):
                break
            self._take(timeout_s=left)
        code = ExitCode.FAILED if self._ready else ExitCode.BRING_UP
        if leader.exit is not None and not leader.has_said_its_end:
            self._cause = f"The agent on {leader.host.entry.name} is gone: {leader.exit}. {self._words_of(0)}"
        elif self._failed is not None:
            self._cause, code = self._failed.message, _exit_code(self._failed.exit_code)
        else:
            self._cause = self._broken
        raise LaunchFailed(self._cause, code)

    # ------------------------------------------------------------ down

    def stop(self) -> list[str]:
        """End all agents and wait until they are gone. Returns what could not be confirmed, in words.

        Open requests may finish first, unless the mesh broke or somebody asks for the end again.
        The leader's first: its coordinator tells the others, who would else take their own end for a fault.
        Then the others' stdin closes, then KILL by pid and start time.
        """
        self._is_stopping = True
        self._is_closing.set()
        self._console.finish_progress()
        limit_s = 2 * self._config.deadlines.stop_s + STOP_MARGIN_S
        if self._drain(limit_s):
            limit_s = HURRY_S
        self._close(self._agents[:1])
        self._wait_until_gone(self._agents[:1], limit_s)
        self._close(self._agents[1:])
        self._wait_until_gone(self._agents, limit_s)
        left = [self._kill(agent) or self._forget(agent) for agent in reversed(self._agents)]
        for remote in reversed(self._reopened):
            remote.close()
        return [what for what in left if what]

    def _drain(self, limit_s: float) -> bool:
        """Returns whether somebody's patience ended first."""
        leader = self._agents[0]
        if self._ready is None or self._cause or not leader.is_running or leader.process is None:
            return False
        farewell = Farewell(reason=self._why_it_ends, is_failure=False, drain=True)
        leader.process.send(msgspec.json.encode(farewell) + b"\n")
        self._wait_until_gone([leader], self._config.deadlines.drain_s + limit_s)
        was_hurried, self._is_hurried = self._is_hurried, False
        return was_hurried

    @property
    def _why_it_ends(self) -> str:
        return (self._cause or self._stop_asked or "the launcher ends it").splitlines()[0].rstrip(".")

    def _close(self, agents: Sequence[_Agent]) -> None:
        farewell = Farewell(reason=self._why_it_ends, is_failure=bool(self._cause))
        for agent in agents:
            if agent.is_running and agent.process is not None:
                agent.process.send(msgspec.json.encode(farewell) + b"\n")
                agent.process.close_stdin()

    def _wait_until_gone(self, agents: Sequence[_Agent], limit_s: float) -> None:
        end = time.monotonic() + limit_s
        while any(agent.is_running for agent in agents) and not self._is_hurried:
            if (left := end - time.monotonic()) <= 0:
                return
            self._take(timeout_s=left)

    def _kill(self, agent: _Agent) -> str:
        """KILL what is still there; says why when that cannot be done or confirmed."""
        name, stop_s = agent.host.entry.name, self._config.deadlines.stop_s
        if not agent.is_running and not (agent.exit and agent.exit.lost):
            return ""
        told = f"{name}: the agent (pid {agent.pid or 'unknown'})"
        if isinstance(agent.host.remote, LocalHost) and agent.process is not None:
            agent.process.kill()
            return "" if agent.process.wait(stop_s) else f"{told} does not end even by SIGKILL"
        if not agent.pid or not agent.started:
            return f"{told} could not be identified; see on that host: ps ax | grep mlx_mesh"
        request = {"do": "end", "processes": [[agent.pid, agent.started]], "term_s": 0.0, "kill_s": stop_s}
        try:
            answer = run_program(
                agent.host.remote, agent.host.python, "processes", request, stop_s + IDENTIFY_TIMEOUT_S
            )
        except MeshError as error:
            return f"{told} may still run, it ends by itself once it misses the leader ({error})"
        return f"{told} does not end even by SIGKILL" if answer.get(str(agent.pid)) == "alive" else ""

    def _forget(self, agent: _Agent) -> str:
        """Remove the run file of an agent that could not do it itself, now that its end is certain."""
        if not agent.pid or agent.has_said_its_end or (agent.exit is not None and agent.exit.lost):
            return ""
        name, stop_s = agent.host.entry.name, self._config.deadlines.stop_s
        try:
            if isinstance(agent.host.remote, LocalHost):
                return processes.forget(self._config.name, name, agent.pid, stop_s)
            request = {
                "do": "forget",
                "name": self._config.name,
                "host": name,
                "pid": agent.pid,
                "kill_s": stop_s,
            }
            limit_s = 2 * stop_s + IDENTIFY_TIMEOUT_S
            answer = run_program(agent.host.remote, agent.host.python, "processes", request, limit_s)
        except MeshError as error:
            return f"{name}: what its killed agent left behind could not be looked for ({error})"
        return str(answer["left"])


def mesh_config(
    config: LaunchConfig, hosts: Sequence[ReadyHost], planned: tuple[Placement, ...] = ()
) -> MeshConfig:
    """What the coordinator is told."""
    context, sequences = plan_size(config)
    measurements = read_measurements(os.environ)
    rates = [rates_of(host.facts, measurements) for host in hosts]
    return MeshConfig(
        name=config.name,
        hosts=tuple(
            HostPlan(
                name=host.entry.name,
                slots=host.entry.slots,
                address=host.address,
                is_pinned=bool(host.entry.addresses),
                layers=host.entry.layers,
                memory_limit_bytes=host.entry.memory_limit_bytes,
                rdma=host.entry.rdma,
                replica=host.entry.replica,
                num_shares=host.entry.num_shares,
                reserved_bytes=reserved_bytes(host, hosts[0]),
                interfaces=host.entry.interfaces,
                memory_rate=rate.memory_rate,
                matrix_rate=rate.matrix_rate,
            )
            for host, rate in zip(hosts, rates, strict=True)
        ),
        sharding=config.sharding,
        backend=config.backend,
        serve_host=config.serve_host,
        serve_port=config.serve_port,
        api_keys=config.api_keys,
        allowed_origins=config.allowed_origins,
        allowed_media_domains=config.allowed_media_domains,
        served_model_names=config.served_model_names or _hub_name(config, hosts[0]),
        planned=planned,
        chat_template=config.chat_template,
        strip_thinking=config.strip_thinking,
        embedding_model=hosts[0].embedding,
        allowed_models=config.allowed_models,
        vision=config.vision,
        log_format=config.log_format,
        context_length=config.context_length,
        max_sequences=config.max_sequences,
        max_queue=config.max_queued_requests,
        elastic=config.is_elastic,
        paranoid=config.paranoid,
        num_replicas=config.num_replicas,
        allow_wifi=config.allow_wifi,
        prefill_step_size=config.prefill_step_size,
        prefix=config.prefix,
        kv_options=config.kv_options,
        plan_context=context,
        plan_sequences=sequences,
        link=slowest_link([host.facts for host in hosts], measurements, config.backend),
        deadlines=config.deadlines,
    )


def _hub_name(config: LaunchConfig, leader: ReadyHost) -> tuple[str, ...]:
    """A hub model that was delivered has a folder's name there; clients know it by its id."""
    return (config.model,) if leader.facts.is_delivered and is_hub_id(config.model) else ()


def _exit_code(number: int) -> ExitCode:
    try:
        return ExitCode(number)
    except ValueError:
        return ExitCode.FAILED
