"""The control channel: only members get in, only whole messages get through, a lost peer is noticed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.messages import AgentBeat, BeatAck, Leaving, encode
from mlx_mesh.node.channel import (
    AgentChannel,
    CoordinatorChannel,
    LinkDown,
    LinkUp,
    new_identity,
    split_endpoint,
)
from mlx_mesh.node.keys import derive_keys, secure_client

KEYS = derive_keys("a secret for this test only")
OTHER_KEYS = derive_keys("another secret, just as long")
WITHIN_S = 10.0


@contextlib.asynccontextmanager
async def coordinator(endpoint: str = "127.0.0.1:0") -> AsyncIterator[CoordinatorChannel]:
    with zmq.asyncio.Context() as context:
        channel = CoordinatorChannel.open(context, KEYS, endpoint)
        try:
            yield channel
        finally:
            await channel.close()


@contextlib.asynccontextmanager
async def agent(
    channel: CoordinatorChannel, identity: bytes = b"mac2/run/1", keys: object = KEYS
) -> AsyncIterator[AgentChannel]:
    context = zmq.asyncio.Context()
    end = AgentChannel.open(context, identity, keys, channel.endpoint)  # type: ignore[arg-type]
    try:
        yield end
    finally:
        await end.close()
        context.term()


@contextlib.asynccontextmanager
async def raw_dealer(channel: CoordinatorChannel) -> AsyncIterator[zmq.asyncio.Socket]:
    """A member that does not keep to the protocol."""
    context = zmq.asyncio.Context()
    sock = context.socket(zmq.DEALER)
    sock.linger = 0
    secure_client(sock, KEYS)
    sock.connect(f"tcp://{channel.endpoint}")
    try:
        yield sock
    finally:
        sock.close()
        context.term()


async def test_messages_go_both_ways_over_tcp() -> None:
    async with asyncio.timeout(WITHIN_S), coordinator() as server, agent(server) as client:
        assert await client.receive() == LinkUp()
        assert client.send(AgentBeat(seq=7))
        assert await server.receive() == (b"mac2/run/1", AgentBeat(seq=7))
        assert server.send(b"mac2/run/1", BeatAck(seq=7))
        assert await client.receive() == BeatAck(seq=7)


async def test_the_local_agent_needs_no_port() -> None:
    context = zmq.asyncio.Context()
    async with asyncio.timeout(WITHIN_S):
        server = CoordinatorChannel.open(context, KEYS, "")
        assert server.endpoint == ""
        client = AgentChannel.open(context, b"local", KEYS, "")
        assert await client.receive() == LinkUp()
        client.send(AgentBeat(seq=1))
        assert await server.receive() == (b"local", AgentBeat(seq=1))
        await client.close()
        await server.close()
        context.term()


async def test_an_agent_with_another_secret_is_kept_out_and_counted() -> None:
    async with asyncio.timeout(WITHIN_S), coordinator() as server, agent(server, keys=OTHER_KEYS) as client:
        assert await client.receive() == LinkDown(is_refused=True)
        assert not client.send(AgentBeat(seq=1))
        assert server.num_failed_handshakes >= 1


async def test_a_client_that_knows_only_the_servers_public_key_is_kept_out() -> None:
    stranger = replace(KEYS, client_public=OTHER_KEYS.client_public, client_secret=OTHER_KEYS.client_secret)
    async with asyncio.timeout(WITHIN_S), coordinator() as server, agent(server, keys=stranger) as client:
        assert await client.receive() == LinkDown(is_refused=True)


async def test_frames_that_are_no_message_are_counted_and_dropped() -> None:
    async with asyncio.timeout(WITHIN_S), coordinator() as server, raw_dealer(server) as sock:
        await sock.send(b"\xc1 is never valid MessagePack")
        await sock.send_multipart([b"too", b"many", b"frames"])
        await sock.send(encode(BeatAck(seq=1)))  # the other direction's message
        await sock.send(encode(Leaving(reason="the first valid one")))
        assert (await server.receive())[1] == Leaving(reason="the first valid one")
        assert server.num_rejected_frames == 3


async def test_a_plain_tcp_client_changes_nothing() -> None:
    async with asyncio.timeout(WITHIN_S), coordinator() as server:
        host, port = split_endpoint(server.endpoint)
        _, stray = await asyncio.open_connection(host, port)
        stray.write(b"GET / HTTP/1.1\r\n\r\n" * 10)
        async with agent(server) as client:
            assert await client.receive() == LinkUp()
            client.send(AgentBeat(seq=1))
            assert (await server.receive())[1] == AgentBeat(seq=1)
        stray.close()
        with contextlib.suppress(OSError):
            await stray.wait_closed()


async def test_a_frame_over_the_limit_ends_a_strangers_connection_and_nothing_else() -> None:
    """A raw client that says it is ZeroMQ, and then announces a frame of a gigabyte."""
    async with asyncio.timeout(WITHIN_S), coordinator() as server:
        reader, stray = await asyncio.open_connection(*split_endpoint(server.endpoint))
        stray.write(b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" * 32)
        stray.write(b"\x02" + (1 << 30).to_bytes(8, "big") + b"x" * 100_000)
        with contextlib.suppress(OSError):
            while await reader.read(65536):
                pass
        assert server.num_rejected_frames == 0 and server.num_failed_handshakes + server.num_lost_links > 0
        async with agent(server) as client:
            assert await client.receive() == LinkUp()
            client.send(AgentBeat(seq=1))
            assert (await server.receive())[1] == AgentBeat(seq=1)
        stray.close()
        with contextlib.suppress(OSError):
            await stray.wait_closed()


async def test_a_vanished_agent_is_noticed_at_once() -> None:
    async with asyncio.timeout(WITHIN_S), coordinator() as server:
        async with agent(server) as client:
            await client.receive()
            client.send(AgentBeat(seq=1))
            peer, _ = await server.receive()
            assert server.send(peer, BeatAck(seq=1))
        await server.link_lost.wait()
        while server.send(peer, BeatAck(seq=1)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_an_agent_hears_that_its_coordinator_vanished() -> None:
    async with asyncio.timeout(WITHIN_S), coordinator() as server, agent(server) as client:
        assert await client.receive() == LinkUp()
        await server.close()
        assert await client.receive() == LinkDown(is_refused=False)
        while client.send(AgentBeat(seq=1)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # ZeroMQ tells of the end before its own pipe is gone


async def test_sending_to_nobody_is_told() -> None:
    async with coordinator() as server:
        assert not server.send(b"nobody", BeatAck(seq=1))


async def test_a_taken_port_is_told_in_words() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BringUpError, match=f"127.0.0.1:{port}: the port is in use"):
            async with coordinator(f"127.0.0.1:{port}"):
                pass


async def test_an_address_of_another_host_is_told_in_words() -> None:
    with pytest.raises(BringUpError, match=r"10\.99\.0\.7 is not an address of this host"):
        async with coordinator("10.99.0.7:0"):
            pass


def test_identities_are_never_the_same() -> None:
    assert new_identity("mac1", "run") != new_identity("mac1", "run")


@pytest.mark.parametrize("endpoint", ["", "1.2.3.4", ":80", "1.2.3.4:", "1.2.3.4:x", "1.2.3.4:70000"])
def test_an_endpoint_is_an_address_and_a_port(endpoint: str) -> None:
    with pytest.raises(ValueError):
        split_endpoint(endpoint)
