"""A stand-in for the agents: starts real engine children over socket pairs and plays one epoch with them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.kv_options import KvOptions
from mlx_mesh.mesh.messages import (
    Cancel,
    Connect,
    EngineConfig,
    EngineHello,
    EngineReport,
    GenerateRequest,
    JoinPlans,
    Load,
    PhaseReached,
    RequestFailed,
    SamplingParams,
    StopEngine,
    Submit,
    TokenLogprobs,
    Tokens,
    WarmUp,
)
from mlx_mesh.mesh.types import Backend, Phase, Placement, Shard, Sharding
from mlx_mesh.node.pipe import BlockingPipe

R = TypeVar("R")

OPENBLAS = Path("/usr/lib/x86_64-linux-gnu/openblas-pthread/libopenblas.so.0")
DEADLINE_S = 60.0  # for everything that a test waits for; a healthy wait takes far less
_patience = {"deadline_s": DEADLINE_S}


class EngineProcess:
    """One engine child and what it reported."""

    def __init__(self, config: EngineConfig | None, code: str = "") -> None:
        """`code` runs before the engine's main function."""
        ours, theirs = socket.socketpair()
        start = ["-m", "mlx_mesh.node.engine"]
        if code:
            start = [
                "-c",
                f"{code}\nimport sys\nfrom mlx_mesh.node.engine.__main__ import main\nsys.exit(main())",
            ]
        environment = dict(os.environ)
        if OPENBLAS.exists():  # MLX's CPU wheel multiplies far slower
            environment |= {"LD_PRELOAD": str(OPENBLAS), "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-u", *start, "--fd", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                cwd="/",
                env=environment,
            )
        self.rank = config.rank if config is not None else 0
        self.reports: list[EngineReport] = []
        self.output: list[str] = []
        self._socket = ours
        self._pipe: BlockingPipe[EngineReport] = BlockingPipe(ours, msgspec.msgpack.Decoder(EngineReport))
        self._changed = threading.Condition()
        self._is_over = False
        self._threads = [
            threading.Thread(target=self._read_reports, daemon=True),
            threading.Thread(target=self._read_output, daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        if config is not None:
            self._pipe.send(config)

    def send(self, message: msgspec.Struct) -> None:
        self._pipe.send(message)

    def wait_for(self, find: Callable[[Sequence[EngineReport]], R | None], what: str) -> R:
        """What `find` finds in the reports so far, waiting for it."""
        end = time.monotonic() + _patience["deadline_s"]
        with self._changed:
            while (found := find(self.reports)) is None:
                left = end - time.monotonic()
                if left <= 0 or self._is_over:
                    raise AssertionError(f"rank {self.rank}: no {what}\n{self.story()}")
                self._changed.wait(left)
        return found

    def wait_for_kind(self, kind: type[R], accept: Callable[[R], bool] = lambda _: True) -> R:
        return self.wait_for(
            lambda reports: next((r for r in reports if isinstance(r, kind) and accept(r)), None),
            kind.__name__,
        )

    def wait_for_phase(self, phase: Phase) -> PhaseReached:
        return self.wait_for_kind(PhaseReached, lambda report: report.phase is phase)

    def wait_for_exit(self) -> int:
        status = self.process.wait(DEADLINE_S)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        return status

    def story(self) -> str:
        return "\n".join([*map(repr, self.reports[-5:]), *self.output[-30:]])

    def hang_up(self) -> None:
        """End of file for the engine, as when its agent dies."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(DEADLINE_S)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE_S)
        self._socket.close()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read_reports(self) -> None:
        with contextlib.suppress(OSError):
            while (report := self._pipe.receive()) is not None:
                with self._changed:
                    self.reports.append(report)
                    self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output.append(line.decode(errors="replace").rstrip())


@dataclass(slots=True)
class Answer:
    """All that came for one request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    failure: RequestFailed | None = None
    cached_tokens: int = 0
    prompt_tokens: int = 0

    @property
    def is_over(self) -> bool:
        return self.finish_reason is not None or self.failure is not None


def engine_config(**changes: Any) -> EngineConfig:
    fields: dict[str, Any] = {
        "epoch": 1,
        "rank": 0,
        "world_size": 1,
        "host": "localhost",
        "secret": secrets.token_hex(32),
        "plan_address": "127.0.0.1",
        "heartbeat_interval_s": 0.2,
    }
    return EngineConfig(**(fields | changes))


class EngineMesh:
    """The engines of one epoch; used as a context."""

    def __init__(self, world_size: int, *, codes: Sequence[str] = (), epochs: Sequence[int] = ()) -> None:
        """`codes[rank]` runs in that engine before its main function; `epochs` are all 1 by default."""
        secret = secrets.token_hex(32)
        self.world_size = world_size
        self.engines = [
            EngineProcess(
                engine_config(
                    rank=rank,
                    world_size=world_size,
                    secret=secret,
                    epoch=epochs[rank] if epochs else 1,
                ),
                codes[rank] if codes else "",
            )
            for rank in range(world_size)
        ]

    @property
    def leader(self) -> EngineProcess:
        return self.engines[0]

    def connect(self) -> None:
        addresses = tuple((f"127.0.0.1:{port}",) for port in free_ports(self.world_size))
        for engine in self.engines:
            engine.wait_for_kind(EngineHello)
        for engine in self.engines:
            engine.send(
                Connect(
                    epoch=1,
                    rank=engine.rank,
                    world_size=self.world_size,
                    backend=Backend.NONE if self.world_size == 1 else Backend.RING,
                    addresses=addresses if self.world_size > 1 else (),
                )
            )
        endpoint = self.leader.wait_for_phase(Phase.CONNECTED).plan_endpoint
        for engine in self.engines[1:]:
            engine.wait_for_phase(Phase.CONNECTED)
            engine.send(JoinPlans(endpoint=endpoint))

    def held(self) -> list[int]:
        """Bytes of weights that each rank says it has read."""
        return [engine.wait_for_phase(Phase.LOADED).weights_bytes for engine in self.engines]

    def load(
        self,
        model: Path,
        placement: Placement,
        *,
        prefill_step_size: int = 0,
        kv: KvBudget | None = None,
        kv_options: KvOptions | None = None,
        adapter: str = "",
        with_vision: bool = False,
    ) -> None:
        for engine in self.engines:
            engine.send(
                Load(
                    model=str(model),
                    placement=placement,
                    max_sequences=8,
                    prefill_step_size=prefill_step_size,
                    context_length=2048,
                    kv=kv or KvBudget(),
                    kv_options=kv_options or KvOptions(),
                    adapter=adapter,
                    with_vision=with_vision,
                )
            )
        for engine in self.engines:
            engine.wait_for_phase(Phase.LOADED)
        for engine in self.engines:
            engine.send(WarmUp())
        for engine in self.engines:
            engine.wait_for_phase(Phase.READY)

    def submit(self, *requests: GenerateRequest) -> None:
        for request in requests:
            self.leader.send(Submit(request=request))

    def cancel(self, request_id: str) -> None:
        self.leader.send(Cancel(id=request_id))

    def answer(self, request_id: str) -> Answer:
        """The whole answer, waiting for its end."""

        def find(reports: Sequence[EngineReport]) -> Answer | None:
            answer = collect(reports, request_id)
            return answer if answer.is_over else None

        return self.leader.wait_for(find, f"end of {request_id}")

    def wait_for_tokens(self, request_id: str, count: int) -> None:
        self.leader.wait_for(
            lambda reports: len(collect(reports, request_id).token_ids) >= count or None,
            f"{count} tokens of {request_id}",
        )

    def stop(self) -> list[int]:
        """Exit statuses by rank."""
        self.leader.send(StopEngine())
        return [engine.wait_for_exit() for engine in self.engines]

    def close(self) -> None:
        for engine in self.engines:
            engine.close()

    def __enter__(self) -> EngineMesh:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def collect(reports: Sequence[EngineReport], request_id: str) -> Answer:
    answer = Answer()
    for report in reports:
        if isinstance(report, RequestFailed) and report.id == request_id:
            answer.failure = report
        elif isinstance(report, Tokens):
            for chunk in report.chunks:
                if chunk.id == request_id:
                    assert not answer.is_over, f"a chunk after the end of {request_id}"
                    answer.token_ids += chunk.token_ids
                    answer.logprobs += chunk.logprobs
                    answer.finish_reason = chunk.finish_reason
                    answer.cached_tokens += chunk.cached_tokens
                    answer.prompt_tokens += chunk.prompt_tokens
    return answer


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for sock in sockets:
            sock.bind(("127.0.0.1", 0))
        return [sock.getsockname()[1] for sock in sockets]


def split(sharding: Sharding, num_layers: int, stages: Sequence[int]) -> Placement:
    """A placement; `stages`: layers per stage in the model's order (pipeline) or weights by rank (tensor)."""
    if sharding is Sharding.PIPELINE:
        ends = [sum(stages[: i + 1]) for i in range(len(stages))]
        ranges = [(end - size, end) for end, size in zip(ends, stages, strict=True)][::-1]
    else:
        ranges = [(0, num_layers)] * len(stages)
    shards = tuple(
        Shard(
            rank=rank,
            host="localhost",
            start_layer=start,
            end_layer=end,
            weight=1 if sharding is Sharding.PIPELINE else stages[rank],
        )
        for rank, (start, end) in enumerate(ranges)
    )
    return Placement(sharding=sharding, model_digest="", num_layers=num_layers, shards=shards)


def greedy(request_id: str, prompt_ids: Sequence[int], max_tokens: int, **other: Any) -> GenerateRequest:
    return GenerateRequest(
        id=request_id,
        prompt_ids=tuple(prompt_ids),
        max_tokens=max_tokens,
        sampling=SamplingParams(temperature=0.0),
        **other,
    )


def run_ring(program: Path, world_size: int, *words: str, limit_s: float) -> list[dict[str, Any]]:
    """What rank 0 of `program RANK PORTS WORDS...` prints as JSON lines. All ranks get ready, which may take
    any time each, before they run together for at most `limit_s`."""
    ports = ",".join(map(str, free_ports(world_size)))
    dropped = ("MLX_", "RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", str(program), str(rank), ports, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", rank.communicate()[1][-3000:]
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        output, errors = ranks[0].communicate(timeout=limit_s)
        statuses = [ranks[0].returncode, *(rank.wait(timeout=30) for rank in ranks[1:])]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert statuses == [0] * world_size, errors[-3000:]
    return [json.loads(line) for line in output.splitlines()]


@dataclass(frozen=True, slots=True)
class Bench:
    """What tests use: see the functions and classes above."""

    mesh: type[EngineMesh] = EngineMesh
    engine: type[EngineProcess] = EngineProcess
    engine_config: Callable[..., EngineConfig] = engine_config
    split: Callable[..., Placement] = split
    greedy: Callable[..., GenerateRequest] = greedy
    free_ports: Callable[[int], list[int]] = free_ports
    run_ring: Callable[..., list[dict[str, Any]]] = run_ring

    def be_patient(self, deadline_s: float) -> None:
        """For this test every wait may take longer."""
        _patience["deadline_s"] = deadline_s


@pytest.fixture(scope="session")
def bench() -> Bench:
    return Bench()


@pytest.fixture(autouse=True)
def usual_patience() -> Iterator[None]:
    yield
    _patience["deadline_s"] = DEADLINE_S
