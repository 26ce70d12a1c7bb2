"""The agent's side of the embedder: a child that dies, freezes or cannot load, and what clients hear."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.messages import Embed, Embedded, EmbedderReady, Failed, Metric, ProxyEvent
from mlx_mesh.node import embedder as embedder_module
from mlx_mesh.node.children import Programs, child_environment
from mlx_mesh.node.embedder import Embedder
from mlx_mesh.node.facts import embedding_working_bytes, gather_facts

WITHIN_S = 60.0


class Desk:
    """Keeps what the proxy would hear."""

    def __init__(self, model: Path, stall_s: float = WITHIN_S) -> None:
        self.events: asyncio.Queue[ProxyEvent] = asyncio.Queue()
        self.notes: asyncio.Queue[str] = asyncio.Queue()
        self.embedder = Embedder(
            program=Programs.default().embedder,
            model=model,
            environment=child_environment(),
            note=self.notes.put_nowait,
            on_change=lambda process: None,
            stall_s=stall_s,
        )
        self.embedder.attach(self.events.put_nowait, lambda line: None)

    async def ready(self) -> None:
        async with asyncio.timeout(WITHIN_S):
            while "is ready" not in await self.notes.get():
                pass

    async def next(self) -> ProxyEvent:
        async with asyncio.timeout(WITHIN_S):
            return await self.events.get()


@contextlib.asynccontextmanager
async def running(desk: Desk) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(desk.embedder.run())
    try:
        yield task
    finally:
        await desk.embedder.stop()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux tells cheaply who is stopped")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_embedder_that_ends_or_freezes_is_replaced_and_its_requests_may_be_sent_again(
    tiny_bert: Path, number: signal.Signals
) -> None:
    async def scenario() -> None:
        desk = Desk(tiny_bert)
        async with running(desk):
            desk.embedder.submit(Embed(id="early", inputs=("a",)))
            early = await desk.next()
            assert isinstance(early, Failed) and (early.code, early.retry_after_s > 0) == ("not_ready", True)
            await desk.ready()
            desk.embedder.submit(Embed(id="one", inputs=("a", (5, 6))))
            before = await desk.next()
            assert isinstance(before, Embedded) and before.num_tokens == 5
            rows = np.frombuffer(before.vectors, "<f4").reshape(2, before.num_dimensions)
            assert np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
            pid = desk.embedder.status().pid
            os.kill(pid, signal.SIGSTOP)  # so that the request is still open then
            desk.embedder.submit(Embed(id="two", inputs=("a",)))
            os.kill(pid, number)
            failed = await desk.next()
            assert isinstance(failed, Failed) and failed.id == "two" and failed.code == "not_ready"
            assert failed.retry_after_s > 0
            await desk.ready()
            desk.embedder.submit(Embed(id="three", inputs=("a", (5, 6))))
            after = await desk.next()
            assert isinstance(after, Embedded) and after.vectors == before.vectors
            status = desk.embedder.status()
            assert (status.restarts, status.ready, status.pid != pid) == (1, True, True)
            told = msgspec.msgpack.encode(desk.embedder.metrics())  # as they cross to the proxy
            metrics = msgspec.msgpack.decode(told, type=tuple[Metric, ...])
            values = {metric.name: metric.value for metric in metrics}
            assert values["mlx_mesh_embedding_restarts_total"] == 1

    asyncio.run(scenario())


def test_one_that_computes_nothing_though_it_has_work_is_stuck(tmp_path: Path) -> None:
    """A child that loads and then only listens."""
    program = tmp_path / "deaf.py"
    program.write_text(
        "import socket, sys, msgspec\n"
        "from mlx_mesh.mesh.messages import EmbedderConfig, EmbedderReady\n"
        "from mlx_mesh.node.pipe import BlockingPipe\n"
        "sock = socket.socket(fileno=int(sys.argv[2]))\n"
        "pipe = BlockingPipe(sock, msgspec.msgpack.Decoder(EmbedderConfig))\n"
        "pipe.receive()\n"
        "pipe.send(EmbedderReady(num_dimensions=1, max_tokens=1, weights_bytes=1))\n"
        "while sock.recv(100): pass\n"
    )

    async def scenario() -> None:
        desk = Desk(tmp_path, stall_s=0.3)
        desk.embedder._program = (sys.executable, str(program))
        async with running(desk):
            await desk.ready()
            desk.embedder.submit(Embed(id="one", inputs=("a",)))
            failed = await desk.next()
            assert isinstance(failed, Failed) and "0.3 s" in failed.message and failed.retry_after_s > 0

    asyncio.run(scenario())


def test_a_model_that_cannot_be_used_ends_the_start_with_its_reason(tiny_bert: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "bert"))
    (folder / "tokenizer.json").unlink()

    async def scenario() -> None:
        desk = Desk(folder)
        async with running(desk) as task:
            async with asyncio.timeout(WITHIN_S):
                with pytest.raises(PreflightError, match=r"has no tokenizer\.json"):
                    await task

    asyncio.run(scenario())


def test_the_leader_has_less_memory_for_ranks_by_the_embedding_model(
    tiny_llama: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    facts = gather_facts(str(tiny_llama), "", str(tiny_bert))
    size = (tiny_bert / "model.safetensors").stat().st_size
    assert facts.embedding_bytes == size + embedding_working_bytes(tiny_bert)
    assert facts.engine_memory_bytes == facts.usable_memory_bytes - facts.embedding_bytes
    assert gather_facts(str(tiny_llama)).embedding_bytes == 0
    folder = Path(shutil.copytree(tiny_bert, tmp_path / "bert"))
    (folder / "model.safetensors").unlink()
    assert "no weights" in gather_facts(str(tiny_llama), "", str(folder)).embedding_error


def test_open_requests_together_are_bounded_by_their_size_and_one_alone_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedder_module, "MAX_OPEN_ITEMS", 100)

    class Pipe:
        def send(self, message: object) -> None:
            taken.append(message)

    async def scenario() -> list[ProxyEvent]:
        desk = Desk(tmp_path)
        monkeypatch.setattr(desk.embedder, "_pipe", Pipe())
        monkeypatch.setattr(
            desk.embedder, "_ready", EmbedderReady(num_dimensions=1, max_tokens=9, weights_bytes=1)
        )
        for number, inputs in enumerate((("a" * 150,), ("b",))):
            desk.embedder.submit(Embed(id=f"{number}", inputs=inputs))
        desk.embedder.cancel("0")
        desk.embedder.submit(Embed(id="2", inputs=("c" * 60, tuple(range(30)))))
        return [desk.events.get_nowait() for _ in range(desk.events.qsize())]

    taken: list[object] = []
    (refused,) = asyncio.run(scenario())
    assert isinstance(refused, Failed) and (refused.id, refused.code) == ("1", "queue_full")
    assert [message.id for message in taken if isinstance(message, Embed)] == ["0", "2"]
