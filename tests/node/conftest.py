"""Meshes of real agents and coordinators over scripted engines, proxies and inspect children."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from mlx_mesh.mesh.errors import ExitCode
from mlx_mesh.mesh.messages import (
    AgentConfig,
    AgentListening,
    Chunk,
    Deadlines,
    Failed,
    GenerateRequest,
    HostPlan,
    Join,
    LauncherEvent,
    MeshConfig,
    MeshReady,
    MeshStatus,
    ProxyEvent,
    ProxyRequest,
    Readiness,
    StatusQuery,
    StatusReply,
    Submit,
)
from mlx_mesh.mesh.types import PROTOCOL_VERSION, HostFacts, Versions
from mlx_mesh.node.children import Programs
from mlx_mesh.node.lifecycle import AgentProcess
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Member, Roster

E = TypeVar("E")
SECRET = "a secret for tests, long enough"
PROGRAMS = Path(__file__).parent / "programs"
GOOD_S = 30.0
"""What good news may take on a loaded machine; bad news has the deadlines of the mesh under test."""


class Recorder(Output):
    """Keeps what an agent says, and lets a test wait for it."""

    def __init__(self) -> None:
        super().__init__("")
        self.said: list[Any] = []
        self._news = asyncio.Event()

    def start(self) -> None:
        pass

    def event(self, event: LauncherEvent) -> None:
        self.said.append(event)
        self._news.set()

    def note(self, text: str) -> None:
        self.said.append(text)
        self._news.set()

    def close(self) -> None:
        pass

    def all(self, kind: type[E]) -> list[E]:
        return [event for event in self.said if isinstance(event, kind)]

    async def wait_for(
        self, kind: type[E], matches: Callable[[E], bool] = lambda event: True, within_s: float = GOOD_S
    ) -> E:
        """The first event of this kind that matches, past or future."""
        seen = 0
        async with asyncio.timeout(within_s):
            while True:
                for event in self.said[seen:]:
                    if isinstance(event, kind) and matches(event):
                        return event
                seen = len(self.said)
                self._news.clear()
                await self._news.wait()

    def text(self) -> str:
        return "\n".join(map(str, self.said))


class ProxyLine:
    """A client of the fake proxy."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self.events: list[ProxyEvent] = []

    def send(self, request: ProxyRequest) -> None:
        self._writer.write(msgspec.json.encode(request) + b"\n")

    async def next(self) -> ProxyEvent:
        line = await self._reader.readline()
        if not line:
            raise EOFError("the proxy is gone")
        event: ProxyEvent = msgspec.json.decode(line, type=ProxyEvent)
        self.events.append(event)
        return event

    async def wait_for(
        self, kind: type[E], matches: Callable[[E], bool] = lambda event: True, within_s: float = GOOD_S
    ) -> E:
        """The next event of this kind that matches, from now."""
        async with asyncio.timeout(within_s):
            while True:
                event = await self.next()
                if isinstance(event, kind) and matches(event):
                    return event

    async def ready(self) -> Readiness:
        return await self.wait_for(Readiness, lambda event: event.ready)

    async def answer(self, request_id: str, within_s: float = GOOD_S) -> tuple[list[int], str]:
        """All further tokens of a request and how it ended: its finish_reason, or "failed: CODE"."""
        ids: list[int] = []
        async with asyncio.timeout(within_s):
            while True:
                event = await self.next()
                match event:
                    case Chunk(chunk=chunk) if chunk.id == request_id:
                        ids.extend(chunk.token_ids)
                        if chunk.finish_reason is not None:
                            return ids, chunk.finish_reason
                    case Failed(id=failed_id) if failed_id == request_id:
                        return ids, f"failed: {event.code}"

    async def status(self) -> MeshStatus:
        self.send(StatusQuery(id="q"))
        return (await self.wait_for(StatusReply)).status

    def submit(self, request_id: str, max_tokens: int, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> None:
        self.send(
            Submit(request=GenerateRequest(id=request_id, prompt_ids=prompt_ids, max_tokens=max_tokens))
        )


@dataclasses.dataclass
class Host:
    process: AgentProcess
    output: Recorder
    task: asyncio.Task[ExitCode]

    async def ended(self, within_s: float = GOOD_S) -> ExitCode:
        async with asyncio.timeout(within_s):
            return await asyncio.shield(self.task)


class Mesh:
    """Some hosts in this process, each with its own agent and real children."""

    def __init__(self, tmp_path: Path, model: Path) -> None:
        self.tmp_path = tmp_path
        self.model = model
        self.state = tmp_path / "state"
        self._lines: list[asyncio.StreamWriter] = []
        self.hosts: dict[str, Host] = {}
        self.deadlines = Deadlines(
            join_s=20.0,
            spawn_s=20.0,
            connect_s=10.0,
            load_stall_s=10.0,
            warmup_s=10.0,
            stop_s=2.0,
            drain_s=5.0,
            heartbeat_interval_s=0.2,
            engine_silence_s=2.0,
            heartbeat_timeout_s=4.0,
            rejoin_timeout_s=8.0,
        )
        self.engine_program: tuple[str, ...] = ()
        self.engine_script: dict[str, str] = {}
        self.proxy_script: dict[str, str] = {}
        self.plans = [HostPlan(name="mac1"), HostPlan(name="mac2")]
        self.max_restarts = 3
        self.is_paranoid = self.is_elastic = False
        self.max_open = 288
        self.num_replicas = 1
        self.coordinator = "127.0.0.1:0"
        self.serve_port = 0
        self.secret = SECRET

    @staticmethod
    def undisturbed_tokens(count: int, prompt_ids: tuple[int, ...] = (1, 2, 3)) -> list[int]:
        """The first `count` tokens of the fake engine's answer."""
        return [(sum(prompt_ids) * 31 + position * 7) % 1000 for position in range(count)]

    def write_scripts(self) -> None:
        (self.tmp_path / "engine.json").write_text(json.dumps(self.engine_script))
        (self.tmp_path / "proxy.json").write_text(json.dumps(self.proxy_script))

    @property
    def programs(self) -> Programs:
        python = (sys.executable, "-I", "-u")
        return Programs(
            engine=self.engine_program
            or (*python, str(PROGRAMS / "fake_engine.py"), "--script", str(self.tmp_path / "engine.json")),
            proxy=(*python, str(PROGRAMS / "fake_proxy.py"), "--script", str(self.tmp_path / "proxy.json")),
            inspect=(*python, str(PROGRAMS / "fake_inspect.py")),
        )

    def mesh_config(self) -> MeshConfig:
        return MeshConfig(
            name="test",
            hosts=tuple(self.plans),
            serve_port=self.serve_port,
            max_restarts=self.max_restarts,
            paranoid=self.is_paranoid,
            elastic=self.is_elastic,
            max_sequences=1,
            max_queue=self.max_open - 1,
            num_replicas=self.num_replicas,
            deadlines=self.deadlines,
        )

    def config(self, host: str, **changes: Any) -> AgentConfig:
        """Of the first host with the mesh, of another one without."""
        is_first = host == self.plans[0].name
        slots = next((plan.slots for plan in self.plans if plan.name == host), 1)
        config = AgentConfig(
            mesh_name="test",
            run_id="run",
            host=host,
            model=str(self.model),
            secret=self.secret,
            coordinator=self.coordinator,
            slots=slots,
            attached=False,
            deadlines=self.deadlines,
            mesh=self.mesh_config() if is_first else None,
        )
        return msgspec.structs.replace(config, **changes)

    def start(self, host: str, key: str = "", **changes: Any) -> Host:
        """Start an agent in this process; `changes` go to its config."""
        self.write_scripts()
        output = Recorder()
        process = AgentProcess(
            self.config(host, **changes),
            programs=self.programs,
            state=self.state / (key or host),
            output=output,
        )
        task = asyncio.create_task(process.run(), name=f"agent process {key or host}")
        self.hosts[key or host] = Host(process, output, task)
        return self.hosts[key or host]

    async def start_leader(self, **changes: Any) -> Host:
        """Start the first host and learn where its coordinator listens."""
        leader = self.start(self.plans[0].name, **changes)
        listening = await leader.output.wait_for(AgentListening)
        self.coordinator = listening.coordinator
        return leader

    async def up(self) -> tuple[Host, ProxyLine]:
        """All hosts, ready."""
        leader = await self.start_leader()
        for plan in self.plans[1:]:
            self.start(plan.name)
        ready = await leader.output.wait_for(MeshReady)
        line = await self.connect(ready.url)
        await line.ready()
        return leader, line

    async def connect(self, url: str) -> ProxyLine:
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        line = ProxyLine(reader, writer)
        self._lines.append(writer)
        return line

    async def close(self) -> None:
        for writer in self._lines:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        for host in reversed(list(self.hosts.values())):
            host.process.stop("the test is over", hurry=True)
        async with asyncio.timeout(GOOD_S):
            await asyncio.gather(*(host.task for host in self.hosts.values()))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Tests of this folder may be coroutines; each has a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that looks like a model from outside."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "fake"}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    return folder


@pytest.fixture
def run_mesh(tmp_path: Path, model: Path) -> Callable[[], contextlib.AbstractAsyncContextManager[Mesh]]:
    """`async with run_mesh() as mesh`: nothing of it is left afterwards."""

    @contextlib.asynccontextmanager
    async def run() -> AsyncIterator[Mesh]:
        mesh = Mesh(tmp_path, model)
        try:
            yield mesh
        finally:
            await mesh.close()

    return run


@pytest.fixture(scope="session")
def seat_all() -> Callable[[Roster], None]:
    """Gives every empty seat of a roster an agent that joined at time 0; its socket identity is the host."""
    facts = HostFacts(
        hostname="box",
        system="Linux",
        machine="x86_64",
        chip="",
        memory_bytes=8,
        usable_memory_bytes=8,
        addresses=("127.0.0.1",),
        versions=Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3"),
    )

    def join(host: str, slots: int) -> Join:
        return Join(
            protocol=PROTOCOL_VERSION,
            mesh_name="m",
            host=host,
            agent_pid=1,
            slots=slots,
            ranks=(),
            world_size=0,
            address="127.0.0.1",
            facts=facts,
        )

    def seat(roster: Roster) -> None:
        for place in roster.missing():
            name = place.plan.name
            place.member = Member(peer=name.encode(), join=join(name, place.plan.slots), beat_at=0.0)

    return seat
