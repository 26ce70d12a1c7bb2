"""The plan channel between engines."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import msgspec
import pytest

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import Admission, EngineConfig, PlanHello, StepPlan, encode
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.plans import PlanPublisher, PlanReceiver, check_hello, check_plan

CONFIG = EngineConfig(
    epoch=3, rank=0, world_size=3, host="here", secret="0123456789abcdef" * 4, plan_address="127.0.0.1"
)
PLAN = StepPlan(
    epoch=3, step=1, admit=(Admission(id="a", prompt_ids=(1, 2), max_tokens=3, stop_token_ids=(2,)),)
)


def follower(rank: int, **other: object) -> EngineConfig:
    return msgspec.structs.replace(CONFIG, rank=rank, **other)


def never(rank: int) -> None:
    raise AssertionError(rank)


@contextmanager
def publisher(
    config: EngineConfig = CONFIG, on_lost: Callable[[int], None] = never
) -> Iterator[PlanPublisher]:
    it = PlanPublisher(config, on_lost)
    try:
        yield it
    finally:
        it.close()


@contextmanager
def receiver(
    config: EngineConfig, endpoint: str, on_lost: Callable[[int], None] = never
) -> Iterator[PlanReceiver]:
    it = PlanReceiver(config, endpoint, on_lost)
    try:
        yield it
    finally:
        it.close()


def test_every_follower_gets_every_plan_in_order_and_leaves_before_the_leader() -> None:
    with ExitStack() as stack:
        leader = stack.enter_context(publisher())
        followers = [stack.enter_context(receiver(follower(rank), leader.endpoint)) for rank in (1, 2)]
        leader.wait_for_followers(10)
        stop = StepPlan(epoch=3, step=2, stop=True)
        leader.publish(PLAN)
        leader.publish(stop)
        assert [[f.next(), f.next()] for f in followers] == [[PLAN, stop]] * 2


def test_a_follower_that_never_joins_is_named_at_the_deadline() -> None:
    with publisher() as leader, receiver(follower(1), leader.endpoint):
        with pytest.raises(EngineError, match=r"ranks 2 did not join .* within 0.5 s") as caught:
            leader.wait_for_followers(0.5)
        assert (caught.value.kind, caught.value.lost_ranks) == ("peer_lost", (2,))


def test_a_follower_with_another_secret_is_not_let_in() -> None:
    config = msgspec.structs.replace(CONFIG, world_size=2)
    with (
        publisher(config) as leader,
        receiver(follower(1, secret="f" * 64), leader.endpoint),
        pytest.raises(EngineError, match="did not join"),
    ):
        leader.wait_for_followers(0.5)


def test_a_follower_of_another_epoch_is_an_error() -> None:
    with (
        publisher() as leader,
        receiver(follower(1, epoch=2), leader.endpoint),
        pytest.raises(ProtocolError, match="rank 1, epoch 2"),
    ):
        leader.wait_for_followers(10)


def test_a_follower_is_told_that_the_leader_is_gone() -> None:
    lost: queue.Queue[int] = queue.Queue()
    config = msgspec.structs.replace(CONFIG, world_size=2)
    leader = PlanPublisher(config, never)
    with receiver(follower(1), leader.endpoint, lost.put):
        leader.wait_for_followers(10)
        leader.close()  # without a stop plan
        assert lost.get(timeout=10) == 0


def test_the_leader_is_told_which_follower_is_gone() -> None:
    lost: queue.Queue[int] = queue.Queue()
    with publisher(on_lost=lost.put) as leader, receiver(follower(1), leader.endpoint):
        second = PlanReceiver(follower(2), leader.endpoint, never)
        leader.wait_for_followers(10)
        second.close()
        assert lost.get(timeout=10) == 2


def test_strangers_that_come_and_go_are_nobodys_loss() -> None:
    lost: queue.Queue[int] = queue.Queue()
    with publisher(on_lost=lost.put) as leader:
        host, _, port = leader.endpoint.removeprefix("tcp://").rpartition(":")
        socket.create_connection((host, int(port))).close()
        with receiver(follower(1), leader.endpoint), receiver(follower(2), leader.endpoint) as second:
            leader.wait_for_followers(10)
            socket.create_connection((host, int(port))).close()
            leader.publish(PLAN)
            assert second.next() == PLAN
            leader.publish(StepPlan(epoch=3, step=2, stop=True))
    assert lost.empty()


def test_publishing_to_a_follower_that_left_is_an_error() -> None:
    lost: queue.Queue[int] = queue.Queue()
    config = msgspec.structs.replace(CONFIG, world_size=2)
    with publisher(config, lost.put) as leader:
        with receiver(follower(1), leader.endpoint):
            leader.wait_for_followers(10)
        lost.get(timeout=10)
        with pytest.raises(EngineError, match="rank 1 left") as caught:
            for step in range(1, 100_000):  # until the ROUTER has noticed, too
                leader.publish(StepPlan(epoch=3, step=step))
        assert (caught.value.kind, caught.value.lost_ranks) == ("peer_lost", (1,))


def test_an_address_that_the_host_does_not_have_is_said_in_words() -> None:
    with pytest.raises(EngineError, match=r"192\.0\.2\.1 .*address of this host") as caught:
        PlanPublisher(msgspec.structs.replace(CONFIG, plan_address="192.0.2.1"), never)
    assert caught.value.kind == "bind"


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"junk"],
        [encode(PLAN), b"more"],
        [encode(PlanHello(epoch=3, rank=1))],
        [encode(StepPlan(epoch=2, step=1))],
        [encode(StepPlan(epoch=3, step=2))],
        [encode(StepPlan(epoch=3, step=0))],
    ],
)
def test_anything_but_the_next_plan_of_this_epoch_is_a_protocol_error(frames: list[bytes]) -> None:
    with pytest.raises(ProtocolError):
        check_plan(frames, 3, 1)


@pytest.mark.parametrize(
    ("identity", "frames"),
    [
        (b"rank-1", []),
        (b"rank-1", [b"junk"]),
        (b"rank-1", [encode(PLAN)]),
        (b"rank-2", [encode(PlanHello(epoch=3, rank=1))]),
        (b"rank-0", [encode(PlanHello(epoch=3, rank=0))]),
        (b"rank-3", [encode(PlanHello(epoch=3, rank=3))]),
    ],
)
def test_anything_but_a_hello_that_is_waited_for_is_a_protocol_error(
    identity: bytes, frames: list[bytes]
) -> None:
    with pytest.raises(ProtocolError):
        check_hello(identity, frames, 3, {1, 2})


def test_the_leader_cannot_skip_a_step() -> None:
    with publisher(msgspec.structs.replace(CONFIG, world_size=1)) as leader, pytest.raises(AssertionError):
        leader.publish(StepPlan(epoch=3, step=2))
