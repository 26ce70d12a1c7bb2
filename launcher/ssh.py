"""A host over SSH by paramiko, reached step by step: each failure names its step, its cause and the fix.

No password or question is ever asked, no unknown key is ever accepted, and a link that is dead is noticed by
keepalives that want an answer.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import shlex
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH

from mlx_mesh.launcher import known_hosts
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.known_hosts import KnownKey, Trust
from mlx_mesh.launcher.remote import Exit, LineSplitter, OnExit, OnLine, Stream
from mlx_mesh.launcher.ssh_config import MAX_JUMPS, JumpSpec, SshSettings, read_settings

BANNER_TIMEOUT_S = 15.0
AUTH_TIMEOUT_S = 20.0
OPEN_TIMEOUT_S = 15.0

# What paramiko would log is told by HostFault; without a handler Python prints its tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


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
        self._pinger = _Pinger(self._transport, route.settings.alive_interval_s, route.settings.alive_count)

    @classmethod
    def connect(cls, name: str, route: Route) -> SshHost:
        """Reach, check and authenticate, through all jumps. Raises HostFault."""
        chain = [route]
        while chain[0].via is not None:
            chain.insert(0, chain[0].via)
        transports: list[paramiko.Transport] = []
        try:
            for part in chain:
                transports.append(_open(name, part.settings, transports[-1] if transports else None))
            return cls(name, route, transports)
        except BaseException:
            for transport in reversed(transports):
                transport.close()
            raise

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
                f"the host let us in but runs no command ({_words(error)})",
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
                f"{self.name} cannot reach {host}:{port} for us ({_words(error)})"
            ) from error
        near, far = socket.socketpair()  # a channel has not all methods that http.client wants of a socket
        near.settimeout(timeout_s)
        channel.settimeout(None)
        threading.Thread(target=_relay, args=(channel, far), daemon=True).start()
        return near

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


def _relay(channel: paramiko.Channel, far: socket.socket) -> None:
    """Pass bytes both ways until both sides have ended."""

    def outwards() -> None:
        with contextlib.suppress(OSError, EOFError):
            while data := far.recv(65536):
                channel.sendall(data)
            channel.shutdown_write()

    with far:
        sender = threading.Thread(target=outwards, daemon=True)
        sender.start()
        with contextlib.suppress(OSError, EOFError):
            while data := channel.recv(65536):
                far.sendall(data)
            far.shutdown(socket.SHUT_WR)
        sender.join()
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


class _Pinger:
    """Asks the other side for a sign of life, and closes the connection when none comes in time. paramiko's
    own keepalive wants no answer, so a silent link would go unnoticed for a quarter of an hour."""

    def __init__(self, transport: paramiko.Transport, interval_s: float, count: int) -> None:
        self.verdict = ""
        self._transport = transport
        self._interval_s = interval_s
        self._limit_s = interval_s * count
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
            if asked_at is not None and time.monotonic() - asked_at > self._limit_s:
                self.verdict = f"no answer for {self._limit_s:g} s"
                self._transport.close()
                return

    def stop(self) -> None:
        self._stop.set()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(timeout=2.0)


# ---------------------------------------------------------------- the steps of a connection


def _open(host: str, settings: SshSettings, through: paramiko.Transport | None) -> paramiko.Transport:
    """Resolve, connect, check the host key, authenticate. Raises HostFault."""
    at = "" if settings.alias == host else f"{settings.alias}: "
    sock = _connect(host, at, settings) if through is None else _tunnel(host, at, settings, through)
    known = _read_known_hosts(settings)
    transport: paramiko.Transport | None = None
    try:
        try:
            transport = paramiko.Transport(sock)
            transport.daemon = True
            _choose_algorithms(transport, settings, known)
            _negotiate(transport)
        except (paramiko.SSHException, EOFError, OSError, ValueError) as error:
            raise HostFault(
                host,
                "connect",
                f"{at}{settings.hostname} port {settings.port} does not speak SSH with us ({_words(error)})",
                f"see what `{settings.command}` says; is it an SSH server, neither overloaded nor stopped?",
            ) from error
        _check_host_key(host, at, settings, transport.get_remote_server_key(), known)
        _authenticate(host, at, settings, transport)
    except BaseException:
        if transport is not None:
            transport.close()
        sock.close()
        raise
    return transport


def _connect(host: str, at: str, settings: SshSettings) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            settings.hostname, settings.port, settings.address_family, socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise HostFault(
            host,
            "resolve",
            f"{at}no address for {settings.hostname} ({_words(error)})",
            "correct `ssh:` in the hostfile or HostName in ~/.ssh/config; a Mac's name ends in .local and "
            "shows in System Settings > General > Sharing",
        ) from error
    found.sort(
        key=lambda item: item[0] != socket.AF_INET
    )  # data links are IPv4: prefer what shows that it works
    errors: list[str] = []
    for _, _, _, _, address in found:
        try:
            return socket.create_connection(
                (str(address[0]), settings.port),
                timeout=settings.connect_timeout_s,
                source_address=(settings.bind_address, 0) if settings.bind_address else None,
            )
        except TimeoutError:
            errors.append(
                f"{address[0]} port {settings.port}: no answer within {settings.connect_timeout_s:g} s"
            )
        except OSError as error:
            errors.append(f"{address[0]} port {settings.port}: {error.strerror or error}")
    told = ", ".join(dict.fromkeys(errors))
    if "refused" in told:
        fix = (
            "turn on Remote Login there (System Settings > General > Sharing), or start sshd, or correct Port"
        )
    elif "No route" in told:
        fix = "check the network; on macOS also Local Network access of your terminal in Privacy & Security"
    else:
        fix = "check that the host is on, awake and on this network"
    raise HostFault(host, "connect", f"{at}{told}", fix)


def _tunnel(host: str, at: str, settings: SshSettings, through: paramiko.Transport) -> paramiko.Channel:
    where = f"{settings.hostname} port {settings.port}"
    try:
        return through.open_channel(
            "direct-tcpip",
            (settings.hostname, settings.port),
            ("127.0.0.1", 0),
            timeout=settings.connect_timeout_s,
        )
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise HostFault(
            host,
            "connect",
            f"{at}the jump host cannot reach {where} ({_words(error)})",
            "check the name as the jump host knows it, and that it allows TCP forwarding",
        ) from error


def _choose_algorithms(transport: paramiko.Transport, settings: SshSettings, known: list[KnownKey]) -> None:
    """Only what both the settings and paramiko allow; of host keys first the types that are known."""
    options = transport.get_security_options()

    def both(ours: Sequence[str], allowed: Sequence[str], what: str) -> tuple[str, ...]:
        chosen = tuple(name for name in ours if not allowed or name in allowed)
        if not chosen:
            raise ValueError(f"none of the {what} in ~/.ssh/config is supported here: {', '.join(allowed)}")
        return chosen

    options.ciphers = both(options.ciphers, settings.ciphers, "Ciphers")
    options.digests = both(options.digests, settings.macs, "MACs")
    options.kex = both(options.kex, settings.kex, "KexAlgorithms")
    allowed = both(options.key_types, settings.host_key_algorithms, "HostKeyAlgorithms")
    types = known_hosts.known_key_types(known, settings.known_as)
    options.key_types = tuple(sorted(allowed, key=lambda name: _signed_type(name) not in types))


def _signed_type(algorithm: str) -> str:
    """The type that known_hosts writes for a signature algorithm."""
    return "ssh-rsa" if algorithm.startswith("rsa-sha2-") else algorithm


def _negotiate(transport: paramiko.Transport) -> None:
    done = threading.Event()
    transport.banner_timeout = BANNER_TIMEOUT_S
    transport.start_client(event=done)
    if not done.wait(BANNER_TIMEOUT_S + OPEN_TIMEOUT_S):
        raise TimeoutError(f"no key exchange within {BANNER_TIMEOUT_S + OPEN_TIMEOUT_S:g} s")
    error = transport.get_exception()
    if error is not None:
        raise error
    if not transport.is_active():
        raise EOFError("the connection was closed before the key exchange")


def _read_known_hosts(settings: SshSettings) -> list[KnownKey]:
    known: list[KnownKey] = []
    for file in settings.known_hosts_files:
        with contextlib.suppress(OSError):  # a file that is not there knows nothing, as in OpenSSH
            known += known_hosts.parse_known_hosts(Path(file).read_text("utf-8", "replace"), file)
    return known


def _check_host_key(
    host: str, at: str, settings: SshSettings, key: paramiko.PKey, known: list[KnownKey]
) -> None:
    key_type, text = key.get_name(), key.get_base64()
    kind = key_type.removeprefix("ssh-").removeprefix("ecdsa-sha2-").upper()
    print_of_it = known_hosts.fingerprint(text)
    if key_type == "ssh-rsa" and key.get_bits() < settings.min_rsa_bits:
        raise HostFault(
            host,
            "host key",
            f"{at}its RSA key has {key.get_bits()} bits, and RequiredRSASize is {settings.min_rsa_bits}",
            "make it a longer or an ED25519 host key",
        )
    verdict = known_hosts.judge(known, settings.known_as, key_type, text)
    entry = verdict.entry
    if verdict.trust is Trust.KNOWN:
        return
    compare = "compare it with `ssh-keygen -lf /etc/ssh/ssh_host_*_key.pub` typed on that host"
    file = settings.known_hosts_files[0] if settings.known_hosts_files else ""
    trust_it = (
        f"echo '{verdict.name} {key_type} {text}' >> {shlex.quote(file)}"
        if file
        else "set UserKnownHostsFile to a file for this host in ~/.ssh/config"
    )
    if verdict.trust is Trust.REVOKED:
        assert entry is not None
        raise HostFault(
            host,
            "host key",
            f"{at}REVOKED host key: {kind} {print_of_it} is @revoked in {entry.file} line {entry.line}",
            "do not connect; find out who answers at that address",
        )
    if verdict.trust is Trust.CHANGED:
        assert entry is not None
        raise HostFault(
            host,
            "host key",
            f"{at}CHANGED host key: it shows {kind} {print_of_it}, but {entry.file} line {entry.line} has "
            f"{known_hosts.fingerprint(entry.key)}; the host was set up anew, or another machine answers",
            f"{compare}; if it is right, forget the old key: ssh-keygen -R {shlex.quote(verdict.name)} -f "
            f"{shlex.quote(entry.file)} and add the new one: {trust_it}",
        )
    beside = ""
    if entry is not None and entry.marker:
        beside = f" ({entry.file} line {entry.line} has a @cert-authority for it, which is not supported)"
    elif entry is not None:
        beside = f" ({entry.file} line {entry.line} has only its {entry.key_type} key)"
    raise HostFault(
        host,
        "host key",
        f"{at}UNKNOWN host key: {kind} {print_of_it} of {verdict.name} is in no known_hosts file{beside}",
        f"{compare}; if it is right, add it: {trust_it}",
    )


class _AgentAt(AgentSSH):
    """The ssh-agent behind a given socket; paramiko's own looks at the environment only."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(AUTH_TIMEOUT_S)
        self._socket.connect(path)
        self._connect(self._socket)  # type: ignore[attr-defined]

    def close(self) -> None:
        self._socket.close()


def _authenticate(host: str, at: str, settings: SshSettings, transport: paramiko.Transport) -> None:
    """Public keys in OpenSSH's order: those of the agent that are named, the agent's others, the files."""
    transport.auth_timeout = AUTH_TIMEOUT_S
    tried: list[str] = []
    notes: list[str] = []
    agent = _agent(settings, notes)
    try:
        named = {_public_blob(path) for path in settings.identity_files} - {None}
        keys = list(agent.get_keys()) if agent else []
        in_agent = {key.asbytes() for key in keys}
        for key in sorted(keys, key=lambda key: key.asbytes() not in named):
            if settings.identities_only and key.asbytes() not in named:
                continue
            if _try_key(host, at, settings, transport, key, "the agent's key", tried):
                return
        for path in settings.identity_files:
            if _public_blob(path) in in_agent:
                continue
            file_key = _load_key(path, notes)
            if file_key and _try_key(host, at, settings, transport, file_key, path, tried):
                return
    finally:
        if agent:
            agent.close()
    seen = f"refused {', '.join(tried)}" if tried else "there is no key to offer"
    copy = f"ssh-copy-id {settings.user}@{settings.alias}"
    raise HostFault(
        host,
        "auth",
        f"{at}as {settings.user}: {'; '.join([seen, *notes])}",
        f"run `{copy}`, or set IdentityFile or `user:` for this host",
    )


def _agent(settings: SshSettings, notes: list[str]) -> _AgentAt | None:
    if not settings.agent_socket:
        return None
    try:
        return _AgentAt(settings.agent_socket)
    except (OSError, paramiko.SSHException) as error:
        notes.append(f"no ssh-agent at {settings.agent_socket} ({_words(error)})")
        return None


def _try_key(
    host: str,
    at: str,
    settings: SshSettings,
    transport: paramiko.Transport,
    key: paramiko.PKey,
    label: str,
    tried: list[str],
) -> bool:
    told = f"{label} {known_hosts.fingerprint(key.get_base64())}"
    try:
        more = transport.auth_publickey(settings.user, key)
    except paramiko.BadAuthenticationType as error:
        raise HostFault(
            host,
            "auth",
            f"{at}as {settings.user}: the host takes no public key, only {', '.join(error.allowed_types)}",
            "allow PubkeyAuthentication in its sshd_config; a password is never asked for",
        ) from error
    except paramiko.AuthenticationException as error:
        tried.append(told)
        if transport.is_active():
            return False
        raise HostFault(
            host,
            "auth",
            f"{at}as {settings.user}: the host hung up ({_words(error)}) after {', '.join(tried)}",
            "name the right key with IdentityFile and `IdentitiesOnly yes` for this host",
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise HostFault(
            host,
            "auth",
            f"{at}as {settings.user}: {_words(error)} while trying {told}",
            "name the right key with IdentityFile and `IdentitiesOnly yes` for this host; "
            f"see what `{settings.command}` says",
        ) from error
    if more:
        raise HostFault(
            host,
            "auth",
            f"{at}as {settings.user}: after the key the host also asks for {', '.join(more)}",
            "allow the key alone for this user (AuthenticationMethods publickey); nothing is ever asked",
        )
    return True


def _load_key(path: str, notes: list[str]) -> paramiko.PKey | None:
    if not Path(path).exists():
        return None
    try:
        return paramiko.PKey.from_path(path)
    except (paramiko.PasswordRequiredException, TypeError):
        notes.append(f"{path} has a passphrase and is not in the agent (run `ssh-add {path}`)")
    except OSError as error:
        notes.append(f"{path} cannot be read ({error.strerror})")
    except Exception as error:  # cryptography and paramiko raise many kinds for keys they cannot read
        notes.append(f"{path} cannot be used ({_words(error)})")
    return None


def _public_blob(path: str) -> bytes | None:
    """The public half of an identity, from its .pub file."""
    try:
        fields = Path(path + ".pub").read_text("utf-8").split()
        return base64.b64decode(fields[1])
    except (OSError, ValueError, IndexError):
        return None


def _words(error: BaseException) -> str:
    """An exception in words; some have none."""
    text = str(getattr(error, "strerror", None) or error) or type(error).__name__
    return " ".join(text.split())
