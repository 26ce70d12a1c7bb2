"""A mesh that runs: found by name or hostfile, asked over HTTP, its logs read, and ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlx_mesh.launcher.api import Api, ApiError
from mlx_mesh.launcher.config import is_loopback, read_api_keys, read_hostfile
from mlx_mesh.launcher.preflight import open_host, python_of
from mlx_mesh.launcher.programs.processes import end, forget, wait_until_gone
from mlx_mesh.launcher.remote import RemoteHost, run_program, stream_program
from mlx_mesh.launcher.state import AgentProcess, StateFolder, UpState, all_states, state_root
from mlx_mesh.mesh.errors import MeshError, NotRunningError, SettingsError
from mlx_mesh.mesh.hostfile_fields import check_name

LAUNCHER_STOP_S = 60.0  # it waits for its agents, after the open requests' drain_s
KILL_S = 5.0
AGENT_GONE_S = 15.0  # an agent whose stdin closed ends its engines and itself
PROGRAM_MARGIN_S = 20.0


def find_folder(
    target: str | None, environment: Mapping[str, str], *, with_leftovers: bool = False
) -> StateFolder:
    """The state folder for a mesh's NAME, a hostfile, or, without either, of the one mesh that runs.
    `with_leftovers`: when none runs, the one whose launcher was killed will do."""
    root = state_root(environment)
    if target is None:
        running: list[StateFolder] = []
        left: list[StateFolder] = []
        for folder, state in all_states(root):
            (running if state.is_alive else left).append(folder)
        found = running or (left if with_leftovers else [])
        if len(found) == 1:
            return found[0]
        names = ", ".join(folder.name for folder in found or left)
        if found:
            raise SettingsError(f"Several meshes {'run' if running else 'were left'}: {names}. Name one.")
        if left:
            told = f" Of {names} the launcher was killed: `mlx-mesh down` ends what it left."
        else:
            told = last_detached(root).last_words()
        raise NotRunningError(f"No mesh runs here.{told} Start one with `mlx-mesh up hosts.yaml`.")
    if target.endswith((".yaml", ".yml", ".json")) or "/" in target:
        return StateFolder(root, read_hostfile(target).name)
    for problem in check_name(target):
        raise SettingsError(f"The mesh name {target!r} {problem}.")
    return StateFolder(root, target)


def last_detached(root: Path) -> StateFolder:
    """The mesh whose detached launcher said something last; one that is not there when none ever did."""
    logs = [(log.stat().st_mtime, log.parent.name) for log in root.glob("*/launcher.log")]
    return StateFolder(root, max(logs, default=(0.0, "none"))[1])


@contextmanager
def leader_of(state: UpState) -> Iterator[RemoteHost]:
    """The leader's host, reached again."""
    host = state.hosts[0]
    remote = open_host(host.entry, state.ssh_config)
    try:
        yield remote
    finally:
        remote.close()


def api_key_of(state: UpState | None, key_file: str | None, environment: Mapping[str, str]) -> str:
    """The key to send: of the file given, the environment, or the file that `up` was given; '' = none."""
    keys = read_api_keys(key_file, environment)
    if not keys and state is not None and state.api_key_file:
        keys = read_api_keys(state.api_key_file, environment)
    return keys[0] if keys else ""


@contextmanager
def api_of(state: UpState, key_file: str | None, environment: Mapping[str, str]) -> Iterator[Api]:
    """The mesh's HTTP. A leader elsewhere that serves on its own loopback is reached through SSH."""
    if not state.url:
        raise ApiError(f"Mesh {state.name} is still starting: it has no address yet. See `mlx-mesh logs`.")
    key = api_key_of(state, key_file, environment)
    leader = state.hosts[0]
    host = Api(state.url).host
    if leader.is_local or not is_loopback(host):
        yield Api(state.url, key)
        return
    with leader_of(state) as remote:
        yield Api(state.url, key, via=remote)


def read_logs(
    state: UpState, rank: int | None, num_lines: int, follow: bool
) -> Iterator[dict[str, Any] | None]:
    """`{"rank", "line"}` for each line on the leader, then `{"folder", "ranks"}` (those that have said
    something), then what comes."""
    request = {"name": state.name, "rank": rank, "num_lines": num_lines, "follow": follow}
    with leader_of(state) as remote:
        yield from stream_program(remote, state.hosts[0].python, "tail_log", request)


# ---------------------------------------------------------------- down


def take_down(folder: StateFolder) -> tuple[list[str], list[str]]:
    """End a mesh: what was done, and what could not be done or confirmed. Raises NotRunningError."""
    state = folder.read()
    if state is None:
        raise NotRunningError(f"No mesh named {folder.name} runs here.{folder.last_words()}")
    done: list[str] = []
    if state.is_alive:
        os.kill(state.pid, signal.SIGTERM)
        limit_s = LAUNCHER_STOP_S + state.drain_s
        if wait_until_gone(state.pid, state.started, limit_s):
            if folder.read() is None:
                return [f"Mesh {state.name} is down."], []
            done.append("The launcher ended without a word; its agents are looked after now.")
        else:
            what = end(state.pid, state.started, 0.0, KILL_S)
            done.append(f"The launcher (pid {state.pid}) did not end within {limit_s:g} s: {what}.")
    else:
        done.append(f"The launcher of mesh {state.name} (pid {state.pid}) is gone without having cleaned up.")
    problems = _end_agents(state, done)
    if not problems:
        folder.clear()
        done.append(f"Mesh {state.name} is down.")
    return done, problems


def end_leftovers(folder: StateFolder) -> list[str]:
    """What a launcher of this name left behind that died without cleaning up; only after the name was
    claimed. Raises MeshError when an agent is still there afterwards."""
    state = folder.read()
    if state is None:
        return []
    done: list[str] = []
    problems = _end_agents(state, done)
    if problems:
        raise MeshError(
            f"An earlier run of mesh {state.name} is not gone: {'; '.join(problems)}. End it on "
            f"its host, then run `mlx-mesh down {state.name}`."
        )
    folder.clear()
    return done


def _end_agents(state: UpState, done: list[str]) -> list[str]:
    problems = []
    for host in state.hosts:
        agents = [agent for agent in state.agents if agent.host == host.name]
        for agent in agents:
            where = f"the agent on {host.name} (pid {agent.pid})"
            try:
                what = _end_agent(state, agent)
            except MeshError as error:
                problems.append(f"{where} may still run: {error}")
                continue
            if what == "alive":
                problems.append(f"{where} does not end even by SIGKILL")
            elif what == "other" and not agent.started:
                problems.append(f"{where} was never identified and may still run")
            elif what in ("ended", "killed"):
                done.append(f"{where[0].upper()}{where[1:]} was {what}.")
    return problems


def _end_agent(state: UpState, agent: AgentProcess) -> str:
    """It ends by itself when its launcher is gone; TERM and KILL are for one that does not."""
    host = next(host for host in state.hosts if host.name == agent.host)
    if host.is_local:
        what = end(agent.pid, agent.started, KILL_S, KILL_S, wait_s=AGENT_GONE_S)
        left = forget(state.name, host.name, agent.pid, KILL_S) if what in ("gone", "killed") else ""
        if left:
            raise MeshError(left)
        return what
    entry = host.entry
    remote = open_host(entry, state.ssh_config)
    request = {
        "do": "end",
        "processes": [[agent.pid, agent.started]],
        "wait_s": AGENT_GONE_S,
        "term_s": KILL_S,
        "kill_s": KILL_S,
    }
    try:
        limit_s = AGENT_GONE_S + 2 * KILL_S + PROGRAM_MARGIN_S
        what = str(run_program(remote, python_of(entry), "processes", request, limit_s)[str(agent.pid)])
        left = ""
        if what in ("gone", "killed"):
            request = {
                "do": "forget",
                "name": state.name,
                "host": host.name,
                "pid": agent.pid,
                "kill_s": KILL_S,
            }
            left = str(run_program(remote, python_of(entry), "processes", request, limit_s)["left"])
    finally:
        remote.close()
    if left:
        raise MeshError(left)
    return what
