"""`mlx-mesh report`: one archive that says how a mesh is and was, for somebody who may not know whose it is.

Every text in it goes through `mesh.redaction`: of logs and answers only numbers and such words stay that the
source of mlx-mesh and mlx-lm has.
"""

from __future__ import annotations

import builtins
import contextlib
import getpass
import io
import json
import os
import platform
import re
import socket
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import msgspec

from mlx_mesh.launcher.bring import show_plans
from mlx_mesh.launcher.config import (
    Flags,
    LaunchConfig,
    build_config,
    local_hostfile,
    read_api_keys,
    read_hostfile,
)
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.doctor_command import diagnose
from mlx_mesh.launcher.doctor_command import lines as doctor_lines
from mlx_mesh.launcher.preflight import ReadyHost, check_hosts, close_all, open_host, python_of
from mlx_mesh.launcher.remote import stream_program
from mlx_mesh.launcher.running import api_of, find_folder
from mlx_mesh.launcher.state import StateFolder, state_root
from mlx_mesh.launcher.status import status_lines
from mlx_mesh.mesh.errors import MeshError, NotRunningError, SettingsError
from mlx_mesh.mesh.redaction import Redactor, words_of

NUM_LOG_LINES = 400
NO_MODEL = "no-model/named"
_PACKAGES = ("mlx-mesh", "mlx", "mlx-lm", "mlx-vlm", "paramiko", "pyzmq", "transformers", "huggingface-hub")
_DISTRIBUTIONS = 3000  # top-level names that are kept in tracebacks

_EVERYTHING = re.compile(r".+")
_DEFINITION = re.compile(r"(?m)^\s*(?:def|class)\s+(\w+)")

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Part:
    """One file of the archive, as it was gathered."""

    name: str
    text: str


def report(
    config: LaunchConfig,
    folder: StateFolder,
    environment: Mapping[str, str],
    path: Path,
    say: Say,
    num_lines: int = NUM_LOG_LINES,
) -> list[tuple[str, int]]:
    """Gather, redact, write. Returns the names of the files with their sizes. What cannot be had is said
    in its place. Raises SettingsError when it cannot be written."""
    parts: list[Part] = [Part("versions.txt", _versions())]
    hosts: tuple[ReadyHost, ...] = ()
    say("Asking the hosts ...")
    try:
        hosts = check_hosts(config, may_lack_model=True).hosts
        parts.append(Part("hosts.json", _json({host.entry.name: host.facts for host in hosts})))
        parts.append(Part("plan.txt", _plan(config, hosts)))
    except MeshError as error:
        parts.append(Part("hosts.txt", f"not all hosts are ready:\n{error}"))
    finally:
        close_all(hosts)
    say("Examining them ...")
    parts.append(Part("doctor.txt", _told(lambda: "\n".join(doctor_lines(diagnose(config), True)))))
    parts += _status(config, folder, environment)
    say("Reading logs ...")
    parts += _logs(config, num_lines)
    parts.append(Part("launcher.log", _last_lines(folder.launcher_log, num_lines)))
    if config.hostfile:
        parts.append(Part("hostfile.txt", _told(lambda: Path(config.hostfile).read_text("utf-8"))))
    redactor = redactor_for(config, hosts, environment)
    return write(path, [Part(part.name, redactor.text(part.text)) for part in parts if part.text])


def target_of(
    target: str | None, model: str | None, ssh_config: str | None, environment: Mapping[str, str]
) -> tuple[LaunchConfig, StateFolder]:
    """A hostfile's mesh, one by name, or the one that runs; without any, this machine alone. Raises
    SettingsError."""
    root = state_root(environment)
    path = target if target and (target.endswith((".yaml", ".yml", ".json")) or "/" in target) else ""
    state = None
    if not path:
        try:
            folder = find_folder(target, environment, with_leftovers=True)
            state = folder.read()
        except NotRunningError:
            if target is not None:
                raise
        path = state.hostfile if state is not None else ""
        model = model or (state.model if state is not None else None)
    hostfile = read_hostfile(path) if path else local_hostfile(1, state.name if state else "report")
    hostfile = replace(hostfile, model=model or hostfile.model or NO_MODEL)
    config = build_config(hostfile, Flags(ssh_config=ssh_config, host="127.0.0.1", is_offline=True), {})
    return config, StateFolder(root, config.name)


def write(path: Path, parts: Sequence[Part]) -> list[tuple[str, int]]:
    """A tar.gz without owner or times."""
    made: list[tuple[str, int]] = []
    try:
        with tarfile.open(path, "x:gz") as archive:
            for part in parts:
                data = part.text.encode()
                entry = tarfile.TarInfo(f"mlx-mesh-report/{part.name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
                made.append((part.name, len(data)))
    except OSError as error:
        raise SettingsError(
            f"The report cannot be written to {path} ({error.strerror}). Give another --output."
        ) from error
    return made


def default_path() -> Path:
    return Path.cwd() / f"mlx-mesh-report-{time.strftime('%Y%m%d-%H%M%S')}.tar.gz"


# ---------------------------------------------------------------- what is gathered


def _versions() -> str:
    lines = [f"python {platform.python_version()}", f"system {platform.system()} {platform.release()}"]
    lines.append(f"machine {platform.machine()}")
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{package} not installed")
    return "\n".join(lines)


def _plan(config: LaunchConfig, hosts: Sequence[ReadyHost]) -> str:
    source = next((host for host in hosts if host.facts.model_digest), None)
    if source is None:
        return "no host has the model"
    text = io.StringIO()
    try:
        show_plans(config, hosts, Console(text), source)
    except MeshError as error:
        text.write(str(error))
    return text.getvalue()


def _status(config: LaunchConfig, folder: StateFolder, environment: Mapping[str, str]) -> list[Part]:
    try:
        state = folder.read_running()
        with api_of(state, config.api_key_file or None, environment) as api:
            status, nodes = api.get("/v1/cluster/status"), api.get("/v1/cluster/nodes")
    except MeshError as error:
        return [Part("status.txt", str(error))]
    return [
        Part("status.txt", "\n".join(status_lines(status, nodes))),
        Part("status.json", _json({"status": status, "nodes": nodes})),
    ]


def _logs(config: LaunchConfig, num_lines: int) -> list[Part]:
    """Of every rank; all are on the leader."""
    leader = config.hosts[0]
    lines: dict[int, list[str]] = {}
    request = {"name": config.name, "rank": None, "num_lines": num_lines, "follow": False}
    try:
        remote = open_host(leader, config.ssh_config)
        try:
            for item in stream_program(remote, python_of(leader), "tail_log", request):
                if item is not None and "line" in item:
                    lines.setdefault(int(item["rank"]), []).append(str(item["line"]))
        finally:
            remote.close()
    except MeshError as error:
        return [Part("logs/ranks.txt", str(error))]
    return [Part(f"logs/rank-{rank}.log", "\n".join(said)) for rank, said in sorted(lines.items())]


def _last_lines(path: Path, num_lines: int) -> str:
    try:
        return "\n".join(path.read_text("utf-8", "replace").splitlines()[-num_lines:])
    except OSError:
        return ""


def _told(work: Callable[[], str]) -> str:
    """Its text, or why there is none."""
    try:
        return work()
    except (MeshError, OSError, ValueError) as error:
        return f"not to be had: {type(error).__name__}: {error}"


def _json(value: object) -> str:
    return json.dumps(msgspec.to_builtins(value), indent=1)


# ---------------------------------------------------------------- what is taken out


def redactor_for(
    config: LaunchConfig, hosts: Sequence[ReadyHost], environment: Mapping[str, str]
) -> Redactor:
    """Knows the names and keys of this mesh."""
    names: dict[str, str] = {config.name: "mesh-1"}
    for number, entry in enumerate(config.hosts, 1):
        found = [entry.name, entry.machine, entry.ssh]
        found += [host.facts.hostname for host in hosts if host.entry.name == entry.name]
        if entry.is_local:
            found.append(socket.gethostname())
        for name in filter(None, found):
            names.setdefault(name, f"host-{number}")
            names.setdefault(name.partition(".")[0], f"host-{number}")
    for number, user in enumerate(dict.fromkeys(_users(config)), 1):
        names.setdefault(user, f"user-{number}")
    words = vocabulary(config) | words_of(" ".join(host.facts.chip for host in hosts))
    for name in ("local", "localhost", "127"):  # said in any report
        names.pop(name, None)
    return Redactor(names, _secrets(config, environment), words)


def _users(config: LaunchConfig) -> Iterable[str]:
    yield getpass.getuser()
    yield Path.home().name
    for entry in config.hosts:
        if entry.user:
            yield entry.user


def _secrets(config: LaunchConfig, environment: Mapping[str, str]) -> list[str]:
    found = list(config.api_keys)
    with contextlib.suppress(SettingsError):
        found += read_api_keys(config.api_key_file or None, environment)
    wanted = ("TOKEN", "KEY", "SECRET", "PASSWORD")
    found += [
        value
        for name, value in environment.items()
        if len(value) >= 6 and any(word in name.upper() for word in wanted)
    ]
    return found


def _sources(root: str) -> Iterator[Path]:
    """Through links, too: in a clone the package's folders are links."""
    for folder, _, names in os.walk(root, followlinks=True):
        yield from (Path(folder) / name for name in names if name.endswith(".py"))


def vocabulary(config: LaunchConfig) -> set[str]:
    """All words of mlx-mesh's source; for tracebacks names of functions and files of mlx-lm, and of Python;
    and the model's own name."""
    words: set[str] = set()
    for package, what in (("mlx_mesh", _EVERYTHING), ("mlx_lm", _DEFINITION)):
        spec = find_spec(package)
        for root in spec.submodule_search_locations or () if spec else ():
            for file in _sources(root):
                words |= words_of(" ".join(what.findall(file.read_text("utf-8", "replace"))))
                words |= words_of(file.stem)
    words |= {name.lower() for name in (*dir(builtins), *sys.stdlib_module_names)}
    words |= words_of(" ".join(list(metadata.packages_distributions())[:_DISTRIBUTIONS]))
    words |= words_of(f"{platform.system()} {platform.machine()} {platform.release()}")
    model = config.model
    is_path = model.startswith(("/", "~"))
    return words | words_of(model.rstrip("/").rpartition("/")[2] if is_path else model)
