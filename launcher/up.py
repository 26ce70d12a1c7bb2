"""`up`: preflight, plan, start, ready, run, stop. Three visible parts: bring up, run, bring down."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence

import msgspec

from mlx_mesh.launcher.api import Api
from mlx_mesh.launcher.bring import plan_and_bring
from mlx_mesh.launcher.config import LaunchConfig, is_loopback
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.preflight import ReadyHost, check_hosts, close_all, python_of
from mlx_mesh.launcher.programs.processes import started
from mlx_mesh.launcher.running import end_leftovers
from mlx_mesh.launcher.signals import Interrupted, StopSignals
from mlx_mesh.launcher.state import AgentProcess, HostAddress, StateFolder, UpState
from mlx_mesh.launcher.supervisor import Supervisor
from mlx_mesh.mesh.errors import ExitCode
from mlx_mesh.mesh.messages import MeshReady

OnReady = Callable[[str], None]


def dry_run(config: LaunchConfig, console: Console) -> ExitCode:
    """Preflight and plan; nothing is started and nothing is written. Raises MeshError."""
    with StopSignals():
        hosts = _check(config, console)
        try:
            plan_and_bring(config, hosts, console, is_dry=True)
        finally:
            close_all(hosts)
    console.say("Dry run: nothing was started.")
    return ExitCode.OK


def up(
    config: LaunchConfig,
    folder: StateFolder,
    console: Console,
    *,
    log: str = "",
    on_ready: OnReady | None = None,
    task: OnReady | None = None,
) -> ExitCode:
    """Run the mesh until somebody asks to stop, or until `task`, which is given the URL and runs in a thread
    of its own, is done. Raises MeshError when it does not come up or breaks.
    Nothing is left running in either case, or what could not be ended is named. `log`: where our own output
    goes when detached."""
    with StopSignals() as signals:
        folder.claim()
        try:
            return _up(config, folder, console, signals, log, on_ready, task)
        finally:
            folder.release()


def _up(
    config: LaunchConfig,
    folder: StateFolder,
    console: Console,
    signals: StopSignals,
    log: str,
    on_ready: OnReady | None,
    task: OnReady | None,
) -> ExitCode:
    for note in end_leftovers(folder):
        console.warn(note)
    hosts = _check(config, console)
    left: list[str] = []
    try:
        ready_hosts = plan_and_bring(config, hosts, console)
        state = _State(folder, config, hosts, log)
        supervisor = Supervisor(config, ready_hosts.hosts, console, state.set_agents, ready_hosts.planned)
        state.begin(supervisor.run_id)
        signals.hand_to(supervisor.ask_to_stop)
        try:
            ready = supervisor.start()
            if ready is None:
                raise Interrupted("Stopped before the mesh was ready.")
            state.set_url(ready.url)
            _tell_ready(config, hosts, ready, console, is_detached=bool(log))
            if on_ready is not None:
                on_ready(ready.url)
            if task is not None:
                _begin(task, ready.url, supervisor)
            console.say(f"\nStopping ({supervisor.run()}) ...")
        finally:
            left = supervisor.stop()
            for what in left:
                console.warn(what)
            if not left:
                state.end()
    finally:
        close_all(hosts)
    if left:
        return ExitCode.FAILED
    console.say(f"Mesh {config.name} is down.")
    return ExitCode.OK


def _begin(task: OnReady, url: str, supervisor: Supervisor) -> None:
    def work() -> None:
        try:
            task(url)
        finally:
            supervisor.ask_to_stop("done")

    threading.Thread(target=work, daemon=True).start()


def _check(config: LaunchConfig, console: Console) -> tuple[ReadyHost, ...]:
    for note in config.notes:
        console.warn(note)
    names = ", ".join(host.name for host in config.hosts)
    console.say(f"Checking {len(config.hosts)} host{'s' if len(config.hosts) > 1 else ''}: {names}")
    preflight = check_hosts(config, may_lack_model=config.brings_model)
    for warning in preflight.warnings:
        console.warn(warning)
    return preflight.hosts


def _tell_ready(
    config: LaunchConfig,
    hosts: Sequence[ReadyHost],
    ready: MeshReady,
    console: Console,
    *,
    is_detached: bool,
) -> None:
    leader, hints = hosts[0].entry, []
    served = Api(ready.url)
    if leader.ssh and is_loopback(served.host):
        hints.append(
            f"on {leader.name} only; from here: ssh -L {served.port}:127.0.0.1:{served.port} {leader.ssh}"
        )
    elif leader.agent is not None and is_loopback(served.host):
        hints.append(f"on {leader.name} only; from here by `mlx-mesh chat {config.name}`")
    end = f"mlx-mesh down {config.name}" if is_detached else "Ctrl-C stops"
    hints.append(f"mlx-mesh chat {config.name} | mlx-mesh status {config.name} | {end}")
    count = config.world_size
    size = f"{count} rank{'s' if count > 1 else ''}"
    if config.num_replicas > 1:
        size = f"{config.num_replicas} replicas of {size}"
    console.ready(config.name, served.url, f"{size}, {ready.seconds:.1f} s", hints)


class _State:
    """up.json of this launcher."""

    def __init__(
        self, folder: StateFolder, config: LaunchConfig, hosts: Sequence[ReadyHost], log: str
    ) -> None:
        self._folder = folder
        self._state = UpState(
            name=config.name,
            run_id="",
            pid=os.getpid(),
            started=started(os.getpid()),
            hostfile=config.hostfile,
            model=config.model,
            hosts=tuple(
                HostAddress(
                    name=host.entry.name,
                    ssh=host.entry.ssh,
                    user=host.entry.user,
                    python=python_of(host.entry),
                    agent=host.entry.agent,
                )
                for host in hosts
            ),
            ssh_config=config.ssh_config,
            api_key_file=config.api_key_file,
            log=log,
            drain_s=config.deadlines.drain_s,
        )

    def begin(self, run_id: str) -> None:
        self._change(run_id=run_id)

    def set_url(self, url: str) -> None:
        self._change(url=url)

    def set_agents(self, agents: tuple[AgentProcess, ...]) -> None:
        self._change(agents=agents)

    def end(self) -> None:
        self._folder.clear()

    def _change(self, **changes: object) -> None:
        self._state = msgspec.structs.replace(self._state, **changes)
        self._folder.write(self._state)
