"""The steps of one SSH connection: resolve, connect, host key, auth. Each failure is a HostFault that names
its step, what was seen and the repair. No password or question is asked, no unknown key is accepted.
"""

from __future__ import annotations

import base64
import contextlib
import logging
import platform
import shlex
import socket
import threading
from collections.abc import Sequence
from pathlib import Path

import paramiko
from paramiko.agent import AgentSSH

from mlx_mesh.launcher import known_hosts
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.known_hosts import KnownKey, Trust
from mlx_mesh.launcher.programs.dial_link import has_route
from mlx_mesh.launcher.ssh_config import SshSettings

BANNER_TIMEOUT_S = 15.0
KEY_EXCHANGE_TIMEOUT_S = 15.0
AUTH_TIMEOUT_S = 20.0
COMPARE = "compare it with `cat /etc/ssh/ssh_host_*_key.pub | ssh-keygen -lf -` typed on that host"

# What paramiko would log is told by HostFault; without a handler Python prints its tracebacks.
logging.getLogger("paramiko").addHandler(logging.NullHandler())
logging.getLogger("paramiko").propagate = False


def open_transport(
    host: str, settings: SshSettings, through: paramiko.Transport | None
) -> paramiko.Transport:
    """Resolve, connect, check the host key, authenticate. Raises HostFault."""
    known = read_known_hosts(settings)
    transport = reach(host, settings, through, known)
    try:
        at = _at(host, settings)
        check_host_key(host, at, settings, transport.get_remote_server_key(), known)
        _authenticate(host, at, settings, transport)
    except BaseException:
        transport.close()
        transport.sock.close()
        raise
    return transport


def reach(
    host: str, settings: SshSettings, through: paramiko.Transport | None, known: list[KnownKey]
) -> paramiko.Transport:
    """Resolve, connect and exchange keys, so that the host has shown its key and nothing more. Raises
    HostFault."""
    at = _at(host, settings)
    sock = _connect(host, at, settings) if through is None else _tunnel(host, at, settings, through)
    transport: paramiko.Transport | None = None
    try:
        transport = paramiko.Transport(sock)
        transport.daemon = True
        _choose_algorithms(transport, settings, known)
        _negotiate(transport)
    except BaseException as error:
        if transport is not None:
            transport.close()
        sock.close()
        if not isinstance(error, (paramiko.SSHException, EOFError, OSError, ValueError)):
            raise
        raise HostFault(
            host,
            "connect",
            f"{at}{settings.hostname} port {settings.port} does not speak SSH ({in_words(error)})",
            f"see what `{settings.command}` says; is it an SSH server, neither overloaded nor stopped?",
        ) from error
    return transport


def _at(host: str, settings: SshSettings) -> str:
    return "" if settings.alias == host else f"{settings.alias}: "


def _connect(host: str, at: str, settings: SshSettings) -> socket.socket:
    try:
        found = socket.getaddrinfo(
            settings.hostname, settings.port, settings.address_family, socket.SOCK_STREAM
        )
    except (OSError, UnicodeError) as error:
        raise HostFault(
            host,
            "resolve",
            f"{at}no address for {settings.hostname} ({in_words(error)})",
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
    elif "No route" in told and platform.system() == "Darwin" and has_route(str(found[0][4][0])):
        # What a program hears that may not reach the local network: there is a route, and none is found.
        fix = (
            "there is a route, so macOS's Local Network privacy refuses it: allow your terminal in System "
            "Settings > Privacy & Security > Local Network (off and on again if it is), outside tmux"
        )
    elif "No route" in told:
        fix = "check the cable, and that both hosts have addresses of one network"
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
            f"{at}the jump host cannot reach {where} ({in_words(error)})",
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
    if not done.wait(BANNER_TIMEOUT_S + KEY_EXCHANGE_TIMEOUT_S):
        raise TimeoutError(f"no key exchange within {BANNER_TIMEOUT_S + KEY_EXCHANGE_TIMEOUT_S:g} s")
    error = transport.get_exception()
    if error is not None:
        raise error
    if not transport.is_active():
        raise EOFError("the connection was closed before the key exchange")


def read_known_hosts(settings: SshSettings) -> list[KnownKey]:
    known: list[KnownKey] = []
    for file in settings.known_hosts_files:
        with contextlib.suppress(OSError):  # a file that is not there knows nothing, as in OpenSSH
            known += known_hosts.parse_known_hosts(Path(file).read_text("utf-8", "replace"), file)
    return known


def check_host_key(
    host: str, at: str, settings: SshSettings, key: paramiko.PKey, known: list[KnownKey]
) -> None:
    """Raises HostFault unless the key is the recorded one. `at` names the target where it is not the host."""
    key_type, text = key.get_name(), key.get_base64()
    kind = key_type.removeprefix("ssh-").removeprefix("ecdsa-sha2-").upper()
    print_of_it = known_hosts.fingerprint(text)
    check_size(host, at, settings, key)
    verdict = known_hosts.judge(known, settings.known_as, key_type, text)
    entry = verdict.entry
    if verdict.trust is Trust.KNOWN:
        return
    trust_it = f"mlx-mesh trust {shlex.quote(settings.alias)}"
    if settings.config_file:
        trust_it += f" --ssh-config {shlex.quote(settings.config_file)}"
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
            f"{COMPARE}; if it is right, forget the old key: ssh-keygen -R {shlex.quote(verdict.name)} -f "
            f"{shlex.quote(entry.file)} and add the new one: {trust_it}",
        )
    raise HostFault(
        host,
        "host key",
        f"{at}UNKNOWN host key: {kind} {print_of_it} of {verdict.name} is in no known_hosts file"
        f"{beside(entry)}",
        f"{COMPARE}; if it is right, add it: {trust_it}",
    )


def check_size(host: str, at: str, settings: SshSettings, key: paramiko.PKey) -> None:
    """Raises HostFault for an RSA key that the settings call too short."""
    if key.get_name() == "ssh-rsa" and key.get_bits() < settings.min_rsa_bits:
        raise HostFault(
            host,
            "host key",
            f"{at}its RSA key has {key.get_bits()} bits, and RequiredRSASize is {settings.min_rsa_bits}",
            "make it a longer or an ED25519 host key",
        )


def beside(entry: KnownKey | None) -> str:
    """What else known_hosts has of a host whose key is in none of its lines."""
    if entry is None:
        return ""
    if entry.marker:
        return f" ({entry.file} line {entry.line} has a @cert-authority for it, which is not supported)"
    return f" ({entry.file} line {entry.line} has only its {entry.key_type} key)"


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
        notes.append(f"no ssh-agent at {settings.agent_socket} ({in_words(error)})")
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
            f"{at}as {settings.user}: the host hung up ({in_words(error)}) after {', '.join(tried)}",
            "name the right key with IdentityFile and `IdentitiesOnly yes` for this host",
        ) from error
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise HostFault(
            host,
            "auth",
            f"{at}as {settings.user}: {in_words(error)} while trying {told}",
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
        notes.append(f"{path} cannot be used ({in_words(error)})")
    return None


def _public_blob(path: str) -> bytes | None:
    """The public half of an identity, from its .pub file."""
    try:
        fields = Path(path + ".pub").read_text("utf-8").split()
        return base64.b64decode(fields[1])
    except (OSError, ValueError, IndexError):
        return None


def in_words(error: BaseException) -> str:
    """An exception in words; some have none."""
    text = str(getattr(error, "strerror", None) or error) or type(error).__name__
    return " ".join(text.split())
