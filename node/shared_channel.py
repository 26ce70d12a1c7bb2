"""One control channel for the coordinators of several replicas: each hears its own agents only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from mlx_mesh.mesh.messages import AgentMessage, CoordinatorMessage, Join
from mlx_mesh.node.channel import AgentsChannel

MAX_PEERS = 4096
"""Agents that were started again and again; the oldest are forgotten, and asked to join again."""


class ChannelPart:
    """One coordinator's end. What the channel turned away is counted by the first one only."""

    def __init__(self, channel: AgentsChannel, *, is_first: bool) -> None:
        self._channel = channel
        self._is_first = is_first
        self._inbox: asyncio.Queue[tuple[bytes, AgentMessage]] = asyncio.Queue()
        self.link_lost = asyncio.Event()

    @property
    def endpoint(self) -> str:
        return self._channel.endpoint

    @property
    def num_rejected_frames(self) -> int:
        return self._channel.num_rejected_frames if self._is_first else 0

    @property
    def num_failed_handshakes(self) -> int:
        return self._channel.num_failed_handshakes if self._is_first else 0

    @property
    def num_lost_links(self) -> int:
        return self._channel.num_lost_links if self._is_first else 0

    def send(self, peer: bytes, message: CoordinatorMessage) -> bool:
        return self._channel.send(peer, message)

    async def receive(self) -> tuple[bytes, AgentMessage]:
        return await self._inbox.get()

    def put(self, peer: bytes, message: AgentMessage) -> None:
        self._inbox.put_nowait((peer, message))


class SharedChannel:
    """`run` while any part is used."""

    def __init__(self, channel: AgentsChannel, num_parts: int, part_of: Callable[[Join], int]) -> None:
        """`part_of`: whose agent it is that joins. One that nobody expects is the first part's, to refuse."""
        self._channel = channel
        self._part_of = part_of
        self._peers: dict[bytes, int] = {}
        self.parts = tuple(ChannelPart(channel, is_first=at == 0) for at in range(num_parts))

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._pass_on(), name="shared channel")
            tasks.create_task(self._watch_links(), name="shared channel links")

    async def _pass_on(self) -> None:
        while True:
            peer, message = await self._channel.receive()
            if isinstance(message, Join):
                self._peers.pop(peer, None)
                self._peers[peer] = self._part_of(message)
                while len(self._peers) > MAX_PEERS:
                    del self._peers[next(iter(self._peers))]
            self.parts[self._peers.get(peer, 0)].put(peer, message)

    async def _watch_links(self) -> None:
        """Nobody knows whose it was: every part probes its members."""
        while True:
            await self._channel.link_lost.wait()
            self._channel.link_lost.clear()
            for part in self.parts:
                part.link_lost.set()
