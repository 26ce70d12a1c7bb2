"""`mlx-mesh agent`: a host that waits for its launchers.

An SSH server that knows no user of the system and no shell. Who has a paired key may run what this host's
own mlx-mesh consists of, an agent of a mesh or one of a few small programs, and nothing else. Everybody else
may say hello, or pair with a code or a secret. A connection that ends takes what it started with it.
"""

from __future__ import annotations

import ast
import base64
import contextlib
import os
import re
import shlex
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import resources

import paramiko
from paramiko.common import (
    AUTH_FAILED,
    AUTH_SUCCESSFUL,
    OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED,
    OPEN_FAILED_CONNECT_FAILED,
    OPEN_SUCCEEDED,
)

from mlx_mesh.launcher.agent_wire import (
    GUEST,
    HELLO,
    LAUNCHER,
    PAIR,
    Hello,
    PairAnswer,
    PairProof,
    PairRequest,
    PairResult,
    hang_up,
    read_line,
    write_line,
)
from mlx_mesh.launcher.config import is_loopback
from mlx_mesh.launcher.known_hosts import fingerprint
from mlx_mesh.launcher.pairing import HostSide, OneTimeCode, PairingRefused, SharedSecret, binding
from mlx_mesh.launcher.pairings import PairedLauncher, Pairings, fingerprint_of
from mlx_mesh.launcher.remote import Exit, LocalHost, LocalProcess, Stream
from mlx_mesh.launcher.ssh import Pinger, relay
from mlx_mesh.launcher.text import harmless
from mlx_mesh.mesh.errors import MeshError, SettingsError

MAX_CONNECTIONS = 32
MAX_STRANGERS = 8  # connections that have not proven anything yet, and guests
ACCEPT_S = 0.5
AUTH_S = 20.0  # from the connection to the proof of a key
GUEST_S = 60.0  # then a guest is sent away
PING_S = 5.0
SILENCE_S = 120.0
"""A launcher that answers nothing for so long is gone: what it started ends."""

END_S = 20.0
"""From the end of its input to the end of a process; then it is killed."""

MAX_GUEST_CHANNELS = 4
"""In all of a guest's connection; it needs one. Each costs this host a thread."""

MAX_PROGRAM_BYTES = 1 << 20
MAX_SECRET_LAUNCHERS = 64

PROGRAMS = ("facts_probe", "processes", "tail_log")
"""Of `launcher.programs`, what a mesh needs; another one installs software, which is no launcher's matter."""

_MODULE = re.compile(r"mlx_mesh\.node(\.[a-z_]+)*")


class NotOurs(ValueError):
    """A command that no launcher of ours would send."""


def own_words(command: str) -> list[str]:
    """The command as this host runs it: with this interpreter, whatever path the launcher named. Raises
    NotOurs for anything that is not mlx-mesh's own."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise NotOurs(f"{command[:80]!r} ({error})") from error
    if words[:1] == ["exec"] and words[2:4] == ["-I", "-u"]:
        rest = words[4:]
        if rest == ["-"]:
            return [sys.executable, "-I", "-u", "-"]
        if len(rest) >= 2 and rest[0] == "-m" and _MODULE.fullmatch(rest[1]):
            return [sys.executable, "-I", "-u", *rest]
    raise NotOurs(f"{command[:80]!r}")


def check_program(text: bytes) -> None:
    """Raises NotOurs unless it is one of PROGRAMS, to the letter as it is here, called with two texts."""
    for name in PROGRAMS:
        source = resources.files("mlx_mesh.launcher.programs").joinpath(f"{name}.py").read_bytes()
        if text.startswith(source + b"\n\nmain(") and _is_plain_call(text[len(source) + 2 :]):
            return
    raise NotOurs("a program that this host's mlx-mesh does not have: install the same version on both hosts")


def _is_plain_call(text: bytes) -> bool:
    """`main('...', '...')`, and nothing around it."""
    try:
        parsed = ast.parse(text.decode("utf-8").strip("\n"), mode="eval").body
    except (SyntaxError, ValueError):
        return False
    return (
        isinstance(parsed, ast.Call)
        and isinstance(parsed.func, ast.Name)
        and not parsed.keywords
        and len(parsed.args) == 2
        and all(isinstance(each, ast.Constant) and isinstance(each.value, str) for each in parsed.args)
    )


class Waiting:
    """The server. `listen`, `start`, then `stop`."""

    def __init__(
        self,
        *,
        key: paramiko.PKey,
        pairings: Pairings,
        code: OneTimeCode | None,
        secret: str,
        hello: Callable[[], Hello],
        say: Callable[[str], None],
        on_paired: Callable[[PairedLauncher], None] = lambda launcher: None,
    ) -> None:
        """`secret` '' = none; `hello` and `say` are called in any thread."""
        self.key = key
        self.pairings = pairings
        self.code = code
        self.secret = SharedSecret(secret) if secret else None
        self.hello = hello
        self.say = say
        self.on_paired = on_paired
        self.host = LocalHost("this host")
        self._by_secret: list[str] = []  # fingerprints of launchers that proved the secret to this process
        self._connections: set[_Connection] = set()
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="agent door", daemon=True)

    def listen(self, address: str, port: int) -> int:
        """Returns the port. Raises SettingsError."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        sock.settimeout(ACCEPT_S)  # closing a socket does not end a wait for it everywhere
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(MAX_CONNECTIONS)
        except OSError as error:
            sock.close()
            raise SettingsError(
                f"Port {port} cannot be had ({error.strerror}). If another `mlx-mesh agent` waits there, one "
                "is enough; else give --port."
            ) from error
        self._socket = sock
        return int(sock.getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def _accept(self) -> None:
        assert self._socket is not None
        while not self._is_stopping.is_set():
            try:
                sock, (address, port) = self._socket.accept()
            except TimeoutError:
                continue
            except OSError:
                if self._is_stopping.is_set():
                    return
                time.sleep(0.1)  # no descriptor is free
                continue
            connection = _Connection(self, sock, str(address), int(port))
            with self._lock:
                strangers = sum(not each.is_launcher for each in self._connections)
                is_full = len(self._connections) >= MAX_CONNECTIONS or strangers >= MAX_STRANGERS
                if not is_full and not self._is_stopping.is_set():
                    self._connections.add(connection)
            if is_full:
                self.say(f"refused {address}: too many connections are open")
                sock.close()
            else:
                connection.start()

    def ended(self, connection: _Connection) -> None:
        with self._lock:
            self._connections.discard(connection)

    def stop(self) -> None:
        """Close the door, end every connection, and with it what it started."""
        self._is_stopping.set()
        if self._thread.is_alive():
            self._thread.join(2 * ACCEPT_S)
        if self._socket is not None:
            self._socket.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()
        for connection in connections:
            connection.join(END_S + 5.0)

    # ------------------------------------------------------------ who may come in

    def knows(self, key: paramiko.PKey) -> bool:
        """Whether a launcher with this key may come in."""
        shown = fingerprint_of(key)
        if shown in self._by_secret:
            return True
        try:
            return any(launcher.key == shown for launcher in self.pairings.launchers())
        except SettingsError as error:
            self.say(f"nobody is let in: {error}")
            return False

    def accept(self, by: str, launcher: PairedLauncher) -> None:
        """Who proved the secret is let in while this process lives; who had the code, from now on."""
        if by == "secret":
            with self._lock:
                self._by_secret = [launcher.key, *self._by_secret][:MAX_SECRET_LAUNCHERS]
        else:
            self.pairings.keep_launcher(launcher)
        self.on_paired(launcher)


class _Connection:
    """One launcher, or a guest."""

    def __init__(self, waiting: Waiting, sock: socket.socket, address: str, port: int) -> None:
        self.waiting = waiting
        self.address = address
        self._sock = sock
        here, own_port = sock.getsockname()
        self.environment = {**os.environ, "SSH_CONNECTION": f"{address} {port} {here} {own_port}"}
        self.transport: paramiko.Transport | None = None
        self.forwards: dict[int, socket.socket] = {}  # by channel, until it is there
        self._processes: list[_Process] = []
        self._thread = threading.Thread(target=self._serve, name=f"agent {address}", daemon=True)

    @property
    def is_launcher(self) -> bool:
        """It proved a key that is paired. A user name cannot change within a connection."""
        transport = self.transport
        return transport is not None and transport.is_authenticated() and transport.get_username() == LAUNCHER

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
        with contextlib.suppress(OSError):
            self._sock.close()

    def say(self, text: str) -> None:
        self.waiting.say(f"{self.address}: {text}")

    def _serve(self) -> None:
        pinger: Pinger | None = None
        try:
            self.transport = transport = paramiko.Transport(self._sock)
            transport.daemon = True
            transport.add_server_key(self.waiting.key)
            began = time.monotonic()
            transport.start_server(event=threading.Event(), server=_Door(self))
            while transport.is_active():
                if not transport.is_authenticated() and time.monotonic() - began > AUTH_S:
                    return
                if (
                    transport.is_authenticated()
                    and not self.is_launcher
                    and time.monotonic() - began > GUEST_S
                ):
                    return
                if self.is_launcher and pinger is None:
                    self.say("a launcher came in")
                    pinger = Pinger(transport, PING_S, int(SILENCE_S / PING_S))
                channel = transport.accept(0.2)  # sessions are served by what is asked of them
                if channel is not None and (far := self.forwards.pop(channel.get_id(), None)):
                    threading.Thread(target=relay, args=(channel, far), daemon=True).start()
        except (paramiko.SSHException, EOFError, OSError):
            pass
        finally:
            self.close()
            if pinger is not None:
                pinger.stop()
            self._end_processes()
            for far in self.forwards.values():
                far.close()
            self.waiting.ended(self)
            if pinger is not None:
                self.say(f"the launcher is gone{pinger.verdict and ': '}{pinger.verdict}")

    # ------------------------------------------------------------ what a launcher runs

    def run(self, channel: paramiko.Channel, words: list[str]) -> None:
        process = _Process(self, channel, words)
        self._processes = [each for each in self._processes if each.is_alive] + [process]
        process.start()

    def _end_processes(self) -> None:
        """Their input ends with the connection. An agent takes its engines with it, which takes a moment."""
        processes = list(self._processes)
        until = time.monotonic() + END_S
        for process in processes:
            if not process.wait(max(0.0, until - time.monotonic())):
                self.say(f"{process.told} did not end within {END_S:g} s and is killed")
                process.kill()


class _Process:
    """A command of a launcher. Its streams are those of the channel."""

    def __init__(self, connection: _Connection, channel: paramiko.Channel, words: list[str]) -> None:
        self._connection = connection
        self._channel = channel
        self._words = words
        self._local: LocalProcess | None = None
        self._ended = threading.Event()
        self.told = " ".join(words[3:5])

    def start(self) -> None:
        threading.Thread(target=self._run, name=f"agent {self.told}", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def _is_program(self) -> bool:
        return self._words[-1] == "-"

    def _run(self) -> None:
        try:
            text = self._read_program() if self._is_program else b""
            host = LocalHost("this host", self._connection.environment)
            self._local = host.start(self._words, self._on_line, self._on_exit)
        except (NotOurs, MeshError, OSError) as error:
            self._connection.say(f"refused: {error}")
            with contextlib.suppress(OSError, EOFError):
                self._channel.sendall_stderr(f"mlx-mesh agent: refused: {error}\n".encode())
                self._channel.send_exit_status(126)
            self._close()
            return
        if self._is_program:
            self._local.send(text)
            self._local.close_stdin()
            self._wait_for_end_of_channel()
            self._local.kill()
            return
        with contextlib.suppress(OSError):
            while data := self._channel.recv(65536):
                self._local.send(data)
        self._local.close_stdin()

    def _read_program(self) -> bytes:
        text = bytearray()
        with contextlib.suppress(OSError):
            while data := self._channel.recv(65536):
                text += data
                if len(text) > MAX_PROGRAM_BYTES:
                    raise NotOurs(f"a program of more than {MAX_PROGRAM_BYTES} bytes")
        check_program(bytes(text))
        return bytes(text)

    def _wait_for_end_of_channel(self) -> None:
        """A program that follows a file ends when nobody listens any more."""
        while not self._ended.wait(0.2):
            if self._channel.closed:
                return

    def _on_line(self, stream: Stream, line: str) -> None:
        send = self._channel.sendall if stream == "stdout" else self._channel.sendall_stderr
        with contextlib.suppress(OSError, EOFError):  # nobody listens any more
            send(line.encode("utf-8", "replace") + b"\n")

    def _on_exit(self, exit: Exit) -> None:
        with contextlib.suppress(OSError, EOFError, paramiko.SSHException):
            if exit.code is not None:
                self._channel.send_exit_status(exit.code)
        self._close()

    def _close(self) -> None:
        hang_up(self._channel)
        self._ended.set()

    def wait(self, timeout_s: float) -> bool:
        return self._ended.wait(timeout_s)

    def kill(self) -> None:
        if self._local is not None:
            self._local.kill()


class _Door(paramiko.ServerInterface):
    """What is answered to whom. Called in the transport's thread: nothing here waits."""

    def __init__(self, connection: _Connection) -> None:
        self._connection = connection
        self._waiting = connection.waiting
        self._refused: set[str] = set()
        self._num_channels = 0

    def get_allowed_auths(self, username: str) -> str:
        return "none" if username == GUEST else "publickey"

    def check_auth_none(self, username: str) -> int:
        return AUTH_SUCCESSFUL if username == GUEST else AUTH_FAILED

    def check_auth_publickey(self, username: str, key: paramiko.PKey) -> int:
        if username == LAUNCHER and self._waiting.knows(key):
            return AUTH_SUCCESSFUL
        shown = fingerprint_of(key)
        if shown not in self._refused:
            self._refused.add(shown)
            self._connection.say(f"refused a launcher that is not paired with this host (key {shown})")
        return AUTH_FAILED

    def check_channel_request(self, kind: str, chanid: int) -> int:
        self._num_channels += 1
        if kind == "session" and (self._connection.is_launcher or self._num_channels <= MAX_GUEST_CHANNELS):
            return OPEN_SUCCEEDED
        return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED

    def check_channel_direct_tcpip_request(
        self, chanid: int, origin: tuple[str, int], destination: tuple[str, int]
    ) -> int:
        """A mesh's HTTP on this host's loopback, for `status` and `chat` of its launcher."""
        host, port = destination
        if not self._connection.is_launcher or not is_loopback(host):
            return OPEN_FAILED_ADMINISTRATIVELY_PROHIBITED
        try:
            far = socket.create_connection((host, port), timeout=2.0)
        except OSError:
            return OPEN_FAILED_CONNECT_FAILED
        far.settimeout(None)
        self._connection.forwards[chanid] = far
        return OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel: paramiko.Channel, command: bytes) -> bool:
        if not self._connection.is_launcher:
            return False
        try:
            words = own_words(command.decode("utf-8"))
        except (NotOurs, UnicodeDecodeError) as error:
            self._connection.say(f"refused a command that is not mlx-mesh's: {error}")
            return False
        self._connection.run(channel, words)
        return True

    def check_channel_subsystem_request(self, channel: paramiko.Channel, name: str) -> bool:
        serve = {HELLO: _say_hello, PAIR: _pair}.get(name)
        if serve is None:
            return False
        threading.Thread(target=serve, args=(self._connection, channel), daemon=True).start()
        return True


# ---------------------------------------------------------------- guests


def _say_hello(connection: _Connection, channel: paramiko.Channel) -> None:
    with contextlib.suppress(PairingRefused, OSError):
        write_line(channel, connection.waiting.hello())
        channel.recv(1)  # until the guest hangs up: an end before the request is granted would be a refusal
    hang_up(channel)


def _pair(connection: _Connection, channel: paramiko.Channel) -> None:
    try:
        _pair_with(connection, channel)
    except PairingRefused as error:
        connection.say(f"not paired: {error}")
    finally:
        hang_up(channel)


def _pair_with(connection: _Connection, channel: paramiko.Channel) -> None:
    """Raises PairingRefused, after the launcher was told."""
    waiting = connection.waiting
    transport = connection.transport
    assert transport is not None
    request = read_line(channel, PairRequest)
    label = harmless(request.label)[:64]
    lock = {"code": waiting.code, "secret": waiting.secret}.get(request.by)
    try:
        if lock is None:
            raise PairingRefused(_no_lock(request.by))
        launcher_key = base64.b64decode(request.key, validate=True)
        password = lock.begin()
    except (PairingRefused, ValueError) as error:
        write_line(channel, PairAnswer(refused=str(error)))
        raise PairingRefused(f"{label}: {error}") from error
    is_paired = False
    try:
        side = HostSide(password, binding(waiting.key.asbytes(), launcher_key, transport.session_id or b""))
        message, proof = side.answer(_unhex(request.message))
        write_line(channel, PairAnswer(message=message.hex(), proof=proof.hex()))
        side.check(_unhex(read_line(channel, PairProof).proof))
        lock.use()
        is_paired = True
    except PairingRefused as error:
        left = f"; {lock.tries_left} tries are left" if isinstance(lock, OneTimeCode) else ""
        with contextlib.suppress(PairingRefused):
            write_line(channel, PairResult(refused=str(error)))
        raise PairingRefused(f"{label}: {str(error).rstrip('.')}{left}") from error
    finally:
        if not is_paired:
            lock.failed()
    launcher = PairedLauncher(
        label=label, key=fingerprint(request.key), address=connection.address, paired_at=time.time()
    )
    waiting.accept(request.by, launcher)
    connection.say(f"paired with {label} by {request.by} (key {launcher.key})")
    write_line(channel, PairResult())


def _no_lock(by: str) -> str:
    if by == "code":
        return "this host shows no code. Start `mlx-mesh agent --pair` there."
    if by == "secret":
        return "this host has no secret. Start its agent with the launcher's MLX_MESH_SECRET."
    return f"pairing by {by[:16]!r} is not known here."


def _unhex(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError as error:
        raise PairingRefused("what it sent is no part of a pairing (not hex).") from error
