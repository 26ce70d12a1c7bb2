"""Random and mutated control frames: read or refused, never a crash and never a change of state."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import (
    AgentBeat,
    AgentMessage,
    CoordinatorMessage,
    EngineCommand,
    EngineReport,
    Heartbeat,
    ProxyEvent,
    ProxyRequest,
    RankReport,
    StepPlan,
    encode,
)
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.engine.plans import check_hello, check_plan
from mlx_mesh.node.pipe import BlockingPipe

EXAMPLES = 60
NUM_MUTATED = 100_000
UNIONS: list[Any] = [AgentMessage, CoordinatorMessage, EngineCommand, EngineReport, ProxyEvent, ProxyRequest]
GOOD = [
    encode(AgentBeat(seq=7)),
    encode(RankReport(epoch=1, rank=0, report=Heartbeat(phase=Phase.READY, step=3))),
    encode(StepPlan(epoch=1, step=2, cancel=("a",))),
]
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
TAGGED = st.builds(
    lambda kind, fields: msgspec.msgpack.encode(fields | {"type": kind}),
    st.sampled_from(
        ["join", "agentbeat", "rankreport", "rankexited", "stepplan", "toengine", "submit", "chunk"]
    ),
    st.dictionaries(
        st.sampled_from(
            ["epoch", "rank", "seq", "report", "step", "id", "request", "ranks", "host", "command"]
        ),
        NESTED,
        max_size=6,
    ),
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good frame with some bytes changed, cut or added."""
    frame = bytearray(draw(st.sampled_from(GOOD)))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(frame)))
        frame[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return bytes(frame)


FRAMES = st.binary(max_size=200) | NESTED.map(msgspec.msgpack.encode) | TAGGED | mutated()
fuzz = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("union", UNIONS)
@fuzz
@given(frame=FRAMES)
def test_a_frame_is_a_message_or_a_validation_error(union: Any, frame: bytes) -> None:
    try:
        message = msgspec.msgpack.decode(frame, type=union)
    except msgspec.MsgspecError:
        return
    # What is read can be written, and is the same again (NaN apart).
    again = msgspec.msgpack.decode(encode(message), type=union)
    assert again == message or "nan" in repr(message)


def test_a_hundred_thousand_mutated_frames_are_read_or_refused() -> None:
    chooser = random.Random(5)
    decoders = [msgspec.msgpack.Decoder(union) for union in UNIONS]
    num_read = 0
    for number in range(NUM_MUTATED):
        frame = bytearray(chooser.choice(GOOD))
        for _ in range(chooser.randint(1, 3)):
            at = chooser.randrange(len(frame) + 1)
            frame[at : at + chooser.randint(0, 2)] = chooser.randbytes(chooser.randint(0, 2))
        try:
            decoders[number % len(decoders)].decode(frame)
            num_read += 1
        except msgspec.MsgspecError:
            pass
    assert 0 < num_read < NUM_MUTATED / 2


@fuzz
@given(frames=st.lists(FRAMES, max_size=3))
def test_the_plan_channel_refuses_all_but_the_next_plan(frames: list[bytes]) -> None:
    try:
        plan = check_plan(frames, 1, 2)
    except ProtocolError:
        pass
    else:
        assert (plan.epoch, plan.step) == (1, 2)
    with pytest.raises(ProtocolError):
        check_hello(b"rank-1", frames, 99, {1})


@fuzz
@given(body=FRAMES, cut=st.integers(0, 8))
def test_a_childs_pipe_gives_a_message_an_end_or_a_protocol_error(body: bytes, cut: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        frame = struct.pack(">I", len(body)) + body
        ours.sendall(frame[: len(frame) - cut])
        ours.shutdown(socket.SHUT_WR)
        pipe: BlockingPipe[Any] = BlockingPipe(theirs, msgspec.msgpack.Decoder(EngineReport))
        try:
            message = pipe.receive()
        except ProtocolError:
            return
        assert message is None or isinstance(message, msgspec.Struct)


async def test_a_mesh_takes_no_harm_from_nonsense_of_a_member(run_mesh: Any) -> None:
    """Frames of a real member that are wrong, or of another rank or epoch: counted, and nothing else."""
    async with run_mesh() as mesh:
        leader, line = await mesh.up()
        agent = mesh.hosts["mac2"].process._agent
        sock = agent._channel._socket
        frames: list[bytes] = []

        @settings(max_examples=100, database=None, deadline=None)
        @given(frame=FRAMES)
        def collect(frame: bytes) -> None:
            frames.append(frame)

        await asyncio.to_thread(collect)
        for frame in frames:
            if _is_harmless(frame):
                await sock.send_multipart([frame])
        beat = Heartbeat(phase=Phase.FAILED, step=99)
        for epoch, rank in ((1, 0), (7, 1), (0, 1)):  # not its rank, not this epoch
            await sock.send_multipart([encode(RankReport(epoch=epoch, rank=rank, report=beat))])
        await sock.send_multipart([encode(AgentBeat(seq=0))])  # as of before: said again by somebody
        await sock.send_multipart([b"two", b"frames"])
        line.submit("a", 20)
        assert await line.answer("a") == (mesh.undisturbed_tokens(20), "length")
        status = await line.status()
        assert status.ready and status.epoch == 1 and status.ranks[0].phase is Phase.READY
        (coordinator,) = leader.process._reception._replicas
        assert coordinator._switchboard.rejected == {"rank": 1, "epoch": 2, "sequence": 1}
        assert coordinator._channel.num_rejected_frames > 30


def _is_harmless(frame: bytes) -> bool:
    """Not by accident a valid message of this member, which it is free to send."""
    try:
        msgspec.msgpack.decode(frame, type=AgentMessage)
    except msgspec.MsgspecError:
        return True
    return False
