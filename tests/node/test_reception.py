"""What reaches every replica, and not the first one only."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from mlx_mesh.mesh.messages import NodeReply
from mlx_mesh.mesh.routing import Router
from mlx_mesh.node.channel import AgentsChannel
from mlx_mesh.node.reception import Reception
from mlx_mesh.node.shared_channel import SharedChannel


class NotedDesk:
    """A replica's desk that counts what it is told."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.is_ready = is_ready
        self.told: list[str] = []

    def reset_prefixes(self, query_id: str) -> NodeReply:
        self.told.append("reset")
        return NodeReply(id=query_id, message="", epoch=1)

    def lost_proxy(self) -> None:
        self.told.append("lost proxy")


def reception(*desks: NotedDesk) -> Any:
    replicas = [SimpleNamespace(desk=desk) for desk in desks]
    return SimpleNamespace(_replicas=replicas, _router=Router(len(desks)), _embedder=None)


def test_a_reset_goes_to_all_replicas_that_are_ready() -> None:
    desks = [NotedDesk(), NotedDesk(is_ready=False), NotedDesk()]
    assert Reception._reset_prefixes(reception(*desks), "q").id == "q"
    assert [desk.told for desk in desks] == [["reset"], [], ["reset"]]


def test_clients_that_are_gone_are_forgotten_by_all_replicas() -> None:
    desks = [NotedDesk(), NotedDesk()]
    Reception.forget_clients(reception(*desks))
    assert [desk.told for desk in desks] == [["lost proxy"]] * 2


async def test_a_lost_link_is_looked_into_by_all_replicas() -> None:
    channel = SimpleNamespace(link_lost=asyncio.Event(), receive=asyncio.Event().wait)
    shared = SharedChannel(cast(AgentsChannel, channel), 2, lambda join: 0)
    running = asyncio.create_task(shared.run())
    channel.link_lost.set()
    try:
        async with asyncio.timeout(10):
            await asyncio.gather(*(part.link_lost.wait() for part in shared.parts))
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert not channel.link_lost.is_set()
