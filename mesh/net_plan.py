"""Addresses for Thunderbolt cables: which each end gets, by which commands, and how to undo them. Pure.

Each cable is a network of its own, a /30, in a range that no host has an address or a route in: ports of one
subnet would hide each other, and a range that a home network or a VPN uses would hide that. macOS keeps
settings by network service, so each port gets one; a port of Thunderbolt Bridge has to leave it first.
"""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Iterator, Sequence
from ipaddress import IPv4Network

import msgspec

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.interfaces import LINK_LOCAL, Interface, LinkClass
from mlx_mesh.mesh.macos import NetworkService

SERVICE_PREFIX = "mlx-mesh "
"""Of the names of services that were made for a mesh: they can be told from anybody else's."""

BRIDGE_SERVICE = "Thunderbolt Bridge"

_PREFIX_LENGTH = 30
_NETMASK = "255.255.255.252"

_RANGES = (
    *(f"10.{second}.77.0/24" for second in range(201, 255)),
    *(f"172.{second}.77.0/24" for second in range(20, 32)),
    *(f"192.168.{third}.0/24" for third in range(200, 255)),
)
"""Where addresses are looked for, first to last: far from what routers, VPNs and containers begin with."""


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One command on one host, to be run with sudo, and the one that takes it back."""

    words: tuple[str, ...]
    undo: tuple[str, ...]
    why: str

    @property
    def command(self) -> str:
        return shlex.join(("sudo", *self.words))

    @property
    def undo_command(self) -> str:
        return shlex.join(("sudo", *self.undo))


class HostSteps(msgspec.Struct, frozen=True, kw_only=True):
    host: str
    steps: tuple[Step, ...] = ()


class CablePlan(msgspec.Struct, frozen=True, kw_only=True):
    """One cable and the network on it. `is_in_place`: both ends have their addresses already."""

    hosts: tuple[str, str]
    interfaces: tuple[str, str]
    addresses: tuple[str, str]  # with prefix, as in "10.201.77.1/30"
    is_in_place: bool = False

    def __str__(self) -> str:
        ends = [f"{h} {i} {a}" for h, i, a in zip(self.hosts, self.interfaces, self.addresses, strict=True)]
        return f"{ends[0]} - {ends[1]}" + (" (in place)" if self.is_in_place else "")


class NetPlan(msgspec.Struct, frozen=True, kw_only=True):
    cables: tuple[CablePlan, ...] = ()
    hosts: tuple[HostSteps, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_done(self) -> bool:
        return not any(host.steps for host in self.hosts)


Host = tuple[str, HostReport]
_End = tuple[int, Interface]  # index of the host, its port


def plan_network(hosts: Sequence[Host]) -> NetPlan:
    """For hosts, (name, report) each. Raises BringUpError when no free range is left."""
    notes = [
        f"{name} is no Mac: set up its links with its own system's tools"
        for name, report in hosts
        if report.facts.system != "Darwin"
    ]
    cables = list(_cables(hosts))
    if not cables:
        notes.append("no Thunderbolt cable joins two of these hosts directly (behind a dock none is seen)")
    taken = _taken(hosts, {(index, port.name) for cable in cables for index, port in cable})
    kept = [_in_place(hosts, cable) for cable in cables]
    taken += [ipaddress.IPv4Interface(one).network for one, _ in filter(None, kept)]
    plans: list[CablePlan] = []
    steps: list[list[Step]] = [[] for _ in hosts]
    for cable, existing in zip(cables, kept, strict=True):
        addresses = existing or _free_pair(taken)
        if existing is None:
            taken.append(ipaddress.IPv4Interface(addresses[0]).network)
            for (index, port), address in zip(cable, addresses, strict=True):
                steps[index] += _address_steps(hosts[index][1], port, address)
        plans.append(
            CablePlan(
                hosts=(hosts[cable[0][0]][0], hosts[cable[1][0]][0]),
                interfaces=(cable[0][1].name, cable[1][1].name),
                addresses=addresses,
                is_in_place=existing is not None,
            )
        )
    for index, (name, report) in enumerate(hosts):
        bridge = _bridge_step(report) if any(i == index for cable in cables for i, _ in cable) else None
        if bridge is not None:
            steps[index].insert(0, bridge)
            notes += _bridge_notes(name, report)
    return NetPlan(
        cables=tuple(plans),
        hosts=tuple(
            HostSteps(host=name, steps=tuple(own)) for (name, _), own in zip(hosts, steps, strict=True)
        ),
        notes=tuple(notes),
    )


def plan_undo(hosts: Sequence[Host]) -> NetPlan:
    """What takes a plan back where nobody noted what was done: services that were made for a mesh go, and
    Thunderbolt Bridge comes back where one was made."""
    planned = []
    for name, report in hosts:
        ours = [service for service in report.services if service.name.startswith(SERVICE_PREFIX)]
        steps = [
            Step(
                words=("networksetup", "-removenetworkservice", service.name),
                undo=("networksetup", "-createnetworkservice", service.name, service.port),
                why=f"the service was made for a mesh, on {service.device}",
            )
            for service in ours
        ]
        bridge = _service_of(report, BRIDGE_SERVICE)
        if ours and bridge is not None and not bridge.is_enabled:
            steps.append(
                Step(
                    words=("networksetup", "-setnetworkserviceenabled", bridge.name, "on"),
                    undo=("networksetup", "-setnetworkserviceenabled", bridge.name, "off"),
                    why="it was switched off for the mesh",
                )
            )
        planned.append(HostSteps(host=name, steps=tuple(steps)))
    return NetPlan(hosts=tuple(planned))


# ---------------------------------------------------------------- cables and what they have


def _cables(hosts: Sequence[Host]) -> Iterator[tuple[_End, _End]]:
    """Pairs of ports of two different hosts, in the order of hosts and of the first one's ports."""
    theirs = {
        port.own_id: (index, port)
        for index, (_, report) in enumerate(hosts)
        for port in report.facts.interfaces
        if port.own_id
    }
    for index, (_, report) in enumerate(hosts):
        for port in sorted(report.facts.interfaces, key=_port_order):
            peer = theirs.get(port.peer_id) if port.own_id and port.peer_id else None
            if peer is not None and peer[0] > index and peer[1].peer_id == port.own_id:
                yield (index, port), peer


def _port_order(port: Interface) -> tuple[int, str]:
    """en10 after en9."""
    digits = "".join(character for character in port.name if character.isdigit())
    return int(digits or 0), port.name


def _in_place(hosts: Sequence[Host], cable: tuple[_End, _End]) -> tuple[str, str] | None:
    """Addresses that the two ends have and that work: one subnet, on no other interface of either host."""
    (_, here), (_, there) = cable
    if here.bridge or there.bridge:
        return None
    for one in here.addresses:
        for other in there.addresses:
            own, peer = ipaddress.ip_interface(one), ipaddress.ip_interface(other)
            if own.ip in LINK_LOCAL or own.network != peer.network or own.ip == peer.ip:
                continue
            if not any(
                ipaddress.ip_interface(text).network.overlaps(own.network)
                for index, port in cable
                for interface in hosts[index][1].facts.interfaces
                if interface.name != port.name
                for text in interface.addresses
            ):
                return one, other
    return None


def _taken(hosts: Sequence[Host], planned: set[tuple[int, str]]) -> list[IPv4Network]:
    """Networks of all hosts' addresses and routes. Default routes, and halves of everything, with which VPNs
    stand in for one, take nothing: any other route wins over them. What the planned ports have now is given
    up, unless it is kept."""
    found = []
    for index, (_, report) in enumerate(hosts):
        found += [
            ipaddress.IPv4Interface(text).network
            for interface in report.facts.interfaces
            if (index, interface.name) not in planned
            for text in interface.addresses
        ]
        found += [
            IPv4Network(route.network)
            for route in report.routes
            if (index, route.interface) not in planned and IPv4Network(route.network).prefixlen > 1
        ]
    return found


def _free_pair(taken: Sequence[IPv4Network]) -> tuple[str, str]:
    """Both addresses of the first network that overlaps nothing."""
    for text in _RANGES:
        block = IPv4Network(text)
        if any(block.subnet_of(network) for network in taken):
            continue
        for network in block.subnets(new_prefix=_PREFIX_LENGTH):
            if not any(network.overlaps(other) for other in taken):
                one, other = network.hosts()
                return f"{one}/{_PREFIX_LENGTH}", f"{other}/{_PREFIX_LENGTH}"
    raise BringUpError(
        "no private range is free for the cables: the hosts have addresses or routes in all of "
        f"{_RANGES[0]} to {_RANGES[-1]}. Disconnect the VPN that covers them, or set addresses by hand."
    )


# ---------------------------------------------------------------- commands


def _address_steps(report: HostReport, port: Interface, address: str) -> list[Step]:
    """A service for the port, unless it has one, and its address."""
    own = [s for s in report.services if s.device == port.name]
    ours = next((s for s in own if s.name.startswith(SERVICE_PREFIX)), None)
    service = ours or next((s for s in own if s.is_enabled), None)
    ip = address.partition("/")[0]
    steps = []
    if service is None:
        name = f"{SERVICE_PREFIX}{port.name}"
        steps.append(
            Step(
                words=("networksetup", "-createnetworkservice", name, port.evidence),
                undo=("networksetup", "-removenetworkservice", name),
                why=f"macOS keeps addresses by service, and {port.name} has none",
            )
        )
        undo: tuple[str, ...] = ("networksetup", "-setv4off", name)
    else:
        name = service.name
        undo = _undo_address(service, port)
    steps.append(
        Step(
            words=("networksetup", "-setmanual", name, ip, _NETMASK),
            undo=undo,
            why=f"{port.name}'s end of the cable",
        )
    )
    return steps


def _undo_address(service: NetworkService, port: Interface) -> tuple[str, ...]:
    """Back to the address that the port has now; a self-assigned one, or none, comes from DHCP's failure."""
    for text in port.addresses:
        interface = ipaddress.ip_interface(text)
        if interface.ip not in LINK_LOCAL:
            return ("networksetup", "-setmanual", service.name, str(interface.ip), str(interface.netmask))
    return ("networksetup", "-setdhcp", service.name)


def _bridge_step(report: HostReport) -> Step | None:
    """Thunderbolt Bridge switched off, while it holds a port."""
    held = [i for i in report.facts.interfaces if i.bridge and i.link_class is LinkClass.THUNDERBOLT]
    if not held:
        return None
    service = next((s for s in report.services if s.device == held[0].bridge), None)
    name = service.name if service is not None else BRIDGE_SERVICE
    return Step(
        words=("networksetup", "-setnetworkserviceenabled", name, "off"),
        undo=("networksetup", "-setnetworkserviceenabled", name, "on"),
        why=f"{', '.join(i.name for i in held)} are members of {held[0].bridge}",
    )


def _bridge_notes(name: str, report: HostReport) -> Iterator[str]:
    bridges = {
        i.bridge for i in report.facts.interfaces if i.bridge and i.link_class is LinkClass.THUNDERBOLT
    }
    for bridge in sorted(bridges.intersection(report.dhcp)):
        yield f"{name}: {bridge} holds a DHCP lease, which goes with the bridge"
    if any(route.network == "0.0.0.0/0" and route.interface in bridges for route in report.routes):
        yield f"{name}: its default route goes over the bridge; see first that it has another way out"


def _service_of(report: HostReport, name: str) -> NetworkService | None:
    return next((service for service in report.services if service.name == name), None)
