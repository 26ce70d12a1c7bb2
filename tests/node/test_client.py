"""The coordinator's client over a real socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Coroutine

import msgspec
import pytest

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import (
    Cancel,
    Chunk,
    Drain,
    Failed,
    GenerateRequest,
    MeshStatus,
    ProxyConfig,
    ProxyEvent,
    ProxyReady,
    ProxyRequest,
    Readiness,
    StatusQuery,
    StatusReply,
    Submit,
    TokenChunk,
)
from mlx_mesh.mesh.types import Backend, Sharding
from mlx_mesh.node import client as client_module
from mlx_mesh.node.client import CoordinatorClient, GenerationFailed, StatusUnavailable, read_config
from mlx_mesh.node.pipe import AsyncPipe, BlockingPipe

Coordinator = AsyncPipe[ProxyRequest]
Scenario = Callable[[CoordinatorClient, Coordinator], Coroutine[None, None, None]]


def status(name: str = "m") -> MeshStatus:
    return MeshStatus(
        name=name,
        model="m",
        world_size=2,
        sharding=Sharding.PIPELINE,
        backend=Backend.RING,
        epoch=1,
        epoch_cause="start",
        ready=True,
        reason="",
        placement=None,
        ranks=(),
        num_running=0,
        num_waiting=0,
        num_open=0,
        uptime_s=1.0,
        versions=None,
        context_length=100,
    )


def play(scenario: Scenario) -> None:
    """Run a client and the test's end of the pipe in one loop, within 10 s."""

    async def main() -> None:
        ours, theirs = socket.socketpair()
        client = await CoordinatorClient.open(theirs)
        coordinator: Coordinator = await AsyncPipe.open(ours, msgspec.msgpack.Decoder(ProxyRequest))
        running = asyncio.create_task(client.run())
        try:
            await scenario(client, coordinator)
        finally:
            await coordinator.close()
            await running
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 10))


async def submitted(coordinator: Coordinator) -> GenerateRequest:
    message = await coordinator.receive()
    assert isinstance(message, Submit)
    return message.request


def request(name: str = "a") -> GenerateRequest:
    return GenerateRequest(id=name, prompt_ids=(1, 2), max_tokens=8)


async def collect(stream: AsyncIterator[TokenChunk]) -> list[int]:
    return [token_id async for chunk in stream for token_id in chunk.token_ids]


def test_chunks_of_interleaved_requests_reach_the_request_they_belong_to() -> None:
    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        tasks = [asyncio.create_task(collect(client.generate(request(name)))) for name in "ab"]
        assert {(await submitted(coordinator)).id for _ in tasks} == {"a", "b"}
        for number in range(3):
            coordinator.send(Chunk(chunk=TokenChunk(id="a", token_ids=(number,))))
            coordinator.send(Chunk(chunk=TokenChunk(id="b", token_ids=(10 + number, 20 + number))))
        for name in "ab":
            coordinator.send(Chunk(chunk=TokenChunk(id=name, finish_reason="length")))
        assert await asyncio.gather(*tasks) == [[0, 1, 2], [10, 20, 11, 21, 12, 22]]
        assert client.num_open == 0

    play(scenario)


def test_closing_a_generator_early_sends_one_cancel() -> None:
    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        stream = client.generate(request())
        first = asyncio.create_task(anext(stream))
        await submitted(coordinator)
        coordinator.send(Chunk(chunk=TokenChunk(id="a", token_ids=(5,))))
        assert (await first).token_ids == (5,)
        await stream.aclose()
        assert await coordinator.receive() == Cancel(id="a")
        coordinator.send(Chunk(chunk=TokenChunk(id="a", token_ids=(6,))))  # was on its way; dropped
        client.announce()
        assert isinstance(await coordinator.receive(), ProxyReady)

    play(scenario)


def test_cancelling_the_waiting_task_sends_cancel() -> None:
    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        async def consume() -> list[int]:
            async with contextlib.aclosing(client.generate(request())) as stream:
                return await collect(stream)

        task = asyncio.create_task(consume())
        await submitted(coordinator)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await coordinator.receive() == Cancel(id="a")

    play(scenario)


def test_a_request_that_ended_is_not_cancelled_even_when_its_last_chunk_was_not_read() -> None:
    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        stream = client.generate(request())
        first = asyncio.create_task(anext(stream))
        await submitted(coordinator)
        coordinator.send(Chunk(chunk=TokenChunk(id="a", token_ids=(5,))))
        coordinator.send(Chunk(chunk=TokenChunk(id="a", finish_reason="stop")))
        await first
        query = asyncio.create_task(client.status())  # its answer comes after the last chunk
        message = await coordinator.receive()
        assert isinstance(message, StatusQuery)
        coordinator.send(Drain())
        coordinator.send(StatusReply(id=message.id, status=status()))
        await query
        assert client.draining
        await stream.aclose()
        client.announce()
        assert isinstance(await coordinator.receive(), ProxyReady)

    play(scenario)


def test_failed_becomes_an_exception_after_the_chunks_before_it() -> None:
    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        seen: list[int] = []

        async def consume() -> None:
            async for chunk in client.generate(request()):
                seen.extend(chunk.token_ids)

        task = asyncio.create_task(consume())
        await submitted(coordinator)
        coordinator.send(Chunk(chunk=TokenChunk(id="a", token_ids=(5,))))
        coordinator.send(Failed(id="a", code="queue_full", message="256 requests wait", retry_after_s=7))
        with pytest.raises(GenerationFailed, match="256 requests wait") as raised:
            await task
        assert (raised.value.code, raised.value.retry_after_s, seen) == ("queue_full", 7, [5])
        client.announce()
        assert isinstance(await coordinator.receive(), ProxyReady)  # and no Cancel

    play(scenario)


def test_the_end_of_the_pipe_fails_what_is_open() -> None:
    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        task = asyncio.create_task(collect(client.generate(request())))
        await submitted(coordinator)
        await coordinator.close()
        with pytest.raises(GenerationFailed) as raised:
            await task
        assert raised.value.code == "coordinator_lost"

    play(scenario)


def test_readiness_is_live_and_false_until_told() -> None:
    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        assert not client.readiness.ready
        told = Readiness(ready=True, reason="", world_size=2, context_length=64, epoch=3)
        coordinator.send(told)
        query = asyncio.create_task(client.status())
        message = await coordinator.receive()
        assert isinstance(message, StatusQuery)
        coordinator.send(StatusReply(id=message.id, status=status()))
        assert (await query).name == "m"
        assert client.readiness == told

    play(scenario)


def test_a_coordinator_that_does_not_answer_a_status_query_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "STATUS_DEADLINE_S", 0.05)

    async def scenario(client: CoordinatorClient, coordinator: Coordinator) -> None:
        with pytest.raises(StatusUnavailable, match=r"did not answer within 0\.05 s"):
            await client.status()

    play(scenario)


def test_a_request_without_an_end_is_given_up_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "REQUEST_MARGIN_S", 0.05)

    async def main() -> None:
        ours, theirs = socket.socketpair()
        with ours:
            pipe = await AsyncPipe.open(theirs, msgspec.msgpack.Decoder(ProxyEvent))
            client = CoordinatorClient(pipe, request_s=0.0)
            with pytest.raises(GenerationFailed) as raised:
                await collect(client.generate(request()))
            assert raised.value.code == "timeout"
            await client.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_the_first_frame_is_the_settings_and_its_absence_is_an_error() -> None:
    config = ProxyConfig(
        model="/m",
        model_id="m",
        served_model_names=(),
        serve_host="127.0.0.1",
        serve_port=1,
        listen_fd=3,
        api_keys=(),
        chat_template="",
        version="0",
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        BlockingPipe(ours, msgspec.msgpack.Decoder(ProxyRequest)).send(config)
        assert read_config(theirs) == config
        ours.shutdown(socket.SHUT_WR)
        with pytest.raises(ProtocolError, match="before it sent the settings"):
            read_config(theirs)
