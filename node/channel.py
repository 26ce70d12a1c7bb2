"""The control channel between the coordinator and the agents: authenticated, typed, bounded.

The coordinator binds a ROUTER: on TCP with CURVE and an allow-list of one client key for other hosts,
and in-process for the agent that it lives in. Agents connect a DEALER whose identity is theirs alone.
Sending never waits: a peer that is gone or does not take its messages is reported by `send`.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from dataclasses import dataclass
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import recv_monitor_message

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.messages import MAX_FRAME_BYTES, AgentMessage, CoordinatorMessage, encode
from mlx_mesh.node.keys import ZAP_DOMAIN, AllowOnlyClientKey, MeshKeys, secure_client, secure_server
from mlx_mesh.node.ports import explain_bind_error

INPROC_ENDPOINT = "inproc://mlx-mesh-coordinator"
HIGH_WATER_MARK = 10_000
"""Messages queued for one peer before it counts as gone: minutes of heartbeats."""

_LINGER_MS = 500
_HANDSHAKE_MS = 5_000
_RECONNECT_MS = (100, 1_000)
_FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)


@dataclass(frozen=True, slots=True)
class LinkUp:
    """The agent's connection stands and is authenticated."""


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The agent's connection ended, or could not be authenticated."""

    is_refused: bool  # the handshake failed: another secret, or something else listens there


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """("ip", port) of "ip:port". Raises ValueError."""
    address, _, port = endpoint.rpartition(":")
    if not address or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{endpoint!r} is not of the form ip:port")
    return address, int(port)


class AgentsChannel(Protocol):
    """What a coordinator needs of its channel, which may be a part of one that several share."""

    @property
    def endpoint(self) -> str: ...
    @property
    def link_lost(self) -> asyncio.Event: ...
    @property
    def num_rejected_frames(self) -> int: ...
    @property
    def num_failed_handshakes(self) -> int: ...
    @property
    def num_lost_links(self) -> int: ...
    def send(self, peer: bytes, message: CoordinatorMessage) -> bool: ...
    async def receive(self) -> tuple[bytes, AgentMessage]: ...


class CoordinatorChannel:
    """The coordinator's end. Open and close it in a running event loop."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._socket = context.socket(zmq.ROUTER)
        self._monitor: zmq.asyncio.Socket | None = None
        self._authenticator: AsyncioAuthenticator | None = None
        self._watch: asyncio.Task[None] | None = None
        self._decoder = msgspec.msgpack.Decoder(AgentMessage)
        self.endpoint = ""
        self.link_lost = asyncio.Event()
        """Set when some TCP connection ended; the owner probes its peers with `send` and clears it."""
        self.num_rejected_frames = 0
        self.num_failed_handshakes = 0
        self.num_lost_links = 0

    @classmethod
    def open(cls, context: zmq.asyncio.Context, keys: MeshKeys, endpoint: str) -> CoordinatorChannel:
        """Bind in-process and, unless `endpoint` is '', on TCP ("ip:port", port 0 = a free one).

        Raises BringUpError in words when the address or port cannot be had.
        """
        channel = cls(context)
        sock = channel._socket
        sock.router_mandatory = 1
        _limit(sock)
        sock.handshake_ivl = _HANDSHAKE_MS
        if endpoint:
            channel._secure(keys)
        sock.bind(INPROC_ENDPOINT)
        if endpoint:
            try:
                channel._bind(*split_endpoint(endpoint))
            except BringUpError:
                channel._release()
                raise
        return channel

    def _secure(self, keys: MeshKeys) -> None:
        self._authenticator = AsyncioAuthenticator(self._context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, AllowOnlyClientKey(keys))
        secure_server(self._socket, keys)
        monitor = self._socket.get_monitor_socket(_FAILED_HANDSHAKES | zmq.EVENT_DISCONNECTED)
        assert isinstance(monitor, zmq.asyncio.Socket)
        self._monitor = monitor
        self._watch = asyncio.create_task(self._watch_links(monitor), name="coordinator link monitor")

    def _bind(self, address: str, port: int) -> None:
        try:
            self._socket.bind(f"tcp://{address}:{port}")
        except zmq.ZMQError as error:
            reason = OSError(error.errno, str(error))
            raise BringUpError(explain_bind_error("the coordinator", address, port, reason)) from error
        bound = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.endpoint = bound.removeprefix("tcp://")

    async def _watch_links(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event & _FAILED_HANDSHAKES:
                self.num_failed_handshakes += 1
            elif event & zmq.EVENT_DISCONNECTED:
                self.num_lost_links += 1
                self.link_lost.set()

    def send(self, peer: bytes, message: CoordinatorMessage) -> bool:
        """Queue a message; False when the peer is gone or has stopped taking messages."""
        return _send_now(self._socket, [peer, encode(message)])

    async def receive(self) -> tuple[bytes, AgentMessage]:
        """The next valid message and who sent it. Anything else is counted and dropped."""
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 2:
                with contextlib.suppress(msgspec.MsgspecError):
                    return frames[0], self._decoder.decode(frames[1])
            self.num_rejected_frames += 1

    async def close(self) -> None:
        """Give queued messages half a second to leave, then close. Once is enough."""
        if self._socket.closed:
            return
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        self._release()

    def _release(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.close(linger=_LINGER_MS)


class AgentChannel:
    """An agent's end. Open and close it in a running event loop."""

    def __init__(self, context: zmq.asyncio.Context, identity: bytes) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.identity = identity
        self._decoder = msgspec.msgpack.Decoder(CoordinatorMessage)
        self._inbox: asyncio.Queue[CoordinatorMessage | LinkUp | LinkDown] = asyncio.Queue(maxsize=1000)
        self._monitor: zmq.asyncio.Socket | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.num_rejected_frames = 0

    @classmethod
    def open(
        cls, context: zmq.asyncio.Context, identity: bytes, keys: MeshKeys, endpoint: str
    ) -> AgentChannel:
        """Start connecting to "ip:port", or in-process when `endpoint` is ''. zmq retries by itself; each
        change of the link arrives as LinkUp or LinkDown."""
        channel = cls(context, identity)
        sock = channel._socket
        _limit(sock)
        if endpoint:
            secure_client(sock, keys)
            sock.immediate = 1  # queue nothing for a connection that does not stand
            sock.reconnect_ivl, sock.reconnect_ivl_max = _RECONNECT_MS
            sock.connect_timeout = _HANDSHAKE_MS
            monitor = sock.get_monitor_socket(
                _FAILED_HANDSHAKES | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
            )
            assert isinstance(monitor, zmq.asyncio.Socket)
            channel._monitor = monitor
            channel._tasks.append(
                asyncio.create_task(channel._watch_link(monitor), name="agent link monitor")
            )
            sock.connect(f"tcp://{endpoint}")
        else:
            sock.connect(INPROC_ENDPOINT)
            channel._inbox.put_nowait(LinkUp())
        channel._tasks.append(asyncio.create_task(channel._read(), name="agent channel reader"))
        return channel

    async def _watch_link(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event & zmq.EVENT_HANDSHAKE_SUCCEEDED:
                await self._inbox.put(LinkUp())
            else:
                await self._inbox.put(LinkDown(is_refused=bool(event & _FAILED_HANDSHAKES)))

    async def _read(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) == 1:
                try:
                    message = self._decoder.decode(frames[0])
                except msgspec.MsgspecError:
                    pass
                else:
                    await self._inbox.put(message)
                    continue
            self.num_rejected_frames += 1

    def send(self, message: AgentMessage) -> bool:
        """Queue a message; False when there is no connection to take it."""
        return _send_now(self._socket, [encode(message)])

    async def receive(self) -> CoordinatorMessage | LinkUp | LinkDown:
        """The next message or change of the link."""
        return await self._inbox.get()

    async def close(self) -> None:
        """Give queued messages half a second to leave, then close."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close(linger=0)
        self._socket.close(linger=_LINGER_MS)


def new_identity(host: str, run_id: str) -> bytes:
    """A socket identity that no other process has."""
    return f"{host[:100]}/{run_id[:64]}/{secrets.token_hex(8)}".encode()


def _limit(sock: zmq.asyncio.Socket) -> None:
    sock.maxmsgsize = MAX_FRAME_BYTES
    sock.sndhwm = sock.rcvhwm = HIGH_WATER_MARK
    sock.linger = _LINGER_MS
    # A connection to a host that vanished, or through a firewall that forgot it, must not stay for ever.
    sock.tcp_keepalive = 1
    sock.tcp_keepalive_idle = 5
    sock.tcp_keepalive_intvl = 5
    sock.tcp_keepalive_cnt = 6


def _send_now(sock: zmq.asyncio.Socket, frames: list[bytes]) -> bool:
    """With DONTWAIT zmq.asyncio's future is done when it returns."""
    sent = sock.send_multipart(frames, zmq.DONTWAIT)
    assert isinstance(sent, asyncio.Future)
    try:
        sent.result()
    except zmq.ZMQError:
        return False
    return True
