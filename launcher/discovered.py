"""Hosts found on the network: a scan of this host, the agents at addresses that are known or given, and a
mesh made of those that let this launcher in. A lone host is never taken for a mesh.
"""

from __future__ import annotations

import ipaddress
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.paired import greet
from mlx_mesh.launcher.pairing import SECRET_VARIABLE, check_secret
from mlx_mesh.launcher.pairings import Pairings
from mlx_mesh.launcher.remote import LocalHost
from mlx_mesh.mesh.discovery import (
    AGENT_PORT,
    MAX_SCAN_S,
    MIN_SCAN_S,
    SCAN_S,
    AddressScan,
    AgentRoute,
    FoundHost,
    RecordRejected,
    Scan,
    ScanReport,
    ScanWish,
    Sighting,
    common_networks,
    in_words,
    meeting_addresses,
    parse_txt,
    report,
)
from mlx_mesh.mesh.errors import MeshError, PreflightError, SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.hostfile import Hostfile
from mlx_mesh.mesh.interfaces import check_rules

SCAN_MARGIN_S = 30.0  # the child's start, and asking the system for its interfaces
GREET_S = 2.0
MAX_ADDRESSES = 64

MESH_NAME = "discovered"


@dataclass(frozen=True, slots=True)
class Look:
    """Where to look, and for how long."""

    timeout_s: float = SCAN_S
    interfaces: tuple[str, ...] = ()  # rules like en5, en* and ^en0; () = all that lead to other hosts
    addresses: tuple[str, ...] = ()  # HOST or HOST:PORT, asked without multicast


def look(at: Look, environment: Mapping[str, str]) -> ScanReport:
    """One scan. Raises SettingsError, or MeshError when this host cannot be asked."""
    return look_closely(at, environment)[0]


def paired_keys(environment: Mapping[str, str]) -> list[str]:
    """Fingerprints of the hosts that this launcher trusts."""
    return [host.key for host in Pairings(environment).hosts()]


def look_closely(at: Look, environment: Mapping[str, str]) -> tuple[ScanReport, Scan]:
    """One scan, and what it was made of."""
    if not MIN_SCAN_S <= at.timeout_s <= MAX_SCAN_S:
        raise SettingsError(
            f"Looking for {at.timeout_s:g} s is out of range; it takes {MIN_SCAN_S:g} to {MAX_SCAN_S:g} s."
        )
    for problem in check_rules(at.interfaces):
        raise SettingsError(f"--interface {problem}.")
    given = [split_address(address) for address in at.addresses]
    with ThreadPoolExecutor(2) as pool:
        answers = pool.submit(_greet_all, given)
        scan = _scan(at, environment)
        asked = answers.result()
    seen = {sighting.announcement.key for sighting in scan.sightings if sighting.source != "cache"}
    seen |= {sighting.announcement.key for _, sighting in asked if sighting is not None}
    known = [place for place in _known_places(scan, Pairings(environment)) if place[2] not in seen]
    again = [sighting for _, sighting in _greet_all([place[:2] for place in known]) if sighting is not None]
    sightings = [*scan.sightings, *(sighting for _, sighting in asked if sighting is not None), *again]
    made = report(
        scan.own,
        scan.interfaces,
        sightings,
        [told for told, _ in asked],
        at=round(time.time(), 3),
        timeout_s=at.timeout_s,
        is_mac=scan.is_mac,
    )
    return made, scan


def _scan(at: Look, environment: Mapping[str, str]) -> Scan:
    """By the node's own scanner: it alone knows this host's interfaces."""
    wish = ScanWish(timeout_s=at.timeout_s, interfaces=at.interfaces)
    words = [sys.executable, "-I", "-u", "-m", "mlx_mesh.node.scan"]
    local = LocalHost("this host", environment)
    found: list[bytes] = []
    said: list[str] = []

    def on_line(stream: str, line: str) -> None:
        if stream == "stdout" and line.startswith("{"):
            found.append(line.encode())
        else:
            said.append(line)

    process = local.start(words, on_line, lambda exit: None)
    process.send(msgspec.json.encode(wish) + b"\n")
    try:
        ended = process.wait(at.timeout_s + SCAN_MARGIN_S)
    finally:
        process.close_stdin()
        process.kill()
    if ended is None or not found:
        words_of_it = " | ".join(said[-3:]) or str(ended or "no answer in time")
        raise MeshError(f"This host cannot look at its network: {words_of_it}")
    return msgspec.json.decode(found[-1], type=Scan)


def split_address(text: str) -> tuple[str, int]:
    """HOST or HOST:PORT. Raises SettingsError."""
    host, colon, port = text.partition(":")
    if not host or (colon and not (port.isdigit() and 0 < int(port) < 65536)) or len(text) > 255:
        raise SettingsError(f"--address {text!r} is not HOST or HOST:PORT (IPv4 or a name).")
    return host, int(port) if colon else AGENT_PORT


def _known_places(scan: Scan, pairings: Pairings) -> list[tuple[str, int, str]]:
    """Address, port and key of agents that were there once."""
    places: dict[tuple[str, int, str], None] = {}
    for host in pairings.hosts():
        for address in host.addresses[:2]:
            places[address, host.port, host.key] = None
    for sighting in scan.sightings:
        said = sighting.announcement
        if sighting.source == "cache" and said.port:
            for address in meeting_addresses(scan.own.interfaces, said.interfaces)[:2]:
                places[address, said.port, said.key] = None
    return list(places)[:MAX_ADDRESSES]


def _greet_all(places: Sequence[tuple[str, int]]) -> list[tuple[AddressScan, Sighting | None]]:
    if not places:
        return []
    with ThreadPoolExecutor(min(16, len(places))) as pool:
        return list(pool.map(lambda place: _greet_one(*place), places))


def _greet_one(address: str, port: int) -> tuple[AddressScan, Sighting | None]:
    place = f"{address}:{port}"
    try:
        greeting = greet(address, address, port, GREET_S)
        said = parse_txt(greeting.hello.strings, port)
        if said.key != greeting.key:
            raise RecordRejected("it announces another key than the one it shows")
    except HostFault as fault:
        return AddressScan(address=place, error=f"{fault.seen}; {fault.fix}"), None
    except RecordRejected as problem:
        return AddressScan(address=place, error=f"what it says is not used: {problem}"), None
    return AddressScan(address=place, host=said.host), Sighting(
        announcement=said, source="address", sender=address
    )


# ---------------------------------------------------------------- a mesh of them


@dataclass(frozen=True, slots=True)
class Wanted:
    """What `up --discover` asks for."""

    look: Look
    num_hosts: int | None = None  # with this one; None = all that can be used, at least two
    with_this_host: bool = True


def find_mesh(wanted: Wanted, environment: Mapping[str, str], say: Callable[[str], None]) -> Hostfile:
    """A hostfile of hosts that let this launcher in. Raises PreflightError, with a line for everything that
    was found, when that is not enough."""
    if wanted.num_hosts is not None and wanted.num_hosts < (2 if wanted.with_this_host else 1):
        raise SettingsError(
            f"--hosts {wanted.num_hosts}: a mesh of discovered hosts has this one and at least one more; "
            "`mlx-mesh serve` serves from this one alone."
        )
    say(f"Looking for hosts ({wanted.look.timeout_s:g} s) ...")
    made, scan = look_closely(wanted.look, environment)
    pairings = Pairings(environment)
    paired = {host.key for host in pairings.hosts()}
    has_secret = bool(check_secret(environment.get(SECRET_VARIABLE, "")))
    usable, others = [], []
    for host in made.others:
        problem = _why_not(host, paired, has_secret)
        if problem:
            others.append(f"{_told(host)}: {problem}")
        else:
            usable.append(host)
    num_here = int(wanted.with_this_host)
    least = wanted.num_hosts or max(2, num_here + 1)
    if len(usable) + num_here < least:
        raise PreflightError("\n".join([_too_few(wanted, usable, least), *others, *made.advice]))
    for line in others:
        say(f"left out {line}")
    chosen = _choose(usable, (wanted.num_hosts or len(usable) + num_here) - num_here)
    for host in usable:
        if host not in chosen:
            say(f"left out {_told(host)}: --hosts {wanted.num_hosts} are enough")
    entries = [HostEntry(name=scan.own.host)] if wanted.with_this_host else []
    taken = {entry.name for entry in entries}
    for host, address in zip(chosen, _addresses(scan, chosen), strict=True):
        name = _free_name(host.name, taken)
        taken.add(name)
        route = AgentRoute(address=address, port=host.port, key=host.key)
        entries.append(HostEntry(name=name, python="python3", agent=route))
        _keep_addresses(pairings, host, address)
    told = ", ".join(f"{entry.name} ({entry.agent.address})" for entry in entries if entry.agent)
    say(f"Found {told}.")
    return Hostfile(source="", name=MESH_NAME, hosts=tuple(entries))


def _why_not(host: FoundHost, paired: set[str], has_secret: bool) -> str:
    """A sentence; '' = it can take part."""
    if not host.verdict.is_usable:
        return host.verdict.reason
    if host.key not in paired and not has_secret:
        return (
            f"not paired with this launcher: run `mlx-mesh agent --pair` there, then here `mlx-mesh discover "
            f"--pair {host.name}`"
        )
    return ""


def _too_few(wanted: Wanted, usable: Sequence[FoundHost], least: int) -> str:
    here = "this one" if wanted.with_this_host else "none here"
    found = ", ".join([here, *(_told(host) for host in usable)])
    asked = f"--hosts {least}" if wanted.num_hosts else f"a mesh needs at least {least}"
    num = len(usable) + int(wanted.with_this_host)
    return (
        f"{num} of {least} hosts can be used ({asked}) after {wanted.look.timeout_s:g} s of looking "
        f"(--discover-timeout): {found}. Nothing was started."
    )


def _told(host: FoundHost) -> str:
    age = f", {in_words(host.age_s)} ago" if host.source == "cache" else ""
    return f"{host.name} ({', '.join(host.addresses[:2])}{age})"


def _choose(usable: Sequence[FoundHost], count: int) -> list[FoundHost]:
    """So many, those with most memory first; in the order of their names."""
    best = sorted(usable, key=lambda host: (-host.memory_bytes, host.name))[:count]
    return [host for host in usable if host in best]


def _addresses(scan: Scan, hosts: Sequence[FoundHost]) -> list[str]:
    """Where each is reached: on one network for all if there is one, as they reach the leader there, too."""
    common = common_networks(scan.own.interfaces, [host.interfaces for host in hosts])
    chosen = []
    for host in hosts:
        addresses = meeting_addresses(scan.own.interfaces, host.interfaces)
        if common:
            addresses.sort(key=lambda address: ipaddress.IPv4Address(address) not in common[0])
        chosen.append(addresses[0])
    return chosen


def _free_name(name: str, taken: set[str]) -> str:
    number = 2
    free = name
    while free in taken:
        free, number = f"{name[:58]}-{number}", number + 1
    return free


def _keep_addresses(pairings: Pairings, host: FoundHost, address: str) -> None:
    """So that it is found again without multicast."""
    for kept in pairings.hosts():
        if kept.key == host.key:
            addresses = tuple(dict.fromkeys([address, *host.addresses]))[:4]
            pairings.keep_host(
                msgspec.structs.replace(kept, name=host.name, addresses=addresses, port=host.port)
            )
