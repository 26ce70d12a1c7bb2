"""Hosts that announce themselves on the network: what an announcement says, how it is written into the TXT
record of a DNS-SD service, and what is to be thought of all that were seen. Pure.

Nothing of an announcement is proven: anybody on the network can send one. It only says where to knock.
"""

from __future__ import annotations

import hashlib
import ipaddress
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from mlx_mesh.mesh.interfaces import Interface, LinkClass, is_allowed, unknown_names
from mlx_mesh.mesh.types import Versions

SERVICE = "_mlx-mesh._tcp.local."
RECORD_VERSION = 1
AGENT_PORT = 17864
"""Where `mlx-mesh agent` waits unless it is told otherwise."""

MAX_TXT_BYTES = 1100
"""So that an answer with its other records fits into one Ethernet frame."""

MAX_INTERFACES = 8
MAX_ADDRESSES = 4  # of one interface
MAX_HOSTS = 64
"""Beyond these, announcements are rejected."""

SCAN_S = 3.0
DISCOVER_S = 5.0  # how long `up --discover` looks for hosts
MIN_SCAN_S = 0.2
MAX_SCAN_S = 60.0
"""How long a look at the network takes, and may."""

CACHE_KEPT_S = 30 * 86400.0
USED_CLASSES = (LinkClass.THUNDERBOLT, LinkClass.ETHERNET, LinkClass.WIFI)

_MAX_STRING_BYTES = 255  # of DNS
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_HEX = re.compile(r"[0-9a-f]{16,64}")
_FINGERPRINT = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")
_VERSION = re.compile(r"[A-Za-z0-9.+!-]{0,40}")
_INTERFACE = re.compile(r"[A-Za-z0-9._-]{1,16}")
_TEXT = re.compile(r"[ -~]{0,64}")

Role = Literal["agent", "node"]
Source = Literal["multicast", "address", "cache"]


class RecordRejected(ValueError):
    """An announcement that is not used; the message says what is wrong with it."""


class HostInterface(msgspec.Struct, frozen=True, kw_only=True):
    """An interface of a host that announces itself, with IPv4 addresses and prefixes ("10.0.0.2/24")."""

    name: str
    link_class: LinkClass
    addresses: tuple[str, ...]


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself. '' = it does not know."""

    host: str  # its name
    run: str  # of the process that announces: 16 hex digits, drawn at its start
    role: Role  # agent: waits to be asked; node: takes part in a mesh already
    hardware: str = ""  # digest of the hardware's UUID, see `hardware_digest`
    ssh: str = ""  # fingerprint of its SSH host key
    key: str = ""  # of an agent: fingerprint of the key that it shows on its port
    port: int = 0  # of an agent
    mesh: str = ""  # of a node
    chip: str = ""
    memory_bytes: int = 0
    versions: Versions = Versions(mlx_mesh="", mlx="", mlx_lm="", python="", protocol=0)
    interfaces: tuple[HostInterface, ...] = ()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Without prefixes."""
        return tuple(
            address.partition("/")[0] for interface in self.interfaces for address in interface.addresses
        )

    @property
    def has_identity(self) -> bool:
        return bool(self.hardware or self.ssh or self.key)


def hardware_digest(uuid: str) -> str:
    """Tells hardware apart without naming it to everybody on the network; '' of ''."""
    return hashlib.sha256(f"mlx-mesh {uuid.strip().lower()}".encode()).hexdigest()[:32] if uuid else ""


def host_name(hostname: str) -> str:
    """A system's host name in the form that announcements, hostfiles and logs have."""
    first = hostname.partition(".")[0]
    return re.sub(r"[^A-Za-z0-9_-]+", "-", first).strip("-_")[:63] or "host"


def usable_interfaces(
    interfaces: Sequence[Interface], rules: Sequence[str] = ()
) -> tuple[list[Interface], dict[str, str]]:
    """The interfaces to announce and to look on, best first, and why each of the others is not used. `rules`
    as in `interfaces.check_rules`; one that is named in full may be of any kind."""
    used, unused = [], {}
    for interface in sorted(interfaces, key=lambda each: (each.rank, each.name)):
        if not is_allowed(interface.name, rules):
            unused[interface.name] = "not among those asked for"
        elif interface.link_class not in USED_CLASSES and interface.name not in rules:
            unused[interface.name] = interface.evidence
        elif not interface.is_active:
            unused[interface.name] = "no carrier"
        elif interface.bridge:
            unused[interface.name] = f"a member of {interface.bridge}"
        elif not interface.addresses:
            unused[interface.name] = "no IPv4 address"
        else:
            used.append(interface)
    for rule in unknown_names(interfaces, rules):
        unused[rule] = "there is no such interface"
    return used, unused


def announced(interfaces: Sequence[Interface]) -> tuple[HostInterface, ...]:
    """Of usable interfaces, what is announced."""
    return tuple(
        HostInterface(name=each.name, link_class=each.link_class, addresses=each.addresses[:MAX_ADDRESSES])
        for each in interfaces[:MAX_INTERFACES]
        if _INTERFACE.fullmatch(each.name)
    )


# ---------------------------------------------------------------- the TXT record


def format_txt(announcement: Announcement) -> dict[str, str]:
    """The strings of the TXT record, in order. The worst interfaces are left out when not all fit."""
    said = announcement
    strings = {
        "v": str(RECORD_VERSION),
        "host": said.host,
        "run": said.run,
        "role": said.role,
        "hw": said.hardware,
        "ssh": said.ssh,
        "key": said.key,
        "mesh": said.mesh,
        "chip": said.chip[:64],
        "mem": str(said.memory_bytes),
        "ver": said.versions.mlx_mesh,
        "mlx": said.versions.mlx,
        "lm": said.versions.mlx_lm,
        "py": said.versions.python,
        "proto": str(said.versions.protocol),
    }
    strings = {key: value for key, value in strings.items() if value}
    for index, interface in enumerate(said.interfaces):
        text = f"{interface.name};{interface.link_class};{','.join(interface.addresses)}"
        more = strings | {f"if{index}": text}
        if txt_bytes(more) > MAX_TXT_BYTES or len(text) > _MAX_STRING_BYTES - 5:
            break
        strings = more
    return strings


def txt_bytes(strings: Mapping[str, str]) -> int:
    """Size on the wire."""
    return sum(len(f"{key}={value}".encode()) + 1 for key, value in strings.items())


def split_txt(data: bytes) -> dict[str, str]:
    """The strings of a TXT record's data. The first of a key wins, as DNS-SD says. Raises RecordRejected."""
    if len(data) > MAX_TXT_BYTES:
        raise RecordRejected(f"a TXT record of {len(data)} bytes; {MAX_TXT_BYTES} is the limit")
    strings: dict[str, str] = {}
    at = 0
    while at < len(data):
        end = at + 1 + data[at]
        if end > len(data):
            raise RecordRejected("a TXT record that ends in the middle of a string")
        key, _, value = data[at + 1 : end].partition(b"=")
        try:
            strings.setdefault(key.decode("ascii"), value.decode("ascii"))
        except UnicodeDecodeError:
            raise RecordRejected("a TXT record that is not ASCII") from None
        at = end
    return strings


def parse_txt(strings: Mapping[str, str], port: int) -> Announcement:
    """An announcement of its strings and the service's port. Strings that are not known are left alone.
    Raises RecordRejected."""
    version = strings.get("v", "")
    if version != str(RECORD_VERSION):
        raise RecordRejected(
            f"a record of version {version[:8]!r}, where this mlx-mesh knows {RECORD_VERSION}: install the "
            "same one on both hosts"
        )
    role = _matching(strings, "role", re.compile("agent|node"))
    key = _matching(strings, "key", _FINGERPRINT, may_be_empty=role == "node")
    if role == "agent" and not 0 < port < 65536:
        raise RecordRejected(f"an agent on port {port}")
    interfaces = tuple(
        _parse_interface(strings[f"if{index}"]) for index in range(MAX_INTERFACES) if f"if{index}" in strings
    )
    if not interfaces:
        raise RecordRejected("no interface with an address")
    return Announcement(
        host=_matching(strings, "host", _NAME),
        run=_matching(strings, "run", _HEX),
        role="agent" if role == "agent" else "node",
        hardware=_matching(strings, "hw", _HEX, may_be_empty=True),
        ssh=_matching(strings, "ssh", _FINGERPRINT, may_be_empty=True),
        key=key,
        port=port if role == "agent" else 0,
        mesh=_matching(strings, "mesh", _NAME, may_be_empty=True),
        chip=_matching(strings, "chip", _TEXT, may_be_empty=True),
        memory_bytes=_number(strings, "mem", 2**60),
        versions=Versions(
            mlx_mesh=_matching(strings, "ver", _VERSION, may_be_empty=True),
            mlx=_matching(strings, "mlx", _VERSION, may_be_empty=True),
            mlx_lm=_matching(strings, "lm", _VERSION, may_be_empty=True),
            python=_matching(strings, "py", _VERSION, may_be_empty=True),
            protocol=_number(strings, "proto", 10**6),
        ),
        interfaces=interfaces,
    )


def _matching(
    strings: Mapping[str, str], key: str, pattern: re.Pattern[str], *, may_be_empty: bool = False
) -> str:
    value = strings.get(key, "")
    if not value and may_be_empty:
        return ""
    if not pattern.fullmatch(value):
        raise RecordRejected(f"{key}={value[:24]!r}" if value else f"no {key}")
    return value


def _number(strings: Mapping[str, str], key: str, limit: int) -> int:
    text = strings.get(key, "0")
    if not re.fullmatch(r"\d{1,20}", text) or int(text) > limit:
        raise RecordRejected(f"{key}={text[:24]!r}")
    return int(text)


def _parse_interface(text: str) -> HostInterface:
    name, _, rest = text.partition(";")
    link_class, _, addresses = rest.partition(";")
    listed = tuple(addresses.split(","))
    if not _INTERFACE.fullmatch(name) or link_class not in list(LinkClass) or len(listed) > MAX_ADDRESSES:
        raise RecordRejected(f"an interface {text[:40]!r}")
    for address in listed:
        try:
            ip = ipaddress.IPv4Interface(address).ip
        except ValueError:
            raise RecordRejected(f"an interface {text[:40]!r}") from None
        if ip.is_multicast or ip.is_unspecified or ip.is_reserved:
            raise RecordRejected(f"an interface {text[:40]!r}: no host has that address")
    return HostInterface(name=name, link_class=LinkClass(link_class), addresses=listed)


# ---------------------------------------------------------------- what was seen


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """An announcement, and how it came here."""

    announcement: Announcement
    source: Source
    interface: str = ""  # of this host, on which it came; '' = not by multicast
    sender: str = ""  # address it came from
    age_s: float = 0.0  # of one from the cache


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a host can be used. `reason` is one sentence, '' when it can."""

    is_usable: bool
    what: Literal["usable", "self", "duplicate", "version", "stale", "busy"]
    reason: str = ""


class FoundHost(msgspec.Struct, frozen=True, kw_only=True):
    """One host, however many announcements of it were seen, on however many interfaces."""

    name: str
    hardware: str
    ssh: str
    chip: str
    memory_bytes: int
    versions: Versions
    interfaces: tuple[HostInterface, ...]
    seen_on: tuple[str, ...]  # interfaces of this host; () = not by multicast
    source: Source
    verdict: Verdict
    port: int = 0  # of its agent; 0 = none waits there
    key: str = ""  # fingerprint of what its agent shows
    meshes: tuple[str, ...] = ()  # that it says it takes part in
    age_s: float = 0.0  # since it was seen; 0 = just now

    @property
    def addresses(self) -> tuple[str, ...]:
        """Without prefixes, those of better links first."""
        order = {link_class: index for index, link_class in enumerate(LinkClass)}
        return tuple(
            address.partition("/")[0]
            for interface in sorted(self.interfaces, key=lambda each: order[each.link_class])
            for address in interface.addresses
        )


def merge(sightings: Iterable[Sighting], own: Announcement) -> list[FoundHost]:
    """One row per host, by name. `own` is what this host would announce: its versions are those to match.

    Announcements are of one host when they share the process, or an identity and an address. The same
    identity without a common address is two hosts, both refused: one disk or key was copied to the other.
    What the cache has of a host that was seen as well is dropped.
    """
    sightings = list(sightings)
    live: list[list[Sighting]] = []
    for sighting in sightings:
        if sighting.source == "cache":
            continue
        touching = [group for group in live if any(_are_of_one_host(sighting, other) for other in group)]
        live = [group for group in live if group not in touching]
        live.append([each for group in touching for each in group] + [sighting])
    known = [each.announcement for group in live for each in group]
    cached = [
        [each]
        for each in sightings
        if each.source == "cache" and not any(_replaces(other, each.announcement) for other in known)
    ]
    rows = [_row(group, own, _copies(group, live)) for group in [*live, *cached]]
    return sorted(rows, key=lambda row: (row.name, row.addresses))


def _are_of_one_host(one: Sighting, other: Sighting) -> bool:
    a, b = one.announcement, other.announcement
    if a.run == b.run:
        return True
    shares_name = a.host == b.host and not (a.has_identity and b.has_identity)
    return (shares_name or _shares_identity(a, b)) and bool(set(a.addresses) & set(b.addresses))


def _shares_identity(a: Announcement, b: Announcement) -> bool:
    return any(
        mine and mine == theirs for mine, theirs in ((a.hardware, b.hardware), (a.ssh, b.ssh), (a.key, b.key))
    )


def _replaces(live: Announcement, cached: Announcement) -> bool:
    """What the cache has is of this host, perhaps from before its keys were made anew."""
    shares_address = bool(set(live.addresses) & set(cached.addresses))
    return _shares_identity(live, cached) or (live.host == cached.host and shares_address)


def _copies(group: Sequence[Sighting], groups: Sequence[Sequence[Sighting]]) -> list[Announcement]:
    """Of other hosts with the same identity, one announcement each."""
    mine = group[0].announcement
    return [
        other[0].announcement
        for other in groups
        if other is not group and _shares_identity(mine, other[0].announcement)
    ]


def _row(group: Sequence[Sighting], own: Announcement, copies: Sequence[Announcement]) -> FoundHost:
    agents = [each.announcement for each in group if each.announcement.role == "agent"]
    said = agents[-1] if agents else group[-1].announcement
    sources = {each.source for each in group}
    source: Source = "multicast" if "multicast" in sources else "address" if "address" in sources else "cache"
    meshes = {each.announcement.mesh for each in group if each.announcement.mesh and source != "cache"}
    age_s = min(each.age_s for each in group)
    return FoundHost(
        name=said.host,
        hardware=said.hardware,
        ssh=said.ssh,
        chip=said.chip,
        memory_bytes=said.memory_bytes,
        versions=said.versions,
        interfaces=said.interfaces,
        seen_on=tuple(sorted({each.interface for each in group if each.interface})),
        source=source,
        port=said.port,
        key=said.key,
        meshes=tuple(sorted(meshes)),
        age_s=age_s,
        verdict=_judge(said, own, copies, source, age_s, bool(agents), sorted(meshes)),
    )


def _judge(
    said: Announcement,
    own: Announcement,
    copies: Sequence[Announcement],
    source: Source,
    age_s: float,
    has_agent: bool,
    meshes: Sequence[str],
) -> Verdict:
    theirs, ours = set(said.addresses), set(own.addresses)
    shares_identity = _shares_identity(said, own)
    is_own = (bool(theirs) and theirs <= ours) or (shares_identity and bool(theirs & ours))
    if shares_identity and not is_own and source != "cache":
        copies = [*copies, own]
    if copies:
        others = ", ".join(sorted({_place(copy) for copy in copies}))
        return Verdict(
            is_usable=False,
            what="duplicate",
            reason=f"{_place(said)} and {others} have the same {_shared(said, copies[0])}: one was made as a "
            "copy of the other. Give one a new identity (docs/discovery.md says how), or turn one off",
        )
    if is_own:
        return Verdict(is_usable=False, what="self", reason="this host")
    if source == "cache":
        return Verdict(
            is_usable=False, what="stale", reason=f"seen {in_words(age_s)} ago, and does not answer now"
        )
    if different := version_differences(said.versions, own.versions):
        return Verdict(
            is_usable=False,
            what="version",
            reason=f"other versions: {'; '.join(different)}. Install the same ones on both hosts",
        )
    if not has_agent:
        mesh = f"mesh {meshes[0]}" if meshes else "a mesh"
        return Verdict(
            is_usable=False,
            what="busy",
            reason=f"it runs {mesh}, and no `mlx-mesh agent` waits there",
        )
    return Verdict(is_usable=True, what="usable")


def _place(said: Announcement) -> str:
    return f"{said.host} ({said.addresses[0]})" if said.addresses else said.host


def _shared(one: Announcement, other: Announcement) -> str:
    if one.hardware and one.hardware == other.hardware:
        return "hardware UUID"
    return "SSH host key" if one.ssh and one.ssh == other.ssh else "key of mlx-mesh"


def version_differences(theirs: Versions, ours: Versions) -> list[str]:
    """What must be alike and is not, in words."""
    return [
        f"{name} {getattr(theirs, field) or 'none'} there, {getattr(ours, field) or 'none'} here"
        for name, field in (
            ("protocol", "protocol"),
            ("mlx-mesh", "mlx_mesh"),
            ("mlx", "mlx"),
            ("mlx-lm", "mlx_lm"),
        )
        if getattr(theirs, field) != getattr(ours, field)
    ]


def in_words(seconds: float) -> str:
    """A length of time, roughly."""
    for size, unit in ((86400, "day"), (3600, "hour"), (60, "minute")):
        if seconds >= size:
            count = int(seconds // size)
            return f"{count} {unit}{'s' if count > 1 else ''}"
    return f"{seconds:.0f} s"


# ---------------------------------------------------------------- where to knock


class AgentRoute(msgspec.Struct, frozen=True, kw_only=True):
    """How a waiting agent is reached: an address, and the fingerprint of the key that it must show there."""

    address: str
    port: int
    key: str


def meeting_addresses(own: Sequence[HostInterface], host: Sequence[HostInterface]) -> list[str]:
    """The addresses of a host, those first that are on a network of ours, and of these the better links."""
    ours = [ipaddress.IPv4Interface(address).network for each in own for address in each.addresses]
    order = {link_class: index for index, link_class in enumerate(LinkClass)}
    listed = [
        (order[each.link_class], ipaddress.IPv4Interface(address).ip)
        for each in host
        for address in each.addresses
    ]
    listed.sort(key=lambda pair: (not any(pair[1] in network for network in ours), pair[0]))
    return [str(ip) for _, ip in listed]


def common_networks(
    own: Sequence[HostInterface], hosts: Sequence[Sequence[HostInterface]]
) -> list[ipaddress.IPv4Network]:
    """Networks of ours on which every one of the hosts is, too, best links first: what all say to the leader
    goes over one of them."""
    order = {link_class: index for index, link_class in enumerate(LinkClass)}
    return [
        network
        for each in sorted(own, key=lambda each: order[each.link_class])
        for network in (ipaddress.IPv4Interface(address).network for address in each.addresses)
        if all(
            any(
                ipaddress.IPv4Interface(address).ip in network
                for interface in host
                for address in interface.addresses
            )
            for host in hosts
        )
    ]


# ---------------------------------------------------------------- a scan


class Rejected(msgspec.Struct, frozen=True, kw_only=True):
    """Something that came and was not used, so many times."""

    sender: str
    reason: str
    count: int = 1


class InterfaceScan(msgspec.Struct, frozen=True, kw_only=True):
    """What happened on one interface of this host."""

    name: str
    link_class: LinkClass
    evidence: str
    address: str = ""  # from which was asked
    is_used: bool = True
    why_not: str = ""
    error: str = ""  # it was to be used, and could not be
    num_queries: int = 0
    num_answers: int = 0  # datagrams
    hosts: tuple[str, ...] = ()
    rejected: tuple[Rejected, ...] = ()


class AddressScan(msgspec.Struct, frozen=True, kw_only=True):
    """What came of asking one address that was given."""

    address: str
    host: str = ""  # '' = nobody answered
    error: str = ""


class ScanWish(msgspec.Struct, frozen=True, kw_only=True):
    timeout_s: float
    interfaces: tuple[str, ...] = ()  # rules, see `usable_interfaces`


class Scan(msgspec.Struct, frozen=True, kw_only=True):
    """What one scan saw, before anything is made of it."""

    own: Announcement  # what this host would announce
    interfaces: tuple[InterfaceScan, ...]
    sightings: tuple[Sighting, ...]  # with those of the cache
    is_mac: bool


class ScanReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `mlx-mesh discover --json` prints and /v1/cluster/scan answers."""

    host: str  # this one
    at: float  # seconds since 1970
    timeout_s: float
    interfaces: tuple[InterfaceScan, ...]
    hosts: tuple[FoundHost, ...]
    addresses: tuple[AddressScan, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def others(self) -> list[FoundHost]:
        """Without this host."""
        return [host for host in self.hosts if host.verdict.what != "self"]


def report(
    own: Announcement,
    interfaces: Sequence[InterfaceScan],
    sightings: Sequence[Sighting],
    addresses: Sequence[AddressScan] = (),
    *,
    at: float,
    timeout_s: float,
    is_mac: bool,
) -> ScanReport:
    """All of a scan together."""
    hosts = merge(sightings, own)
    return ScanReport(
        host=own.host,
        at=at,
        timeout_s=timeout_s,
        interfaces=tuple(interfaces),
        hosts=tuple(hosts),
        addresses=tuple(addresses),
        advice=tuple(advise(interfaces, hosts, is_mac=is_mac)),
    )


def advise(interfaces: Sequence[InterfaceScan], hosts: Sequence[FoundHost], *, is_mac: bool) -> list[str]:
    """What to do when nobody was seen; [] when somebody was."""
    if any(host.verdict.what != "self" and host.source != "cache" for host in hosts):
        return []
    used = [each for each in interfaces if each.is_used]
    lines = []
    if not used:
        lines.append(
            "No interface of this host can be used: plug in a cable or join a network, and see why not above."
        )
    elif all(each.error for each in used):
        lines.append("Nothing could be sent on any interface.")
    else:
        lines.append("Nobody else answered. On each other host run `mlx-mesh agent`, and leave it running.")
    if is_mac:
        lines.append(
            "macOS asks before a program may use the local network: System Settings > Privacy & Security > "
            "Local Network, switch on your terminal (switch it off and on again after an update)."
        )
    if any(each.link_class is LinkClass.WIFI for each in used):
        lines.append(
            "Many Wi-Fi networks keep their clients apart (guest networks, `client isolation`) or drop "
            "multicast: use a cable, or another network."
        )
    lines.append(
        "Without multicast: `mlx-mesh discover --address HOST` asks one host by its name or address, and a "
        "hostfile (`mlx-mesh up hosts.yaml`) needs no discovery at all."
    )
    return lines
