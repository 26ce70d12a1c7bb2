"""`mlx-mesh trust HOST`: show a host's key, ask, and write it where SSH looks it up.

Nothing is trusted without a word: a person's at the terminal, a fingerprint that was compared, or --yes. A
key that differs from the recorded one is never overwritten.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

import paramiko

from mlx_mesh.launcher import known_hosts
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.known_hosts import KnownKey, Trust
from mlx_mesh.launcher.ssh import Route, find_route
from mlx_mesh.launcher.ssh_config import SshSettings
from mlx_mesh.launcher.ssh_connect import (
    COMPARE,
    beside,
    check_host_key,
    check_size,
    open_transport,
    reach,
    read_known_hosts,
)
from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.hostfile_fields import split_ssh_target


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="as you would type it after ssh")
    parser.add_argument("--yes", action="store_true", help="record what the host shows without a question")
    parser.add_argument(
        "--fingerprint", metavar="SHA256:...", help="record the key only if this is its fingerprint"
    )
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")


def run(arguments: argparse.Namespace) -> int:
    if arguments.fingerprint is not None:
        if len(arguments.hosts) != 1:
            raise SettingsError("--fingerprint is of one host's key; name one host.")
        if not arguments.fingerprint.startswith("SHA256:"):
            raise SettingsError(
                f"--fingerprint {arguments.fingerprint} is not one: it starts with SHA256:, as "
                "`ssh-keygen -lf` prints it."
            )
    for name in arguments.hosts:
        trust(
            name,
            is_sure=arguments.yes,
            wanted=arguments.fingerprint or "",
            config_file=arguments.ssh_config,
            ask=sys.stdin if sys.stdin.isatty() else None,
        )
    return 0


def trust(
    target: str,
    *,
    is_sure: bool = False,
    wanted: str = "",
    config_file: str | None = None,
    ask: TextIO | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """`wanted`: the fingerprint that it must have; `ask`: where a person answers. Raises HostFault and
    SettingsError, and has written nothing then."""
    where = split_ssh_target(target)
    if where.fault:
        raise SettingsError(where.fault.replace("`ssh: ", "`", 1) + ".")
    route = find_route(where.host, where.host, where.user, config_file)
    settings = route.settings
    known = read_known_hosts(settings)
    key = _shown_key(where.host, route, known)
    key_type, text = key.get_name(), key.get_base64()
    shown = known_hosts.fingerprint(text)
    verdict = known_hosts.judge(known, settings.known_as, key_type, text)
    if verdict.trust is not Trust.UNKNOWN:
        check_host_key(where.host, "", settings, key, known)  # refuses what was changed or revoked
        assert verdict.entry is not None
        if wanted and wanted != shown:
            raise _another(where.host, wanted, key_type, shown)
        say(f"{verdict.name} is known: {key_type} {shown}, in {verdict.entry.file} line {verdict.entry.line}")
        return
    check_size(where.host, "", settings, key)
    say(f"{verdict.name} shows {key_type} {shown}{beside(verdict.entry)}")
    if wanted:
        if wanted != shown:
            raise _another(where.host, wanted, key_type, shown)
    elif is_sure:
        if verdict.entry is not None:
            raise HostFault(
                where.host,
                "host key",
                f"another key of this host is recorded{beside(verdict.entry)}, and it does not show that one",
                f"{COMPARE}, and say --fingerprint {shown} if it is right",
            )
    else:
        _ask(where.host, shown, ask, say)
    file = _record(where.host, settings, verdict.name, key_type, text)
    say(f"recorded in {file}")


def _shown_key(host: str, route: Route, known: list[KnownKey]) -> paramiko.PKey:
    """What the host shows, through hosts on the way that are trusted already. Raises HostFault."""
    chain: list[Route] = []
    jump = route.via
    while jump is not None:
        chain.insert(0, jump)
        jump = jump.via
    with ExitStack() as stack:
        through: paramiko.Transport | None = None
        for part in chain:
            through = open_transport(host, part.settings, through)
            stack.callback(through.close)
        transport = reach(host, route.settings, through, known)
        stack.callback(transport.close)
        return transport.get_remote_server_key()


def _another(host: str, wanted: str, key_type: str, shown: str) -> HostFault:
    return HostFault(
        host,
        "host key",
        f"it shows {key_type} {shown}, and {wanted} was asked for",
        "find out who answers at that address, or whether the fingerprint is of another key of that host",
    )


def _ask(host: str, shown: str, ask: TextIO | None, say: Callable[[str], None]) -> None:
    """A person's yes. Raises SettingsError."""
    if ask is None:
        raise SettingsError(
            f"Nobody can be asked whether {shown} is {host}'s: {COMPARE[0].upper()}{COMPARE[1:]}, then say "
            f"--fingerprint {shown}, or --yes to take what it shows."
        )
    say(f"{COMPARE[0].upper()}{COMPARE[1:]}.")
    print("Is it the same? (yes/no) ", end="", flush=True)
    if ask.readline().strip().lower() not in ("yes", "y"):
        raise SettingsError(f"The key of {host} was not recorded.")


def _record(host: str, settings: SshSettings, name: str, key_type: str, key: str) -> str:
    """Append to the first file in which keys are looked up, and return it. Raises HostFault."""
    if not settings.known_hosts_files:
        raise HostFault(
            host,
            "host key",
            "the settings name no known_hosts file for it",
            "set UserKnownHostsFile to a file for this host in ~/.ssh/config",
        )
    path = Path(settings.known_hosts_files[0])
    salt = secrets.token_bytes(20) if settings.hash_known_hosts else b""
    line = known_hosts.key_line(name, key_type, key, salt)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        with os.fdopen(descriptor, "rb+") as file:
            if file.seek(0, os.SEEK_END) and (file.seek(-1, os.SEEK_END), file.read(1))[1] != b"\n":
                line = "\n" + line  # the last line of a file that was edited by hand
            file.write(line.encode())
    except OSError as error:
        raise HostFault(
            host, "host key", f"{path} cannot be written ({error.strerror})", "correct its owner and rights"
        ) from error
    return str(path)
