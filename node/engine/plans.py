"""The plan channel: step plans from the leader engine straight to the follower engines.

ROUTER on the leader, DEALER on each follower, CURVE with the mesh's keys. Synchronous: both ends belong to
the engine's main thread. A thread beside it watches the connections: an engine that ends takes them along.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec
import zmq
from zmq.auth.thread import ThreadAuthenticator

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import MAX_FRAME_BYTES, Admission, EngineConfig, PlanHello, StepPlan, encode
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.watch import ConnectionWatch
from mlx_mesh.node.keys import ZAP_DOMAIN, AllowOnlyClientKey, derive_keys, secure_client, secure_server

HELLO_S = 30.0
"""From the leader's first plan until every follower has said hello; they joined before they loaded."""

FAREWELL_S = 5.0
"""From the stop plan until the followers have left; a leader that left first would look like a dead one."""

PIECE_BYTES = 16 * 1024 * 1024
"""Features of one prompt may be larger than a frame may be."""

OnLost = Callable[[int], None]
"""Called from the watching thread, once, with the rank that is gone. The main thread may hang in a
collective, so the callee has to report and end the process (`lost_engine`)."""

_hello_decoder = msgspec.msgpack.Decoder(PlanHello)
_plan_decoder = msgspec.msgpack.Decoder(StepPlan)


class PlanPublisher:
    """The leader's end."""

    def __init__(self, config: EngineConfig, on_lost: OnLost) -> None:
        """Bind to a random port of `config.plan_address`. Raises EngineError(bind)."""
        self._epoch = config.epoch
        self._followers = tuple(range(1, config.world_size))
        self._on_lost = on_lost
        self._step = 0
        self._changed = threading.Condition()
        self._rank_by_fd: dict[int, int] = {}  # followers that are here
        self._is_ending = False
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
        self._watch = ConnectionWatch(self._socket, self._connection_changed)
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
        """Return when every follower has said hello; from then on `on_lost` is called when one goes.

        Raises EngineError(peer_lost) at the deadline and ProtocolError for anything but the hellos of this
        epoch."""
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
                    tuple(sorted(missing)),
                )
            identity, *frames = self._socket.recv_multipart(copy=False)
            rank = check_hello(identity.bytes, [frame.bytes for frame in frames], self._epoch, missing)
            missing.discard(rank)
            self._watch.handle_pending()  # also the end of a stranger whose descriptor this follower has now
            self._rank_by_fd[int(identity.get(zmq.SRCFD))] = rank
        self._watch.start()

    def publish(self, plan: StepPlan) -> None:
        """Send one plan to every follower. Raises EngineError(peer_lost) if one is gone."""
        if plan.epoch != self._epoch or plan.step != self._step + 1:
            raise AssertionError(
                f"plan {plan.epoch}/{plan.step} after step {self._step} of epoch {self._epoch}"
            )
        self._step = plan.step
        with self._changed:
            self._is_ending = self._is_ending or plan.stop
        frames = to_frames(plan)
        for rank in self._followers:
            try:
                self._socket.send_multipart([_identity(rank), *frames])
            except zmq.ZMQError as error:
                raise lost_engine(rank, f" ({error})") from error

    def close(self) -> None:
        """After the stop plan: wait until the followers have left, then close."""
        with self._changed:
            if self._is_ending:
                self._changed.wait_for(lambda: not self._rank_by_fd, FAREWELL_S)
            self._is_ending = True
        self._watch.close()
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()

    def _connection_changed(self, event: int, fd: int) -> None:
        if event != zmq.EVENT_DISCONNECTED:
            return
        with self._changed:
            rank = self._rank_by_fd.pop(fd, None)
            is_expected = self._is_ending
            self._changed.notify_all()
        if rank is not None and not is_expected:
            self._on_lost(rank)


class PlanReceiver:
    """A follower's end."""

    def __init__(self, config: EngineConfig, endpoint: str, on_lost: OnLost) -> None:
        """Connect and say hello; neither waits. `on_lost`: for a leader that goes before its stop plan."""
        self._epoch = config.epoch
        self._on_lost = on_lost
        self._step = 0
        self._has_joined = False
        self._is_ending = False
        keys = derive_keys(config.secret)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, _identity(config.rank))
        self._socket.linger = 0
        self._socket.rcvhwm = 0
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        secure_client(self._socket, keys)
        self._watch = ConnectionWatch(self._socket, self._connection_changed)
        self._watch.start()
        self._socket.connect(endpoint)
        self._socket.send(encode(PlanHello(epoch=config.epoch, rank=config.rank)))

    def next(self) -> StepPlan:
        """The next plan, waiting without limit and without using the CPU. Raises ProtocolError for anything
        but the next plan of this epoch."""
        plan = check_plan(self._socket.recv_multipart(), self._epoch, self._step + 1)
        self._step = plan.step
        self._is_ending = self._is_ending or plan.stop
        return plan

    def close(self) -> None:
        self._is_ending = True
        self._watch.close()
        self._socket.close(linger=0)
        self._context.term()

    def _connection_changed(self, event: int, fd: int) -> None:
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self._has_joined = True
        elif event == zmq.EVENT_DISCONNECTED and self._has_joined and not self._is_ending:
            self._is_ending = True  # zmq may connect and lose again; once is enough
            self._on_lost(0)


def lost_engine(rank: int, detail: str = "") -> EngineError:
    """For an engine whose connection ended."""
    return EngineError(
        "peer_lost",
        f"The engine of rank {rank} left the plan channel: it is gone. See the log of rank {rank}.{detail}",
        (rank,),
    )


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
        plan = _plan_decoder.decode(frames[0])
        admit = _with_features(plan.admit, list(frames[1:]))
    except (ValueError, IndexError, msgspec.MsgspecError) as error:
        raise ProtocolError(f"Unreadable step plan: {error}") from error
    if plan.epoch != epoch or plan.step != step:
        raise ProtocolError(
            f"The plan of step {plan.step}, epoch {plan.epoch} came; step {step} of epoch {epoch} is due."
        )
    return msgspec.structs.replace(plan, admit=admit) if frames[1:] else plan


def to_frames(plan: StepPlan) -> list[bytes]:
    """A plan as messages: itself, and the features of its admissions in pieces that fit into a frame. In
    place of features stands the number of their pieces."""
    pieces: list[bytes] = []
    admit = []
    for admission in plan.admit:
        data = admission.features
        own = [data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES)]
        pieces += own
        count = b"%d" % len(own) if own else b""
        admit.append(msgspec.structs.replace(admission, features=count) if own else admission)
    return [encode(msgspec.structs.replace(plan, admit=tuple(admit)) if pieces else plan), *pieces]


def _with_features(admit: tuple[Admission, ...], pieces: list[bytes]) -> tuple[Admission, ...]:
    """The inverse of `to_frames`. Raises ValueError when pieces are missing or left over."""
    whole = []
    for admission in admit:
        count = int(admission.features or b"0")
        own, pieces = pieces[:count], pieces[count:]
        if len(own) < count:
            raise ValueError(f"the features of request {admission.id} are incomplete")
        whole.append(msgspec.structs.replace(admission, features=b"".join(own)) if count else admission)
    if pieces:
        raise ValueError(f"{len(pieces)} frames belong to no admission")
    return tuple(whole)
