"""One agent process from start to end: startup, main loop, shutdown.

The leader's process also holds the coordinator, the HTTP socket and the proxy. Whatever ends it (a signal,
the end of stdin, the coordinator's word, an error), its engines are gone, its run file is removed and one
line says why before it exits.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import signal
import socket
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import zmq.asyncio

from mlx_mesh.mesh.errors import ExitCode, MeshError, PreflightError, SettingsError
from mlx_mesh.mesh.messages import (
    AgentConfig,
    AgentFailed,
    AgentListening,
    AgentMessage,
    AgentStarted,
    AgentStopped,
    Farewell,
    LogLine,
    RankLog,
)
from mlx_mesh.mesh.types import HostFacts
from mlx_mesh.node.agent import Agent, AgentEnd
from mlx_mesh.node.blas import ADVICE, engine_environment, find_openblas, is_wanted
from mlx_mesh.node.channel import AgentChannel, CoordinatorChannel, new_identity, split_endpoint
from mlx_mesh.node.children import Programs, child_environment
from mlx_mesh.node.embedder import Embedder
from mlx_mesh.node.engines import Engines
from mlx_mesh.node.facts import gather_facts, resolve_model
from mlx_mesh.node.host_watch import HostWatch
from mlx_mesh.node.keys import MeshKeys, derive_keys
from mlx_mesh.node.logs import RankLogs
from mlx_mesh.node.output import Output
from mlx_mesh.node.ports import bind_http
from mlx_mesh.node.reception import Reception
from mlx_mesh.node.run_file import RunFile, safe_name, state_root

if TYPE_CHECKING:
    from mlx_mesh.node.announce import Announcer

_LOOPBACK = "127.0.0.1"
_FAREWELL_BYTES = 64 * 1024


class AgentProcess:
    """`run` once; `stop` from the same loop."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        programs: Programs | None = None,
        state: Path | None = None,
        output: Output | None = None,
    ) -> None:
        """`programs` and `state` (root of the state folders) are for tests."""
        self._config = config
        self._programs = programs or Programs.default(config.faults)
        self._folder = (state or state_root()) / safe_name(config.mesh_name)
        self._output = output or Output(config.marker, is_json=config.log_format == "json")
        self._context = zmq.asyncio.Context()
        self._cleanup = contextlib.AsyncExitStack()
        self._run_file: RunFile | None = None
        self._logs = RankLogs(
            self._folder / "logs", is_json=config.mesh is not None and config.mesh.log_format == "json"
        )
        self._watch = HostWatch(self._output.note)
        self._agent: Agent | None = None
        self._reception: Reception | None = None
        self._stop_request: tuple[str, bool] | None = None

    async def run(self) -> ExitCode:
        """Returns the exit status; never raises for what a user may cause."""
        self._output.start()
        end: AgentEnd
        try:
            async with self._cleanup:
                try:
                    await self._startup()
                    end = await self._main_loop()
                except MeshError as error:
                    end = AgentEnd(str(error), error.exit_code, is_error=True)
                except Exception as error:
                    self._output.note(traceback.format_exc().rstrip())
                    end = AgentEnd(f"internal error: {error!r}", ExitCode.FAILED, is_error=True)
        finally:
            await asyncio.to_thread(self._context.term)
        if end.is_error:
            self._output.event(AgentFailed(message=end.reason, exit_code=end.exit_code))
        else:
            self._output.event(AgentStopped(reason=end.reason, by_coordinator=end.by_coordinator))
        await asyncio.to_thread(self._output.close)
        return end.exit_code

    @property
    def is_stopping(self) -> bool:
        """Somebody asked for the end."""
        return self._stop_request is not None

    def stop(self, reason: str, *, hurry: bool, is_failure: bool = False) -> None:
        """Ask for the end: a leader lets open requests finish unless in a hurry, and tells their clients
        whether it was wished for."""
        self._stop_request = (reason, hurry)
        if self._reception is not None:
            self._reception.stop(reason, hurry=hurry, is_failure=is_failure)
        elif self._agent is not None:
            self._agent.stop(reason)

    # ------------------------------------------------------------ startup

    async def _startup(self) -> None:
        config = self._config
        check_config(config)
        if config.offline:  # for this process and all its children
            os.environ["HF_HUB_OFFLINE"] = "1"
        run_file, notes = await asyncio.to_thread(
            RunFile.claim, self._folder, config.mesh_name, config.host, config.run_id
        )
        self._run_file = run_file
        self._cleanup.callback(run_file.release)
        for note in notes:
            self._output.note(note)
        self._output.event(AgentStarted(host=config.host, agent_pid=os.getpid()))
        listen = self._bind_http()  # before anything that takes time
        keys = derive_keys(config.secret)
        channel = self._open_coordinator(keys)
        embedding = config.mesh.embedding_model if config.mesh is not None else ""
        facts, model = await asyncio.to_thread(_look_around, config.model, config.adapter, embedding)
        problem = facts.adapter_error or facts.tokenizer_error or facts.embedding_error
        if config.mesh is not None and problem:
            raise PreflightError(problem)
        self._cleanup.push_async_callback(self._watch.stop)
        await self._watch.start()
        identity = new_identity(config.host, config.run_id)
        self._open_agent(keys, identity, facts, model)
        if config.mesh is not None:
            assert listen is not None and channel is not None
            self._logs.begin()
            self._cleanup.callback(self._logs.close)
            self._reception = Reception(
                config,
                channel,
                local_peer=identity,
                model=model,
                programs=self._programs,
                listen=listen,
                url=_url_of(config.mesh.serve_host, listen),
                output=self._output,
                logs=self._logs,
                on_proxy=lambda process: self._note_run(lambda file: file.update(proxy=process)),
                embedder=self._make_embedder(embedding),
            )
        if config.announce:
            announcer = await asyncio.to_thread(_announce, safe_name(config.mesh_name)[:63])
            self._cleanup.push_async_callback(asyncio.to_thread, announcer.stop)
        if self._stop_request is not None:  # it came while we were starting
            reason, hurry = self._stop_request
            self.stop(reason, hurry=hurry)

    def _make_embedder(self, model: str) -> Embedder | None:
        if not model:
            return None
        return Embedder(
            program=self._programs.embedder,
            model=resolve_model(model),
            environment=child_environment(self._preload()),
            note=self._output.note,
            on_change=lambda process: self._note_run(lambda file: file.update(embedder=process)),
        )

    def _bind_http(self) -> socket.socket | None:
        mesh = self._config.mesh
        if mesh is None:
            return None
        listen = bind_http(mesh.serve_host, mesh.serve_port)
        self._cleanup.callback(listen.close)
        self._note_run(lambda file: file.update(url=_url_of(mesh.serve_host, listen)))
        return listen

    def _open_coordinator(self, keys: MeshKeys) -> CoordinatorChannel | None:
        if self._config.mesh is None:
            return None
        channel = CoordinatorChannel.open(self._context, keys, self._config.coordinator)
        self._cleanup.push_async_callback(channel.close)
        self._note_run(lambda file: file.update(coordinator=channel.endpoint))
        self._output.event(AgentListening(coordinator=channel.endpoint, agent_pid=os.getpid()))
        return channel

    def _open_agent(self, keys: MeshKeys, identity: bytes, facts: HostFacts, model: Path | None) -> None:
        config = self._config
        is_local = config.mesh is not None
        endpoint = "" if is_local else config.coordinator
        channel = AgentChannel.open(self._context, identity, keys, endpoint)
        self._cleanup.push_async_callback(channel.close)
        engines = Engines(
            program=self._programs.engine,
            environment=child_environment(self._preload()),
            host=config.host,
            secret=config.secret,
            report=lambda message: self._report(channel, message),
            on_change=lambda engines: self._note_run(lambda file: file.update(engines=engines)),
        )
        self._agent = Agent(
            config,
            channel,
            engines,
            facts=facts,
            address=_address_towards(config),
            model=model,
            is_local=is_local,
            note=self._output.note,
            condition=lambda: self._watch.condition,
        )

    def _preload(self) -> dict[str, str]:
        if not is_wanted():
            return {}
        library = find_openblas()
        if not library:
            self._output.note(ADVICE)
        return engine_environment(library)

    def _report(self, channel: AgentChannel, message: AgentMessage) -> None:
        channel.send(message)
        if isinstance(message, RankLog) and self._config.mesh is None and not self._config.marker:
            # Started by hand: this terminal is where the user looks.
            self._output.event(LogLine(rank=message.rank, host=self._config.host, line=message.line))

    def _note_run(self, change: Callable[[RunFile], None]) -> None:
        assert self._run_file is not None
        try:
            change(self._run_file)
        except OSError as error:
            self._output.note(f"the run file {self._run_file.path} cannot be written: {error}")

    # ------------------------------------------------------------ main loop

    async def _main_loop(self) -> AgentEnd:
        assert self._agent is not None
        agent = asyncio.create_task(self._agent.run(), name="agent")
        if self._reception is None:
            return await agent
        coordinator = asyncio.create_task(self._reception.run(), name="coordinator")
        try:
            await asyncio.wait({agent, coordinator}, return_when=asyncio.FIRST_COMPLETED)
            if agent.done():
                self._reception.stop("the leader's agent ended", hurry=True)
            await coordinator
            return AgentEnd(
                self._stop_request[0] if self._stop_request else "done", ExitCode.OK, is_error=False
            )
        finally:
            self._agent.stop("the coordinator ended")
            await agent


# ---------------------------------------------------------------- starting one


async def serve_agent(process: AgentProcess, *, stdin_fd: int | None) -> ExitCode:
    """Run an agent that also ends by signals and, unless `stdin_fd` is None, by the end of its input."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
            continue  # nohup
        loop.add_signal_handler(number, _on_signal, process, number.name)
    if stdin_fd is not None:
        threading.Thread(
            target=_watch_input, args=(stdin_fd, loop, process), name="stdin", daemon=True
        ).start()
    return await process.run()


def _on_signal(process: AgentProcess, name: str) -> None:
    """The first signal asks for a clean end, the next one for a quick one."""
    process.stop(name, hurry=process.is_stopping)


def _watch_input(fd: int, loop: asyncio.AbstractEventLoop, process: AgentProcess) -> None:
    """In a thread: a read that blocks works on files, pipes and terminals alike."""
    said = b""
    with contextlib.suppress(OSError):
        while data := os.read(fd, 4096):
            said = (said + data)[-_FAREWELL_BYTES:]
            if said.endswith(b"\n") and (wish := read_farewell(said)).drain:
                said = b""
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(partial(process.stop, wish.reason, hurry=False))
    why = read_farewell(said)
    with contextlib.suppress(RuntimeError):  # the loop is closed already
        loop.call_soon_threadsafe(
            lambda: process.stop(why.reason, hurry=True, is_failure=why.is_failure),
        )


def read_farewell(said: bytes) -> Farewell:
    """Why a launcher closed its agent's input, by the last line that it wrote there."""
    lines = said.splitlines()
    with contextlib.suppress(msgspec.MsgspecError):
        return msgspec.json.decode(lines[-1] if lines else b"", type=Farewell)
    return Farewell(reason="the launcher is gone (end of input)", is_failure=False)


# ---------------------------------------------------------------- pieces


def check_config(config: AgentConfig) -> None:
    """Raises SettingsError for what cannot work whatever the host is like."""
    mesh = config.mesh
    if mesh is None:
        try:
            split_endpoint(config.coordinator)
        except ValueError as error:
            raise SettingsError(f"the coordinator's address is wrong: {error}") from error
        return
    first = mesh.hosts[0].name
    if first not in ("", config.host):
        raise SettingsError(
            f"the coordinator must run on the first host, {first}, but this is {config.host}."
        )
    if not config.coordinator and len(mesh.hosts) > 1:
        raise SettingsError("a mesh of several hosts needs an address for the coordinator to listen on.")
    if not mesh.api_keys and not _is_loopback(mesh.serve_host):
        raise SettingsError(
            f"serving on {mesh.serve_host} needs an API key: set MLX_MESH_API_KEY or --api-key-file, "
            "or serve on 127.0.0.1."
        )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _announce(mesh: str) -> Announcer:
    """Tell the network that this host takes part."""
    from mlx_mesh.node.announce import Announcer, Wish  # zeroconf takes a third of a second to load

    announcer = Announcer(Wish(role="node", mesh=mesh), lambda _: None)
    announcer.start()
    return announcer


def _look_around(model: str, adapter: str, embedding: str) -> tuple[HostFacts, Path | None]:
    """Facts, and the model's folder if it is complete. Blocks."""
    facts = gather_facts(model, adapter, embedding)
    if facts.model_error:
        return facts, None
    try:
        return facts, resolve_model(model)
    except PreflightError:  # it went away in between; the facts of the next run will say so
        return facts, None


def _address_towards(config: AgentConfig) -> str:
    """The IPv4 by which this host reaches the coordinator; no packet is sent."""
    if config.address:
        return config.address
    if not config.coordinator:
        return _LOOPBACK
    address, port = split_endpoint(config.coordinator)
    if config.mesh is not None:
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((address, port or 1))
        except OSError:  # no route yet; the join deadline will tell if none comes
            return ""
        return str(probe.getsockname()[0])


def _url_of(host: str, listen: socket.socket) -> str:
    port = listen.getsockname()[1]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
