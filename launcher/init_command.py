"""`mlx-mesh init HOST…`: ask each host over SSH what it is, and write `hosts.yaml`; with --install, first put
the same mlx-mesh on each.
"""

from __future__ import annotations

import argparse
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from mlx_mesh.launcher.asking import Answer, ask_hosts
from mlx_mesh.launcher.config import LaunchConfig, check_model_name
from mlx_mesh.launcher.environments import (
    HOME_FOLDER,
    Wanted,
    find_environment,
    folder_of,
    install,
    wanted_here,
)
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.own_wheel import pack_wheel
from mlx_mesh.launcher.preflight import open_host
from mlx_mesh.mesh.doctor import Area, Level, Question, duplicates, examine
from mlx_mesh.mesh.errors import ExitCode, MeshError, PreflightError, SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.hostfile import parse_hostfile
from mlx_mesh.mesh.hostfile_fields import check_name, split_ssh_target
from mlx_mesh.mesh.hostfile_text import FoundHost, describe, describe_links, host_name, hostfile_text


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hosts", nargs="+", metavar="HOST", help="HOST or USER@HOST, beside this machine")
    parser.add_argument(
        "-o", "--output", default="hosts.yaml", metavar="FILE", help="default hosts.yaml; - = print it only"
    )
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--partial", action="store_true", help="write those hosts that answered")
    parser.add_argument(
        "--no-local", action="store_true", help="leave this machine out; the first HOST leads"
    )
    parser.add_argument(
        "--install",
        action="store_true",
        help="first make an environment on each HOST with the versions of this machine",
    )
    parser.add_argument(
        "--python", default="", metavar="PATH", help=f"on each HOST (default {HOME_FOLDER}/bin/python)"
    )
    parser.add_argument("--name", default="mesh", help="of the mesh (default: mesh)")
    parser.add_argument("-m", "--model", default="", help="folder or hub id, to be written into the file")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")


@dataclass(frozen=True, slots=True)
class Target:
    """A host that was named. `ssh` is '' for this machine."""

    name: str
    ssh: str = ""
    user: str = ""


def run(arguments: argparse.Namespace) -> int:
    for problem in check_name(arguments.name):
        raise SettingsError(f"The mesh name {arguments.name!r} {problem}.")
    if arguments.model:
        check_model_name(arguments.model)
    if arguments.install and arguments.python and not folder_of(arguments.python):
        raise SettingsError(
            f"--python {arguments.python} is no environment's: with --install it ends in /bin/python."
        )
    output = None if arguments.output == "-" else Path(arguments.output).expanduser()
    if output is not None and output.exists() and not arguments.force:
        raise SettingsError(
            f"{output} is there already. Say --force to overwrite it, or -o FILE for another place."
        )
    targets = read_targets(arguments.hosts, with_local=not arguments.no_local)
    lock = threading.Lock()

    def say(text: str) -> None:
        with lock:
            print(text, file=sys.stderr if output is None else sys.stdout, flush=True)

    wanted = wanted_here(pack_wheel()) if arguments.install else None
    entries, faults = find_interpreters(targets, arguments.python, arguments.ssh_config or "", wanted, say)
    config = LaunchConfig(
        name=arguments.name, model="", hosts=tuple(entries), ssh_config=arguments.ssh_config or ""
    )
    answers = ask_hosts(config) if entries else []
    answered = [answer for answer in answers if answer.examined is not None]
    failed = [str(fault) for fault in faults] + [
        f"{finding.host}: {finding.check}: {finding.evidence}; {finding.fix}"
        for answer in answers
        if answer.examined is None
        for finding in answer.findings
        if finding.level is Level.FAIL
    ]
    if failed and not (arguments.partial and answered):
        raise PreflightError("\n".join(failed) + "\nnothing was written; --partial leaves such hosts out")
    keys = [(answer.examined, answer.host_key) for answer in answered if answer.examined is not None]
    if twins := [f"{f.host}: {f.check}: {f.evidence}; {f.fix}" for f in duplicates(keys)]:
        raise PreflightError("\n".join(twins))
    found = found_hosts(answered)
    for line in told(found, answered):
        say(line)
    for line in failed:
        say(f"left out: {line}")
    text = hostfile_text(
        found,
        name=arguments.name,
        model=arguments.model,
        made_by=f"mlx-mesh {shlex.join(arguments.words)}",
    )
    parse_hostfile(text, str(output or "hosts.yaml"))  # what is written can be read
    if output is None:
        print(text, end="")
    else:
        write(output, text)
        say(f"wrote {output}; next: mlx-mesh doctor {shlex.quote(str(output))}")
    return ExitCode.OK


def write(path: Path, text: str) -> None:
    """Raises MeshError."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise MeshError(f"{path} cannot be written ({error.strerror}). Say -o FILE.") from error


def read_targets(given: Sequence[str], *, with_local: bool) -> list[Target]:
    """Raises SettingsError for what cannot be a host, and for one that stands twice."""
    targets: list[Target] = []
    if with_local:
        targets.append(Target(host_name(socket.gethostname(), [])))
    for text in given:
        where = split_ssh_target(text)
        if where.fault:
            raise SettingsError(where.fault.replace("`ssh: ", "`", 1) + ".")
        if any((other.ssh, other.user) == (where.host, where.user) for other in targets):
            raise SettingsError(f"{text} is named twice.")
        name = host_name(where.host, [target.name for target in targets])
        targets.append(Target(name, where.host, where.user))
    return targets


def find_interpreters(
    targets: Sequence[Target],
    python: str,
    ssh_config: str,
    wanted: Wanted | None,
    say: Callable[[str], None],
) -> tuple[list[HostEntry], list[HostFault]]:
    """The hosts with their interpreters, made first where something is `wanted`; and what failed, host by
    host. All hosts at once."""

    def find(target: Target) -> HostEntry | HostFault:
        try:
            return _find(target, python, ssh_config, wanted, say)
        except HostFault as fault:
            return fault

    with ThreadPoolExecutor(len(targets)) as pool:
        found = list(pool.map(find, targets))
    return (
        [entry for entry in found if isinstance(entry, HostEntry)],
        [fault for fault in found if isinstance(fault, HostFault)],
    )


def _find(
    target: Target, python: str, ssh_config: str, wanted: Wanted | None, say: Callable[[str], None]
) -> HostEntry:
    entry = HostEntry(name=target.name, ssh=target.ssh, user=target.user)
    if entry.is_local:
        return HostEntry(name=target.name, python=own_python())
    remote = open_host(entry, ssh_config)
    try:
        if wanted is not None:
            python = python or f"{HOME_FOLDER}/bin/python"
            install(remote, folder_of(python), wanted, say)
        else:
            python = find_environment(remote, python)
    finally:
        remote.close()
    return HostEntry(name=target.name, ssh=target.ssh, user=target.user, python=python)


def own_python() -> str:
    """This interpreter; in the usual place under a name that other hosts share."""
    usual = f"{HOME_FOLDER}/bin/python"
    return usual if Path(usual).expanduser() == Path(sys.executable) else sys.executable


def found_hosts(answers: Sequence[Answer]) -> list[FoundHost]:
    return [
        FoundHost(
            name=answer.entry.name,
            ssh=answer.entry.ssh,
            user=answer.entry.user,
            python=answer.entry.python,
            report=answer.examined.report,
        )
        for answer in answers
        if answer.examined is not None
    ]


def told(found: Sequence[FoundHost], answers: Sequence[Answer]) -> list[str]:
    """What was found, and what would stop a mesh of these hosts whatever its model is."""
    examined = [answer.examined for answer in answers if answer.examined is not None]
    findings = examine(examined, Question(num_hosts=len(examined), needs_model=False))
    wrong = [f for f in findings if f.level is Level.FAIL and f.area is not Area.MACHINE]
    return [
        *(f"{host.name}: {describe(host)}, {host.python}" for host in found),
        *describe_links(found),
        *map(str, wrong),
    ]
