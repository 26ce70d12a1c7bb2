"""Ask all hosts at once whether they are ready: all faults are told together, or all connections stay."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_mesh.launcher.addresses import SeenAddresses, choose_addresses
from mlx_mesh.launcher.config import LaunchConfig, adapter_candidates, is_hub_id, model_candidates
from mlx_mesh.launcher.faults import STEPS, HostFault
from mlx_mesh.launcher.remote import (
    CommandTimeout,
    LocalHost,
    ProgramFailed,
    RemoteHost,
    interpreter_fault,
    run_program,
)
from mlx_mesh.mesh.doctor import install_fix
from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.types import PROTOCOL_VERSION, Backend, HostFacts, Versions

MIN_PYTHON = (3, 11)
PROBE_TIMEOUT_S = 120.0  # hashing file names and importing mlx on a cold disk
PREFLIGHT_TIMEOUT_S = 240.0


@dataclass(frozen=True, slots=True)
class ReadyHost:
    """A host that passed. `remote` stays open and belongs to the caller."""

    entry: HostEntry
    remote: RemoteHost
    python: str
    model: str  # as this host names it: a folder, or a hub id
    facts: HostFacts
    address: str  # IPv4 for control and data links
    adapter: str = ""  # its folder on this host; '' = none
    embedding: str = ""  # the embedding model's, on the leader; '' = none

    @property
    def machine(self) -> str:
        """The name of the host that it is, or is a part of."""
        return self.entry.machine or self.entry.name


@dataclass(frozen=True, slots=True)
class Preflight:
    hosts: tuple[ReadyHost, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Probed:
    """One host's answer."""

    entry: HostEntry
    remote: RemoteHost
    python: str
    model: str
    facts: HostFacts
    reached_at: str
    adapter: str = ""
    embedding: str = ""


def python_of(entry: HostEntry) -> str:
    """The interpreter on that host: the hostfile's, else the same path as the launcher's own."""
    return entry.python or sys.executable


def open_host(entry: HostEntry, ssh_config: str) -> RemoteHost:
    """Reach a host. Raises HostFault."""
    if entry.is_local:
        return LocalHost(entry.name)
    # The SSH library is the slowest import of the launcher, and hosts that are this machine never need it.
    from mlx_mesh.launcher.paired import connect
    from mlx_mesh.launcher.ssh import SshHost, find_route

    if entry.agent is not None:
        return connect(entry.name, entry.agent, os.environ)
    return SshHost.connect(entry.name, find_route(entry.name, entry.ssh, entry.user, ssh_config or None))


def check_hosts(config: LaunchConfig, *, may_lack_model: bool = False) -> Preflight:
    """All hosts in parallel. Raises PreflightError with a line for each fault; nothing stays open then.
    `may_lack_model`: a host without the model is no fault, because it is brought there; no hub is asked."""
    probed, faults = _probe_all(config, may_lack_model)
    try:
        if not faults:
            hosts = [probed[entry.name] for entry in config.hosts]
            facts, names = [host.facts for host in hosts], [_named(host) for host in hosts]
            faults, warnings = compare_hosts(facts, names, may_lack_model)
            addresses, address_faults = choose_addresses(_seen(_machines(hosts)))
            faults += address_faults + _tokenizer_faults(hosts[0])
            if config.world_size > 1:
                faults += backend_faults({host.entry.name: host.facts for host in hosts}, config.backend)
        if faults:
            order = {entry.name: index for index, entry in enumerate(config.hosts)}
            faults.sort(key=lambda fault: (order[fault.host], STEPS.index(fault.step)))
            raise PreflightError("\n".join(str(fault) for fault in faults))
    except BaseException:
        for host in probed.values():
            host.remote.close()
        raise
    ready = tuple(
        ReadyHost(
            host.entry,
            host.remote,
            host.python,
            host.model,
            host.facts,
            addresses[host.entry.machine or host.entry.name],
            host.adapter,
            host.embedding,
        )
        for host in hosts
    )
    return Preflight(ready, tuple(warnings))


def _probe_all(config: LaunchConfig, may_lack_model: bool) -> tuple[dict[str, _Probed], list[HostFault]]:
    probed: dict[str, _Probed] = {}
    faults: list[HostFault] = []
    lock = threading.Lock()
    is_late = False

    def probe(entry: HostEntry) -> None:
        try:
            found = probe_host(entry, config, may_lack_model)
        except HostFault as fault:
            with lock:
                faults.append(fault)
        except Exception as error:  # one host's trouble must not hide the others'
            with lock:
                faults.append(
                    HostFault(entry.name, "connect", f"{type(error).__name__}: {error}", "see --debug")
                )
        else:
            with lock:
                if not is_late:
                    probed[entry.name] = found
                    return
            found.remote.close()

    threads = [threading.Thread(target=probe, args=(entry,), daemon=True) for entry in config.hosts]
    deadline = time.monotonic() + PREFLIGHT_TIMEOUT_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    with lock:
        is_late = True
        told = {fault.host for fault in faults} | set(probed)
        for entry in config.hosts:
            if entry.name not in told:
                faults.append(
                    HostFault(
                        entry.name,
                        "connect",
                        f"no answer within {PREFLIGHT_TIMEOUT_S:g} s",
                        "see if it is awake",
                    )
                )
        return dict(probed), list(faults)


def probe_host(entry: HostEntry, config: LaunchConfig, may_lack_model: bool = False) -> _Probed:
    """Reach one host and ask it. Raises HostFault."""
    remote = open_host(entry, config.ssh_config)
    try:
        python = python_of(entry)
        answer = ask_host(remote, python, entry, config, asks_hub=not may_lack_model)
        facts = read_answer(answer, entry.name, python, config.model, may_lack_model)
        reached_at = ""
        if not isinstance(remote, LocalHost):
            seen = str(answer["ssh_connection"]).split()
            reached_at = seen[2] if len(seen) == 4 else remote.peer_address
        adapter, embedding = str(answer.get("adapter", "")), str(answer.get("embedding", ""))
        return _Probed(entry, remote, python, str(answer["model"]), facts, reached_at, adapter, embedding)
    except BaseException:
        remote.close()
        raise


def ask_host(
    remote: RemoteHost, python: str, entry: HostEntry, config: LaunchConfig, *, asks_hub: bool = True
) -> dict[str, Any]:
    """The answer of the facts probe on a host that was reached. Raises HostFault."""
    embedding = config.embedding_model if entry is config.hosts[0] else ""  # the leader's business only
    request = {
        "min_python": MIN_PYTHON,
        "model": config.model,
        "models": model_candidates(config.model, entry.models),
        "models_folder": entry.models,
        "asks_hub": asks_hub,
        "adapter": config.adapter,
        "adapters": adapter_candidates(config.adapter, entry.models),
        "embedding": embedding,
        "embeddings": model_candidates(embedding, entry.models) if embedding else [],
        "offline": config.is_offline,
    }
    try:
        return run_program(remote, python, "facts_probe", request, PROBE_TIMEOUT_S)
    except CommandTimeout as error:
        raise HostFault(
            entry.name,
            "interpreter",
            f"{python} did not answer within {PROBE_TIMEOUT_S:g} s",
            "see if the host or its disk is overloaded, or a shell profile waits for input",
        ) from error
    except ProgramFailed as error:
        if error.completed.exit.lost:
            raise HostFault(
                entry.name, "connect", f"the connection was lost ({error.completed.exit.lost})", "try again"
            ) from error
        said = error.completed.last_words()
        raise interpreter_fault(
            entry.name, python, f"{error.completed.exit}; {said}" if said else f"{error.completed.exit}"
        ) from error


def read_answer(
    answer: dict[str, Any], host: str, python: str, model: str, may_lack_model: bool = False
) -> HostFacts:
    """HostFacts of a probe's answer. Raises HostFault naming the first step that fails. Pure."""
    version = tuple(answer["python"])
    if version[:2] < MIN_PYTHON:
        raise HostFault(
            host,
            "interpreter",
            f"{python} is Python {_dotted(version)}",
            f"mlx-mesh needs Python {_dotted(MIN_PYTHON)} or newer; set `python:` for this host",
        )
    pip = f"{python} -m pip install"
    if answer["missing"]:
        package = (
            "mlx-mesh" if "mlx_mesh" in answer["missing"] else " ".join(answer["missing"]).replace("_", "-")
        )
        raise HostFault(
            host,
            "import",
            f"{python} has no module {', '.join(answer['missing'])}",
            install_fix(host) if package == "mlx-mesh" else f"run there: {pip} {package}",
        )
    if answer["mlx_fault"]:
        raise HostFault(
            host,
            "import",
            f"{python} cannot import mlx.core ({answer['mlx_fault']})",
            f"run there: {pip} --force-reinstall mlx (on Linux: {pip} 'mlx-mesh[cpu]' or 'mlx-mesh[cuda13]')",
        )
    if answer["facts"] is None:
        raise HostFault(
            host,
            "import",
            f"its mlx-mesh cannot tell what it has ({answer['facts_error']}); it may be too old",
            f"run there: {pip} --upgrade mlx-mesh",
        )
    try:
        facts = msgspec.convert(answer["facts"], HostFacts)
    except msgspec.ValidationError as error:
        raise HostFault(
            host,
            "version",
            f"its mlx-mesh answers in another form than this one ({error}); it is too old or too new",
            f"run there: {pip} --upgrade mlx-mesh, and the same here",
        ) from error
    if not facts.model_digest and not may_lack_model:
        where = " or set `models:` for this host" if is_hub_id(model) else ""
        raise HostFault(
            host,
            "model",
            facts.model_error.rstrip(".") or f"there is no model {answer['model']}",
            f"`mlx-mesh sync` brings it; or copy the model there{where}, or correct --model",
        )
    if facts.adapter_error:
        raise HostFault(
            host,
            "adapter",
            facts.adapter_error.rstrip("."),
            "copy the adapter's folder there, or correct --adapter-path",
        )
    if facts.embedding_error:
        raise HostFault(
            host,
            "embedding model",
            facts.embedding_error.rstrip("."),
            "or correct --embedding-model",
        )
    return facts


@dataclass(frozen=True, slots=True)
class Named:
    """What a comparison calls a host."""

    name: str
    python: str
    model: str
    adapter: str = ""


def _named(host: _Probed) -> Named:
    return Named(host.entry.name, host.python, host.model, host.adapter)


def compare_hosts(
    facts: Sequence[HostFacts], names: Sequence[Named], brings_model: bool = False
) -> tuple[list[HostFault], list[str]]:
    """Versions and model of every host against the first one's, and the first one's against this launcher's
    protocol. Differences of mlx, mlx-lm, mlx-mesh, protocol and model block; of Python's minor they warn.
    `brings_model`: whether hosts have the same model is looked at later."""
    faults: list[HostFault] = []
    warnings: list[str] = []
    leader, leader_name = facts[0], names[0].name
    for host, named in zip(facts, names, strict=True):
        if host.versions.protocol != PROTOCOL_VERSION:
            faults.append(
                HostFault(
                    named.name,
                    "version",
                    f"it speaks protocol {host.versions.protocol}, this launcher {PROTOCOL_VERSION}",
                    "install the same mlx-mesh on this machine and there",
                )
            )
        for package, attribute in (("mlx", "mlx"), ("mlx-lm", "mlx_lm"), ("mlx-mesh", "mlx_mesh")):
            here, wanted = getattr(host.versions, attribute), getattr(leader.versions, attribute)
            if here != wanted:
                faults.append(
                    HostFault(
                        named.name,
                        "version",
                        f"it has {package} {here or 'not installed'}, {leader_name} has {wanted or 'none'}",
                        install_fix(named.name)
                        if package == "mlx-mesh"
                        else f"run there: {named.python} -m pip install {package}=={wanted}",
                    )
                )
        if _minor(host.versions) != _minor(leader.versions):
            warnings.append(
                f"{named.name} runs Python {host.versions.python}, {leader_name} {leader.versions.python}; "
                "this works, the same one is better tested"
            )
        if host.model_digest != leader.model_digest and not brings_model:
            faults.append(
                HostFault(
                    named.name,
                    "model",
                    f"its {named.model} differs from {leader_name}'s {names[0].model} "
                    f"({host.model_digest[:12]} and {leader.model_digest[:12]})",
                    "copy the same config and weight files to both",
                )
            )
        if host.adapter_digest != leader.adapter_digest:
            faults.append(
                HostFault(
                    named.name,
                    "adapter",
                    f"its adapter {named.adapter} differs from {leader_name}'s {names[0].adapter} "
                    f"({host.adapter_digest[:12]} and {leader.adapter_digest[:12]})",
                    "copy the same adapter folder to both",
                )
            )
    return faults, warnings


def backend_faults(facts: Mapping[str, HostFacts], backend: Backend) -> list[HostFault]:
    """Hosts, by name, whose system cannot have the backend at all."""
    needed = {Backend.JACCL: "Darwin", Backend.JACCL_RING: "Darwin", Backend.NCCL: "Linux"}.get(backend)
    what = "NVIDIA GPUs on Linux" if backend is Backend.NCCL else "RDMA over Thunderbolt between Macs"
    return [
        HostFault(name, "backend", f"{backend.value} needs {what}; this is {host.system}", "use backend ring")
        for name, host in facts.items()
        if needed is not None and host.system != needed
    ]


def _tokenizer_faults(leader: _Probed) -> list[HostFault]:
    """Only the leader turns text into tokens."""
    problem = leader.facts.tokenizer_error.rstrip(".")
    fix = "the first host of the hostfile serves HTTP and needs the tokenizer"
    return [HostFault(leader.entry.name, "model", problem, fix)] if problem else []


def _minor(versions: Versions) -> str:
    return ".".join(versions.python.split(".")[:2])


def _machines(hosts: Sequence[_Probed]) -> list[_Probed]:
    """Of several members on one machine, which have one address, the first."""
    return [host for host in hosts if host.entry.name == (host.entry.machine or host.entry.name)]


def _seen(hosts: Sequence[_Probed]) -> list[SeenAddresses]:
    towards = next((host.remote.local_address for host in hosts if host.remote.local_address), "")
    return [
        SeenAddresses(
            entry=host.entry,
            own=host.facts.addresses,
            reached_at=host.reached_at,
            towards_others=towards if host.entry.is_local else "",
        )
        for host in hosts
    ]


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)


def close_all(hosts: Sequence[ReadyHost]) -> None:
    """Give the connections back."""
    for host in reversed(hosts):
        host.remote.close()
