"""A host over SSH by paramiko: an authenticated connection, commands on it, streams through it, and a watch
that notices when the link is dead.
"""

from __future__ import annotations

import contextlib
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import paramiko

from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.remote import Exit, LineSplitter, OnExit, OnLine, Stream
from mlx_mesh.launcher.ssh_config import MAX_JUMPS, JumpSpec, SshSettings, read_settings
from mlx_mesh.launcher.ssh_connect import in_words, open_transport

OPEN_TIMEOUT_S = 15.0


@dataclass(frozen=True, slots=True)
class Route:
    """A host's settings and those of the host to pass through, if any."""

    settings: SshSettings
    via: Route | None = None


def find_route(host: str, target: str, user: str = "", config_file: str | None = None) -> Route:
    """Settings of `target` and of every host that its ProxyJump passes. Raises HostFault ("settings")."""
    return _route(host, JumpSpec(target, user), None, config_file, 0)


def _route(
    host: str, spec: JumpSpec, through: tuple[JumpSpec, ...] | None, config_file: str | None, depth: int
) -> Route:
    """`through` None: what the target's own settings say, as ssh does for the first host of a chain."""
    if depth > MAX_JUMPS:
        raise HostFault(
            host,
            "settings",
            f"ProxyJump passes more than {MAX_JUMPS} hosts, or itself",
            "correct ~/.ssh/config",
        )
    settings = read_settings(host, spec.host, spec.user, spec.port, config_file)
    jumps = through or settings.jumps
    if not jumps:
        return Route(settings)
    return Route(settings, _route(host, jumps[-1], jumps[:-1], config_file, depth + 1))


class SshHost:
    """An authenticated connection to one host. Made by `connect`."""

    def __init__(self, name: str, route: Route, transports: list[paramiko.Transport]) -> None:
        self.name = name
        self.settings = route.settings
        self._transports = transports  # ours last; before it those of the jump hosts
        self._transport = transports[-1]
        self.local_address, self.peer_address = "", ""
        sock = self._transport.sock
        if isinstance(sock, socket.socket):
            self.local_address, self.peer_address = str(sock.getsockname()[0]), str(sock.getpeername()[0])
        self._pinger = Pinger(self._transport, route.settings.alive_interval_s, route.settings.alive_count)

    @classmethod
    def connect(cls, name: str, route: Route) -> SshHost:
        """Reach, check and authenticate, through all jumps. Raises HostFault."""
        chain = [route]
        while chain[0].via is not None:
            chain.insert(0, chain[0].via)
        transports: list[paramiko.Transport] = []
        try:
            for part in chain:
                transports.append(open_transport(name, part.settings, transports[-1] if transports else None))
            return cls(name, route, transports)
        except BaseException:
            for transport in reversed(transports):
                transport.close()
            raise

    @property
    def host_key(self) -> str:
        """Its public key, as known_hosts writes it."""
        key = self._transport.get_remote_server_key()
        return f"{key.get_name()} {key.get_base64()}"

    @property
    def lost(self) -> str:
        """Why the connection is gone; '' while it is there."""
        if self._pinger.verdict:
            return self._pinger.verdict
        return "" if self._transport.is_active() else "closed by the other side"

    def start(self, words: Sequence[str], on_line: OnLine, on_exit: OnExit) -> SshProcess:
        command = "exec " + " ".join(quote_word(self.name, word) for word in words)
        try:
            channel = self._transport.open_session(timeout=OPEN_TIMEOUT_S)
            channel.exec_command(command)
        except (paramiko.SSHException, EOFError, OSError) as error:
            if self.lost:
                raise HostFault(
                    self.name, "connect", f"the connection was lost ({self.lost})", "see if the host is awake"
                ) from error
            raise HostFault(
                self.name,
                "interpreter",
                f"the host let us in but runs no command ({in_words(error)})",
                f"check the login shell and forced commands of {self.settings.user} there",
            ) from error
        return SshProcess(self, channel, on_line, on_exit)

    def connect_to(self, host: str, port: int, timeout_s: float) -> socket.socket:
        try:
            channel = self._transport.open_channel(
                "direct-tcpip", (host, port), ("127.0.0.1", 0), timeout=timeout_s
            )
        except (paramiko.SSHException, EOFError) as error:
            raise ConnectionRefusedError(
                f"{self.name} cannot reach {host}:{port} for us ({in_words(error)})"
            ) from error
        near, far = socket.socketpair()  # a channel has not all methods that http.client wants of a socket
        near.settimeout(timeout_s)
        channel.settimeout(None)
        threading.Thread(target=relay, args=(channel, far), daemon=True).start()
        return near

    def be_patient(self, limit_s: float) -> None:
        self._pinger.limit_s = max(self._pinger.limit_s, limit_s)

    def close(self) -> None:
        self._pinger.stop()
        for transport in reversed(self._transports):
            transport.close()
        for transport in self._transports:
            transport.join(timeout=2.0)
        self._pinger.join()


class SshProcess:
    """A command on an SSH host."""

    def __init__(self, host: SshHost, channel: paramiko.Channel, on_line: OnLine, on_exit: OnExit) -> None:
        self._host = host
        self._channel = channel
        self._exit: Exit | None = None
        self._ended = threading.Event()
        self._on_exit = on_exit
        self._readers = [
            threading.Thread(target=self._pump, args=("stdout", on_line), daemon=True),
            threading.Thread(target=self._pump, args=("stderr", on_line), daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        threading.Thread(target=self._watch, daemon=True).start()

    def _pump(self, stream: Stream, on_line: OnLine) -> None:
        splitter = LineSplitter(stream, on_line)
        receive = self._channel.recv if stream == "stdout" else self._channel.recv_stderr
        with contextlib.suppress(OSError):
            while data := receive(65536):
                splitter.feed(data)
        splitter.finish()

    def _watch(self) -> None:
        for reader in self._readers:
            reader.join()
        self._channel.status_event.wait()  # set by the exit status, or by the connection's end
        status = self._channel.exit_status
        if status >= 0:
            self._exit = Exit(code=status)
        elif self._host.lost:
            self._exit = Exit(lost=self._host.lost)
        else:  # paramiko drops the name of the signal
            self._exit = Exit(signal=0)
        self._channel.close()
        self._ended.set()
        self._on_exit(self._exit)

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self._channel.sendall(data)

    def close_stdin(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            self._channel.shutdown_write()

    def wait(self, timeout_s: float) -> Exit | None:
        self._ended.wait(timeout_s)
        return self._exit

    def kill(self) -> None:
        self._channel.close()


def relay(channel: paramiko.Channel, far: socket.socket) -> None:
    """Pass bytes both ways until both sides have ended. The connection may end at any moment."""

    def outwards() -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := far.recv(65536):
                channel.sendall(data)
            channel.shutdown_write()

    with far:
        sender = threading.Thread(target=outwards, daemon=True)
        sender.start()
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            while data := channel.recv(65536):
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)
        sender.join()
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            channel.close()


def quote_word(host: str, word: str) -> str:
    """One word for any login shell: in single quotes, but for a leading `~/` that the shell is to expand."""
    bad = [character for character in "\n\r\0\\'!" if character in word]
    if bad:
        raise HostFault(
            host,
            "interpreter",
            f"{word!r} contains {bad[0]!r}, which shells read in different ways",
            "use a path without it",
        )
    if word.startswith("~/"):
        return "~/" + (shlex.quote(word[2:]) if word[2:] else "")
    return "'" + word + "'"


class Pinger:
    """Asks the other side for a sign of life, and closes the connection when none comes in time. paramiko's
    own keepalive wants no answer, so a silent link would go unnoticed for a quarter of an hour."""

    def __init__(self, transport: paramiko.Transport, interval_s: float, count: int) -> None:
        self.verdict = ""
        self._transport = transport
        self._interval_s = interval_s
        self.limit_s = interval_s * count
        self._stop = threading.Event()
        self._answered_at = time.monotonic()
        self._asked_at: float | None = None
        self._threads = [
            threading.Thread(target=self._ask, name="ssh-ping", daemon=True),
            threading.Thread(target=self._watch, name="ssh-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._stop.wait(self._interval_s) and self._transport.is_active():
            self._asked_at = time.monotonic()
            try:  # answered with a refusal, which is a sign of life too
                self._transport.global_request("keepalive@openssh.com", wait=True)
            except (paramiko.SSHException, EOFError, OSError):
                return
            self._asked_at = None

    def _watch(self) -> None:
        while not self._stop.wait(min(1.0, self._interval_s)) and self._transport.is_active():
            asked_at = self._asked_at
            if asked_at is not None and time.monotonic() - asked_at > self.limit_s:
                self.verdict = f"no answer for {self.limit_s:g} s"
                self._transport.close()
                return

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=2.0)
