"""A host that waits with `mlx-mesh agent`, reached: say hello, pair, or come in as a paired launcher.

Afterwards it is a host as over any SSH connection (`SshHost`). What it shows is checked against the key that
was kept when the two were paired, or proven anew with MLX_MESH_SECRET; an announcement alone proves nothing.
"""

from __future__ import annotations

import contextlib
import getpass
import socket
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import paramiko

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
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.pairing import (
    SECRET_VARIABLE,
    LauncherSide,
    PairingRefused,
    binding,
    check_secret,
)
from mlx_mesh.launcher.pairings import PairedHost, Pairings, fingerprint_of
from mlx_mesh.launcher.ssh import Route, SshHost
from mlx_mesh.launcher.ssh_config import SshSettings
from mlx_mesh.launcher.ssh_connect import in_words
from mlx_mesh.mesh.discovery import AgentRoute

CONNECT_S = 5.0
HANDSHAKE_S = 15.0
ALIVE_INTERVAL_S = 3.0
ALIVE_COUNT = 5


@dataclass(frozen=True, slots=True)
class Greeting:
    """What a waiting agent says to anybody, and the fingerprint of the key that it showed."""

    hello: Hello
    key: str


def connect(name: str, route: AgentRoute, environment: Mapping[str, str]) -> SshHost:
    """Come in. Raises HostFault: connect, "host key" (another one answers) or auth (not paired)."""
    pairings = Pairings(environment)
    kept = next((host for host in pairings.hosts() if host.key == route.key), None)
    is_kept = kept is not None
    secret = check_secret(environment.get(SECRET_VARIABLE, ""))
    if not is_kept and not secret:
        raise _not_paired(name)
    own = pairings.key_of("launcher")
    if not is_kept:
        try:
            prove(name, route, "secret", secret, own)
        except PairingRefused as error:
            raise HostFault(
                name,
                "auth",
                f"no pairing by {SECRET_VARIABLE}: {str(error).rstrip('.')}",
                f"give both hosts the same secret, or pair with a code: mlx-mesh discover --pair {name}",
            ) from error
    transport = _open_somewhere(name, route, kept)
    try:
        _log_in(name, transport, own)
        settings = _settings(route)
        return SshHost(name, Route(settings), [transport])
    except BaseException:
        transport.close()
        raise


def _open_somewhere(name: str, route: AgentRoute, kept: PairedHost | None) -> paramiko.Transport:
    """At the address of the route, else where a paired host was found since: it may have moved. Raises the
    first HostFault."""
    others = [] if kept is None else [(address, kept.port) for address in kept.addresses]
    places = list(dict.fromkeys([(route.address, route.port), *others]))
    faults: list[HostFault] = []
    for address, port in places:
        try:
            return _open(name, AgentRoute(address=address, port=port, key=route.key))
        except HostFault as fault:
            faults.append(fault)
    raise faults[0]


def _log_in(name: str, transport: paramiko.Transport, own: paramiko.PKey) -> None:
    transport.auth_timeout = HANDSHAKE_S
    try:
        transport.auth_publickey(LAUNCHER, own)
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise HostFault(
            name,
            "auth",
            f"it does not know this launcher (any more): {in_words(error)}",
            f"pair again: `mlx-mesh agent --pair` there, then here mlx-mesh discover --pair {name}",
        ) from error


def _not_paired(name: str) -> HostFault:
    return HostFault(
        name,
        "auth",
        "it is not paired with this launcher",
        f"run `mlx-mesh agent --pair` there, then here mlx-mesh discover --pair {name}; or start both with "
        f"the same {SECRET_VARIABLE}",
    )


def greet(name: str, address: str, port: int, timeout_s: float = CONNECT_S) -> Greeting:
    """Ask an agent what it announces. Raises HostFault."""
    transport = _negotiate(name, address, port, timeout_s)
    try:
        with _subsystem(transport, HELLO) as channel:
            return Greeting(read_line(channel, Hello), fingerprint_of(transport.get_remote_server_key()))
    except PairingRefused as error:
        raise HostFault(
            name,
            "connect",
            f"{address} port {port} does not say hello ({str(error).rstrip('.')})",
            "see if that is an `mlx-mesh agent`",
        ) from error
    finally:
        transport.close()


def prove(name: str, route: AgentRoute, by: str, password: str, own: paramiko.PKey) -> None:
    """Pair with the agent there, which lets the key `own` in from then on. Raises PairingRefused when one
    side does not know the code or secret, HostFault when there is no such agent."""
    transport = _open(name, route)
    try:
        with _subsystem(transport, PAIR) as channel:
            side = LauncherSide(
                password,
                binding(
                    transport.get_remote_server_key().asbytes(), own.asbytes(), transport.session_id or b""
                ),
            )
            write_line(
                channel,
                PairRequest(by=by, key=own.get_base64(), label=own_label(), message=side.begin().hex()),
            )
            answer = read_line(channel, PairAnswer)
            if answer.refused:
                raise PairingRefused(f"{name} refuses: {answer.refused}")
            try:
                proof = side.check(bytes.fromhex(answer.message), bytes.fromhex(answer.proof))
            except (PairingRefused, ValueError):
                write_line(channel, PairProof(proof=""))
                raise PairingRefused(
                    f"the {by} given here is not the one that {name} has, or another program answers there."
                ) from None
            write_line(channel, PairProof(proof=proof.hex()))
            if refused := read_line(channel, PairResult).refused:
                raise PairingRefused(f"{name} refuses: {refused}")
    finally:
        transport.close()


def own_label() -> str:
    """Who we are, for the other side's log."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # no such user in this container
        user = "unknown"
    return f"{user}@{socket.gethostname().partition('.')[0]}"[:64]


@contextlib.contextmanager
def _subsystem(transport: paramiko.Transport, subsystem: str) -> Iterator[paramiko.Channel]:
    """Raises PairingRefused."""
    try:
        transport.auth_none(GUEST)
        channel = transport.open_session(timeout=HANDSHAKE_S)
        channel.invoke_subsystem(subsystem)
    except (paramiko.SSHException, EOFError, OSError) as error:
        raise PairingRefused(f"it lets no guest in ({in_words(error)}).") from error
    try:
        yield channel
    finally:
        hang_up(channel)


def _open(name: str, route: AgentRoute) -> paramiko.Transport:
    """Connect, and see that it is the agent that was announced or kept. Raises HostFault."""
    transport = _negotiate(name, route.address, route.port, CONNECT_S)
    shown = fingerprint_of(transport.get_remote_server_key())
    if shown != route.key:
        transport.close()
        raise HostFault(
            name,
            "host key",
            f"{route.address} port {route.port} shows the key {shown}, and {route.key} was expected: another "
            "machine answers there, or its state folder was removed",
            f"if that is right, pair again: mlx-mesh discover --forget {name}, then --pair {name}",
        )
    return transport


def _negotiate(name: str, address: str, port: int, timeout_s: float) -> paramiko.Transport:
    try:
        sock = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise HostFault(
            name,
            "connect",
            f"{address} port {port}: {in_words(error)}",
            "see that `mlx-mesh agent` runs there, that no firewall is in between, and on macOS that your "
            "terminal may use the local network (Privacy & Security > Local Network)",
        ) from error
    transport: paramiko.Transport | None = None
    try:
        transport = paramiko.Transport(sock)
        transport.daemon = True
        transport.banner_timeout = HANDSHAKE_S
        transport.get_security_options().key_types = ("ssh-ed25519",)
        done = threading.Event()
        transport.start_client(event=done)
        if not done.wait(HANDSHAKE_S):
            raise TimeoutError(f"no key exchange within {HANDSHAKE_S:g} s")
        if (problem := transport.get_exception()) is not None:
            raise problem
        if not transport.is_active():
            raise EOFError("the connection was closed before the key exchange")
        return transport
    except (paramiko.SSHException, EOFError, OSError) as error:
        if transport is not None:
            transport.close()
        sock.close()
        raise HostFault(
            name,
            "connect",
            f"{address} port {port} does not speak as an agent does ({in_words(error)})",
            "see if another program has that port, or too many launchers knock there",
        ) from error


def _settings(route: AgentRoute) -> SshSettings:
    """For SshHost, which wants to know how often to look whether the host is there."""
    return SshSettings(
        alias=route.address,
        hostname=route.address,
        port=route.port,
        user=LAUNCHER,
        known_as=(),
        known_hosts_files=(),
        identity_files=(),
        identities_only=True,
        agent_socket="",
        jumps=(),
        connect_timeout_s=CONNECT_S,
        alive_interval_s=ALIVE_INTERVAL_S,
        alive_count=ALIVE_COUNT,
        address_family=socket.AF_INET,
        bind_address="",
    )
