"""Binding addresses and ports of this host, with words for what can go wrong."""

from __future__ import annotations

import contextlib
import errno
import random
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from mlx_mesh.mesh.errors import BringUpError, PreflightError
from mlx_mesh.node.facts import own_addresses
from mlx_mesh.node.run_file import mesh_at

DATA_PORTS = range(20000, 32000)
"""Below the ranges from which Linux (32768) and macOS (49152) take ports for outgoing connections."""

_TRIES_PER_PORT = 50
_PROBE_S = 0.5
_LSOF_S = 5.0
_TCP_LISTEN = "0A"


def explain_bind_error(what: str, address: str, port: int, error: OSError) -> str:
    """A sentence for a failed bind: the address, why, and what to do."""
    where = f"{what} cannot listen on {address}:{port}"
    if error.errno == errno.EADDRINUSE:
        if mesh := mesh_at(port):
            return (
                f"{where}: the port is in use by mesh {mesh}. Stop that one with `mlx-mesh down {mesh}`, or "
                "choose another port."
            )
        return f"{where}: the port is in use{_by_whom(port)}. End that process or choose another port."
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        own = ", ".join(own_addresses())
        return f"{where}: {address} is not an address of this host (it has {own})."
    if error.errno == errno.EACCES:
        return f"{where}: ports below 1024 need more rights. Choose another port."
    return f"{where}: {error.strerror or error}."


def bind_http(host: str, port: int) -> socket.socket:
    """A listening socket for the HTTP endpoint, to be handed to the proxy. Port 0 = a free one.

    Raises PreflightError that names the holder of a taken port.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise PreflightError(
            f"the HTTP endpoint cannot listen on {host}:{port}: the name does not resolve ({error.strerror})."
        ) from error
    # "localhost" is both: clients try 127.0.0.1 when they are told a number.
    found.sort(key=lambda entry: entry[0] is not socket.AF_INET)
    family, kind, protocol, _, address = found[0]
    if port and _answers(family, address):
        taken = OSError(errno.EADDRINUSE, "in use")
        raise PreflightError(explain_bind_error("the HTTP endpoint", host, port, taken))
    sock = socket.socket(family, kind, protocol)
    try:
        # Connections of an earlier run in TIME_WAIT must not keep the next one from starting.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(256)
    except OSError as error:
        sock.close()
        raise PreflightError(explain_bind_error("the HTTP endpoint", host, port, error)) from error
    return sock


def _answers(family: int, address: Sequence[object]) -> bool:
    """Whether somebody accepts there: with SO_REUSEADDR macOS lets two programs listen on one port."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(tuple(address))
        except OSError:
            return False
    return True


def port_holder(port: int) -> str:
    """Who listens on a port of this host, in words as far as the system tells; '' = nobody, or port 0."""
    if not port or not _answers(socket.AF_INET, ("127.0.0.1", port)):
        return ""
    return _holder(port) or "another program"


def reserve_data_ports(address: str, ranks: Sequence[int], num_per_rank: int) -> dict[int, tuple[str, ...]]:
    """For each rank `num_per_rank` "ip:port"s that nobody uses, bound exclusively for a moment to prove it.

    MLX's ring listens with shared ports, so that a listener left over by another run would silently
    take connections meant for us. Raises BringUpError.
    """
    with contextlib.ExitStack() as held:
        return {
            rank: tuple(f"{address}:{_hold_free_port(address, held)}" for _ in range(num_per_rank))
            for rank in ranks
        }


def _hold_free_port(address: str, held: contextlib.ExitStack) -> int:
    last: OSError | None = None
    port = 0
    for port in random.sample(DATA_PORTS, _TRIES_PER_PORT):
        sock = held.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            sock.bind((address, port))
        except OSError as error:
            last = error
            if error.errno == errno.EADDRINUSE:
                continue
            break
        return port
    assert last is not None
    raise BringUpError(explain_bind_error("the data link", address, port, last)) from last


# ---------------------------------------------------------------- who holds a port


def _by_whom(port: int) -> str:
    """ " by pid 123 (name)" where the system tells us, else ''."""
    holder = _holder(port)
    return f" by {holder}" if holder else ""


def _holder(port: int) -> str:
    return _holder_linux(port) if sys.platform == "linux" else _holder_lsof(port)


def listening_inodes(proc_net_tcp: str, port: int) -> set[str]:
    """Socket inodes that listen on `port`, from the text of /proc/net/tcp or tcp6."""
    inodes = set()
    for line in proc_net_tcp.splitlines()[1:]:
        fields = line.split()
        if len(fields) > 9 and fields[3] == _TCP_LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
            inodes.add(fields[9])
    return inodes


def _holder_linux(port: int) -> str:
    inodes: set[str] = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            inodes |= listening_inodes(Path(table).read_text(), port)
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # processes end, and those of other users are closed to us
            if str(link.readlink()) in wanted:
                process = link.parents[1]
                return f"pid {process.name} ({(process / 'comm').read_text().strip()})"
    return ""


def parse_lsof(output: str) -> str:
    """ "pid 123 (name)" from the output of `lsof -Fpc`; '' when there is none."""
    match = re.search(r"^p(\d+)$\n^c(.*)$", output, re.MULTILINE)
    return f"pid {match[1]} ({match[2]})" if match else ""


def _holder_lsof(port: int) -> str:
    lsof = shutil.which("lsof", path="/usr/sbin:/usr/bin:/bin")
    if lsof is None:
        return ""
    try:
        done = subprocess.run(
            [lsof, "-nP", f"-iTCP:{port}", "-sTCP:LISTEN", "-Fpc"],
            capture_output=True,
            text=True,
            timeout=_LSOF_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return parse_lsof(done.stdout)
