"""Read and check `hosts.yaml`, and the JSON hostfiles of `mlx.launch` as they are. Text in, `Hostfile` out.

Nothing is opened or resolved here. Every error is a `HostfileError` whose lines read
`file:line: what was seen; the fix`, and all errors of a file are reported together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import pydantic

from mlx_mesh.mesh.errors import HostfileError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.hostfile_deadlines import read_deadlines
from mlx_mesh.mesh.hostfile_fields import (
    check_address,
    check_media_domain,
    check_name,
    parse_memory,
    split_ssh_target,
)
from mlx_mesh.mesh.hostfile_words import in_words
from mlx_mesh.mesh.interfaces import check_rules
from mlx_mesh.mesh.messages import Deadlines
from mlx_mesh.mesh.types import Backend, Sharding
from mlx_mesh.mesh.yaml_lines import Lines, Place, YamlError, load_json_with_lines, load_yaml_with_lines

DEFAULT_PORT = 18000

SyncMode = Literal["auto", "never"]
"""Whether `up` brings the model to hosts that lack it."""


@dataclass(frozen=True, slots=True)
class Hostfile:
    """A checked hostfile. `notes` are things that it asks for and does not get, to be said aloud."""

    source: str
    name: str
    hosts: tuple[HostEntry, ...]
    model: str = ""  # '' = must be given by --model
    adapter: str = ""  # folder of an adapter on each host; '' = none
    embedding_model: str = ""  # folder or hub id on the leader; '' = no embeddings
    allowed_models: tuple[str, ...] = ()  # that may be loaded in place of `model`
    num_replicas: int = 1
    vision: bool | None = None  # None = as the model's config says
    sharding: Sharding = Sharding.AUTO
    backend: Backend = Backend.AUTO
    serve_host: str = "127.0.0.1"
    serve_port: int = DEFAULT_PORT
    sync: SyncMode = "auto"
    allowed_media_domains: tuple[str, ...] = ()
    deadlines: Deadlines = field(default_factory=Deadlines)
    announce: bool | None = None  # on the network, that its hosts take part; None = if there are several
    notes: tuple[str, ...] = ()


def parse_hostfile(text: str, source: str = "hosts.yaml") -> Hostfile:
    """Read a hostfile's text; `source` is its path, used in messages and for the default name.
    Raises HostfileError with one line per fault."""
    try:
        if text.lstrip()[:1] in ("[", "{"):
            data, lines = load_json_with_lines(text)
        else:
            data, lines = load_yaml_with_lines(text)
    except YamlError as error:
        raise HostfileError(f"{source}:{error.line}: {error}") from error
    if _is_mlx_launch(data):
        return _from_mlx_launch(data, lines, source)
    if not isinstance(data, dict):
        raise HostfileError(
            f"{source}:1: the file holds no settings; start it with `hosts:` and a list of hosts"
        )
    return _from_yaml(data, lines, source)


# ---------------------------------------------------------------- models at the door

_M = TypeVar("_M", bound=pydantic.BaseModel)


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class _Serve(_Strict):
    host: str = "127.0.0.1"
    port: int = pydantic.Field(default=DEFAULT_PORT, ge=0, le=65535)
    allowed_media_domains: list[str] = []


class _Defaults(_Strict):
    user: str = ""
    python: str = ""
    models: str = ""


class _Host(_Strict):
    name: str = ""
    ssh: str = ""
    local: bool = False
    user: str = ""
    python: str = ""
    models: str = ""
    addresses: list[str] = []
    rdma: list[str | None] = []
    interfaces: list[str] | None = None
    slots: int = pydantic.Field(default=1, ge=1, le=64)
    layers: Any = None
    memory_limit: Any = None


class _File(_Strict):
    name: str = ""
    model: str = ""
    adapter: str = ""
    embedding_model: str = ""
    allow_model: list[str] = []
    replicas: int = pydantic.Field(default=1, ge=1, le=64)
    vision: bool | None = None
    sharding: Literal["auto", "tensor", "pipeline"] = "auto"
    backend: Literal["auto", "ring", "jaccl", "jaccl-ring", "nccl"] = "auto"
    interfaces: list[str] = []
    sync: SyncMode = "auto"
    serve: _Serve = _Serve()
    defaults: _Defaults = _Defaults()
    deadlines: dict[str, float] = {}
    announce: bool | None = None
    hosts: list[_Host] = pydantic.Field(min_length=1)


class _LaunchHost(_Strict):
    ssh: str = pydantic.Field(min_length=1)
    ips: list[str] = []
    rdma: list[str | list[str] | None] = []


class _LaunchFile(_Strict):
    backend: Literal["", "auto", "ring", "jaccl", "jaccl-ring", "nccl"] = ""
    envs: list[str] = []
    hosts: list[_LaunchHost] = pydantic.Field(min_length=1)


class _Faults:
    """Collects faults by their place, and raises them together."""

    def __init__(self, source: str, lines: Lines) -> None:
        self._source = source
        self._lines = lines
        self._found: list[tuple[int, str]] = []
        self._once: set[Place] = set()

    def add(self, where: Place, what: str) -> None:
        self._found.append((self._lines.of(where), what))

    def add_once(self, where: Place, what: str) -> None:
        """Of several faults of one place the first: three alike are told twice, not three times."""
        if where not in self._once:
            self._once.add(where)
            self.add(where, what)

    def raise_if_any(self) -> None:
        if self._found:
            told = dict.fromkeys(f"{self._source}:{line}: {what}" for line, what in sorted(self._found))
            raise HostfileError("\n".join(told))


def _validate(model: type[_M], data: Any, faults: _Faults) -> _M | None:
    try:
        return model.model_validate(data)
    except pydantic.ValidationError as error:
        told: set[Place] = set()
        for item in error.errors(include_url=False):
            where = tuple(part for part in item["loc"] if _is_place(part))
            if where not in told:  # each member of a union complains by itself
                told.add(where)
                faults.add(where, in_words(model, item, where))
        return None


def _is_place(part: int | str) -> bool:
    """Pydantic adds the names of union members to a place; they are no keys of the file."""
    return part not in ("str", "int", "list[str]", "nullable[str]")


# ---------------------------------------------------------------- hosts.yaml


def _from_yaml(data: dict[str, Any], lines: Lines, source: str) -> Hostfile:
    faults = _Faults(source, lines)
    file = _validate(_File, data, faults)
    if file is None:
        _check_readable_hosts(data.get("hosts"), lines, faults)
    faults.raise_if_any()
    assert file is not None
    name = file.name or _stem(source)
    for problem in check_name(name):
        faults.add(("name",), f"the mesh's name {name!r} {problem}")
    for index, domain in enumerate(file.serve.allowed_media_domains):
        for problem in check_media_domain(domain):
            faults.add(("serve", "allowed_media_domains", index), problem)
    deadlines, late = read_deadlines(file.deadlines)
    for key, problem in late:
        faults.add(("deadlines", key), problem)
    for position, rule in enumerate(file.interfaces):
        for problem in check_rules([rule]):
            faults.add(("interfaces", position), problem)
    hosts = tuple(
        _host(host, index, file.defaults, file.interfaces, lines, faults)
        for index, host in enumerate(file.hosts)
    )
    faults.raise_if_any()
    _check_together(hosts, faults)
    faults.raise_if_any()
    return Hostfile(
        source=source,
        name=name,
        model=file.model,
        adapter=file.adapter,
        embedding_model=file.embedding_model,
        allowed_models=tuple(file.allow_model),
        num_replicas=file.replicas,
        vision=file.vision,
        sharding=Sharding(file.sharding),
        backend=Backend(file.backend),
        serve_host=file.serve.host,
        serve_port=file.serve.port,
        sync=file.sync,
        allowed_media_domains=tuple(host.lower() for host in file.serve.allowed_media_domains),
        deadlines=deadlines,
        announce=file.announce,
        hosts=hosts,
    )


def _check_readable_hosts(hosts: Any, lines: Lines, faults: _Faults) -> None:
    """The faults of those hosts that can be read, when the file as a whole cannot: all are told at once."""
    for index, given in enumerate(hosts if isinstance(hosts, list) else []):
        with contextlib.suppress(pydantic.ValidationError):  # told already
            _host(_Host.model_validate(given), index, _Defaults(), [], lines, faults)


def _host(
    host: _Host, index: int, defaults: _Defaults, interfaces: list[str], lines: Lines, faults: _Faults
) -> HostEntry:
    """`interfaces`: the file's, for hosts that have no rules of their own."""
    here: Place = ("hosts", index)
    ssh, user = "", ""
    if host.local and host.ssh:
        faults.add(
            (*here, "local"), "a host is either `local: true` or has `ssh:`, not both; remove one of them"
        )
    elif not host.local and not host.ssh:
        faults.add(here, "this host has no `ssh:`; add `ssh: HOST`, or `local: true` for this machine")
    elif host.local and host.user:
        faults.add((*here, "user"), "`user` means nothing with `local: true`; remove it")
    elif host.ssh:
        target = split_ssh_target(host.ssh)
        if target.fault:
            faults.add((*here, "ssh"), target.fault)
        elif target.user and host.user and target.user != host.user:
            faults.add(
                (*here, "user"),
                f"`ssh: {host.ssh}` names user {target.user} and `user:` names {host.user}; keep one",
            )
        ssh, user = target.host, target.user or host.user or defaults.user
    name = host.name or (ssh or "local")
    for problem in check_name(name):
        faults.add(
            (*here, "name") if host.name else here, f"the host's name {name!r} {problem}; give it a `name:`"
        )
    for position, address in enumerate(host.addresses):
        for problem in check_address(address):
            faults.add((*here, "addresses", position), problem)
    for position, rule in enumerate(host.interfaces or []):
        for problem in check_rules([rule]):
            faults.add((*here, "interfaces", position), problem)
    limit = parse_memory(host.memory_limit) if host.memory_limit is not None else 0
    if isinstance(limit, str):
        faults.add((*here, "memory_limit"), limit)
    return HostEntry(
        name=name,
        ssh=ssh,
        user=user,
        python=host.python or defaults.python,
        models=host.models or defaults.models,
        addresses=tuple(host.addresses),
        rdma=tuple(host.rdma),
        interfaces=tuple(interfaces if host.interfaces is None else host.interfaces),
        slots=host.slots,
        layers=_pins(host, here, faults),
        memory_limit_bytes=limit if isinstance(limit, int) else 0,
        line=lines.of(here),
    )


def _pins(host: _Host, here: Place, faults: _Faults) -> tuple[int, ...]:
    """`layers` of a host, one number for each slot; () when it has none."""
    if host.layers is None:
        return ()
    given = host.layers if isinstance(host.layers, list) else [host.layers] * host.slots
    problem = ""
    if not all(isinstance(pin, int) and not isinstance(pin, bool) and pin > 0 for pin in given):
        problem = f"`layers: {host.layers}` must be at least 1, a whole number or one for each slot"
    elif len(given) != host.slots:
        problem = f"{len(given)} numbers of layers for {host.slots} slots; give one for each slot"
    if problem:
        faults.add((*here, "layers"), problem)
        return ()
    return tuple(given)


def _check_together(hosts: tuple[HostEntry, ...], faults: _Faults) -> None:
    """Faults that only show between hosts."""
    slots_fix = "for several ranks on one machine use one host with `slots: N`"
    for index, host, earlier in _with_earlier(hosts):
        here: Place = ("hosts", index)
        for other in earlier:
            if other.name.lower() == host.name.lower():
                faults.add_once(
                    (*here, "name"), f"host {host.name!r} stands already on line {other.line}; rename one"
                )
            elif host.is_local and other.is_local:
                faults.add_once(
                    (*here, "local"),
                    f"this machine is already host {other.name!r} (line {other.line}); {slots_fix}",
                )
            elif host.ssh and (other.ssh.lower(), other.user) == (host.ssh.lower(), host.user):
                faults.add_once(
                    (*here, "ssh"),
                    f"{host.ssh!r} is already host {other.name!r} (line {other.line}); {slots_fix}",
                )
            shared = [a for a in host.addresses if a in other.addresses and not a.startswith("127.")]
            if shared:
                faults.add_once(
                    (*here, "addresses"),
                    f"{shared[0]} is already an address of {other.name!r} (line {other.line}); correct one",
                )
        if host.rdma and len(host.rdma) != len(hosts):
            faults.add(
                (*here, "rdma"),
                f"{len(host.rdma)} RDMA devices for {len(hosts)} hosts; "
                "give one for each host in the file's order, null for this one",
            )
        elif host.rdma and host.rdma[index] is not None:
            faults.add(
                (*here, "rdma", index),
                f"the device from {host.name!r} to itself must be null; write null here",
            )
    with_loopback = [h for h in hosts if any(a.startswith("127.") for a in h.addresses)]
    if with_loopback and len(with_loopback) < len(hosts):
        index = hosts.index(with_loopback[0])
        faults.add(
            ("hosts", index, "addresses"),
            f"{with_loopback[0].addresses[0]} is this host's loopback, which the other hosts cannot reach; "
            "give its address on the common network",
        )


def _with_earlier(
    hosts: tuple[HostEntry, ...],
) -> Iterator[tuple[int, HostEntry, tuple[HostEntry, ...]]]:
    for index, host in enumerate(hosts):
        yield index, host, hosts[:index]


# ---------------------------------------------------------------- mlx.launch


def _is_mlx_launch(data: Any) -> bool:
    """A bare list, or a mapping with what only `mlx.launch` writes."""
    if isinstance(data, list):
        return True
    if not isinstance(data, dict):
        return False
    hosts = data.get("hosts")
    names_ips = isinstance(hosts, list) and any(isinstance(host, dict) and "ips" in host for host in hosts)
    return "envs" in data or names_ips


def _from_mlx_launch(data: Any, lines: Lines, source: str) -> Hostfile:
    if isinstance(data, list):
        data, lines = {"hosts": data}, lines.below("hosts")
    faults = _Faults(source, lines)
    file = _validate(_LaunchFile, data, faults)
    faults.raise_if_any()
    assert file is not None
    notes = [_env_note(env) for env in file.envs]
    hosts: list[HostEntry] = []
    for index, host in enumerate(file.hosts):
        here: Place = ("hosts", index)
        for position, address in enumerate(host.ips):
            for problem in check_address(address):
                faults.add((*here, "ips", position), problem)
        if host.ssh == "127.0.0.1":  # how mlx.launch writes "this machine"; repeated for several ranks
            if hosts and hosts[-1].is_local:
                hosts[-1] = _one_more_slot(hosts[-1])
                continue
            target_host, user = "", ""
        else:
            target = split_ssh_target(host.ssh)
            if target.fault:
                faults.add((*here, "ssh"), target.fault)
            target_host, user = target.host, target.user
        if any(isinstance(device, list) for device in host.rdma):
            notes.append(f"{host.ssh}: of several RDMA devices to one host only the first is used")
        rdma = tuple(
            device[0] if isinstance(device, list) and device else device or None for device in host.rdma
        )
        entry = HostEntry(
            name=target_host or "local",
            ssh=target_host,
            user=user,
            addresses=tuple(host.ips),
            rdma=tuple(device for device in rdma if not isinstance(device, list)),
            line=lines.of(here),
        )
        hosts.append(entry)
    faults.raise_if_any()
    if len(hosts) == 1 and hosts[0].slots > 1:  # one machine needs no address and no RDMA
        hosts[0] = HostEntry(name=hosts[0].name, slots=hosts[0].slots, line=hosts[0].line)
    _check_together(tuple(hosts), faults)
    faults.raise_if_any()
    name = _stem(source)
    if check_name(name):
        name = "mesh"
    return Hostfile(
        source=source,
        name=name,
        hosts=tuple(hosts),
        backend=Backend(file.backend or "auto"),
        notes=tuple(dict.fromkeys(notes)),
    )


def _one_more_slot(host: HostEntry) -> HostEntry:
    return HostEntry(
        name=host.name, addresses=host.addresses, rdma=host.rdma, slots=host.slots + 1, line=host.line
    )


def _env_note(env: str) -> str:
    name = env.partition("=")[0]
    if name == "MLX_METAL_FAST_SYNCH":
        return f"{name} from `envs` is not set: MLX warns that it can deadlock and wedge the GPU"
    return f"{name} from `envs` is not set: engines get a clean environment"


def _stem(source: str) -> str:
    return source.replace("\\", "/").rpartition("/")[2].rpartition(".")[0] or "mesh"
