"""The plan channel: step plans from the leader engine straight to the follower engines.

ROUTER on the leader, DEALER on each follower, CURVE with the mesh's keys. Synchronous: both ends belong to
the engine's main thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import MAX_FRAME_BYTES, EngineConfig, PlanHello, StepPlan, encode
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.keys import ZAP_DOMAIN, AllowOnlyClientKey, derive_keys, secure_client, secure_server

HELLO_S = 30.0
"""From the leader's first plan until every follower has said hello; they joined before they loaded."""

LAST_WORDS_MS = 200
"""After the leader is seen to be gone: how long a plan that it sent before may still take to show up."""

_hello_decoder = msgspec.msgpack.Decoder(PlanHello)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)


class PlanPublisher:
    """The leader's end."""

    def __init__(self, config: EngineConfig) -> None:
        """Bind to a random port of `config.plan_address`. Raises EngineError(bind)."""
        self._epoch = config.epoch
        self._followers = tuple(range(1, config.world_size))
        self._step = 0
        keys = derive_keys(config.secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = ThreadAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, AllowOnlyClientKey(keys))
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.router_mandatory = True  # sending to a rank that is not there is an error, not a loss
        self._socket.linger = 0
        self._socket.sndhwm = 0  # plans are small and the followers' pace bounds how many are under way
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        secure_server(self._socket, keys)
        try:
            self._socket.bind(f"tcp://{config.plan_address}:*")
        except zmq.ZMQError as error:
            self.close()
            raise EngineError(
                "bind",
                f"The leader engine cannot listen on {config.plan_address} for its plan channel: {error}. "
                "Is that an address of this host?",
            ) from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    def wait_for_followers(self, deadline_s: float = HELLO_S) -> None:
        """Return when every follower has said hello. Raises EngineError(peer_lost) at the deadline and
        ProtocolError for anything but the hellos of this epoch."""
        missing = set(self._followers)
        end = time.monotonic() + deadline_s
        while missing:
            left_ms = max(0, int(1000 * (end - time.monotonic())))
            if not self._socket.poll(left_ms):
                ranks = ", ".join(map(str, sorted(missing)))
                raise EngineError(
                    "peer_lost",
                    f"The engines of ranks {ranks} did not join the plan channel at {self.endpoint} within "
                    f"{deadline_s:g} s. Check that their hosts reach this address.",
                )
            identity, *frames = self._socket.recv_multipart()
            rank = check_hello(identity, frames, self._epoch, missing)
            missing.discard(rank)

    def publish(self, plan: StepPlan) -> None:
        """Send one plan to every follower. Raises EngineError(peer_lost) if one is gone."""
        if plan.epoch != self._epoch or plan.step != self._step + 1:
            raise AssertionError(
                f"plan {plan.epoch}/{plan.step} after step {self._step} of epoch {self._epoch}"
            )
        self._step = plan.step
        body = encode(plan)
        for rank in self._followers:
            try:
                self._socket.send_multipart([_identity(rank), body])
            except zmq.ZMQError as error:
                raise EngineError(
                    "peer_lost", f"The engine of rank {rank} left the plan channel ({error}): see its log."
                ) from error

    def close(self) -> None:
        if hasattr(self, "_socket"):
            self._socket.close(linger=1000)  # the stop plan has to get out
        self._authenticator.stop()
        self._context.term()


class PlanReceiver:
    """A follower's end."""

    def __init__(self, config: EngineConfig, endpoint: str) -> None:
        """Connect and say hello; neither waits."""
        self._epoch = config.epoch
        self._step = 0
        keys = derive_keys(config.secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, _identity(config.rank))
        self._socket.linger = 0
        self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        secure_client(self._socket, keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._socket.connect(endpoint)
        self._socket.send(encode(PlanHello(epoch=config.epoch, rank=config.rank)))
        self._endpoint = endpoint

    def next(self) -> StepPlan:
        """The next plan, waiting without limit and without using the CPU.

        Raises EngineError(peer_lost) when the leader engine is gone, ProtocolError for anything but the next
        plan of this epoch."""
        ready = dict(self._poller.poll())
        if self._socket not in ready and not self._socket.poll(LAST_WORDS_MS):
            recv_monitor_message(self._monitor)
            raise EngineError(
                "peer_lost", f"The leader engine at {self._endpoint} is gone: see the log of rank 0."
            )
        plan = check_plan(self._socket.recv_multipart(), self._epoch, self._step + 1)
        self._step = plan.step
        return plan

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


def _identity(rank: int) -> bytes:
    return b"rank-%d" % rank  # never starts with a zero byte, which ZeroMQ keeps for itself


def check_hello(identity: bytes, frames: Sequence[bytes], epoch: int, missing: set[int]) -> int:
    """The rank that says hello. Raises ProtocolError."""
    try:
        (body,) = frames
        hello = _hello_decoder.decode(body)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"Unreadable hello on the plan channel: {error}") from error
    if hello.epoch != epoch or hello.rank not in missing or identity != _identity(hello.rank):
        raise ProtocolError(
            f"A hello of rank {hello.rank}, epoch {hello.epoch} came to the plan channel of epoch {epoch}, "
            f"which waits for ranks {sorted(missing)}."
        )
    return hello.rank


def check_plan(frames: Sequence[bytes], epoch: int, step: int) -> StepPlan:
    """The plan in `frames`, which must be that of `step`. Raises ProtocolError."""
    try:
        (body,) = frames
        plan = _plan_decoder.decode(body)
    except (ValueError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"Unreadable step plan: {error}") from error
    if plan.epoch != epoch or plan.step != step:
        raise ProtocolError(
            f"The plan of step {plan.step}, epoch {plan.epoch} came; step {step} of epoch {epoch} is due."
        )
    return plan
