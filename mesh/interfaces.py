"""What kind of link each network interface of a host is. Pure.

The class comes from the hardware port behind an interface, never from its name's number or its address: en0
is Wi-Fi on a laptop and Ethernet on a Mac Studio, and a self-assigned 169.254 address may belong to any of
them.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from mlx_mesh.mesh.macos import IfconfigEntry, ThunderboltPort

LINK_LOCAL = ipaddress.ip_network("169.254.0.0/16")

FOREIGN = re.compile(
    r"^(awdl|llw|utun|ipsec|ppp|gif|stf|anpi|ap\d|vmnet|vnic|feth|tun|tap|wg|tailscale|zt|docker|br-|virbr|veth"
    r"|bridge[1-9]\d\d)"
)
"""Interfaces that lead to no other host of ours: Apple's peer-to-peer links, tunnels, VPNs, virtual machines
and containers (macOS numbers the bridges of shared internet and virtual machines from 100)."""


class LinkClass(StrEnum):
    """Best first; FOREIGN is never used."""

    THUNDERBOLT = "thunderbolt"
    ETHERNET = "ethernet"
    WIFI = "wifi"
    LOOPBACK = "loopback"
    FOREIGN = "foreign"


_ORDER = tuple(LinkClass)


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One interface of one host. `evidence` says in words why it has its class."""

    name: str
    link_class: LinkClass
    evidence: str
    addresses: tuple[str, ...] = ()  # IPv4 with prefix, as in "10.0.0.2/24"
    is_active: bool = True  # has a carrier
    mtu: int = 0
    mbits: int = 0  # nominal rate; 0 = not known
    bridge: str = ""  # of which it is a member
    own_id: str = ""  # Thunderbolt: domain of this end of the cable
    peer_id: str = ""  # and of the other; '' = no host there
    generation: int = 0  # of Thunderbolt: 5, or 4 for all before; 0 = not Thunderbolt, or not known
    rdma: str = ""  # its RDMA device

    @property
    def rank(self) -> tuple[int, int]:
        """Sorts the best first: by class, then by rate."""
        return _ORDER.index(self.link_class), -self.mbits

    @property
    def what(self) -> str:
        """As people know it: "en2 (Thunderbolt 1)"."""
        return f"{self.name} ({self.evidence})"


_RULE = re.compile(r"\^?[A-Za-z0-9.*?_\[\]-]+")


def check_rules(rules: Sequence[str]) -> list[str]:
    """What is wrong with rules about interfaces, with the fix: names, `*` for any characters, `^` in front of
    what is not to be used."""
    return [
        f"`{rule}` is no interface; write a name like en5 or en*, and ^en0 for one that is not to be used"
        for rule in rules
        if not _RULE.fullmatch(rule)
    ]


def is_allowed(name: str, rules: Sequence[str]) -> bool:
    """By the rules, an interface of that name may carry data: it is one of those named, if any are, and none
    of those with ^."""
    wanted = [rule for rule in rules if not rule.startswith("^")]
    return (not wanted or any(fnmatch.fnmatchcase(name, rule) for rule in wanted)) and not any(
        fnmatch.fnmatchcase(name, rule[1:]) for rule in rules if rule.startswith("^")
    )


def unknown_names(interfaces: Sequence[Interface], rules: Sequence[str]) -> list[str]:
    """Rules that name what a host does not have, as after a typing mistake."""
    return [
        rule
        for rule in rules
        if not rule.startswith("^") and not any(fnmatch.fnmatchcase(i.name, rule) for i in interfaces)
    ]


def is_foreign(name: str) -> bool:
    """By its name, no link to another host of ours."""
    return FOREIGN.match(name) is not None


def mac_interfaces(
    entries: Sequence[IfconfigEntry],
    ports: Mapping[str, str],
    thunderbolt: Sequence[ThunderboltPort],
    rdma_devices: Sequence[str],
) -> tuple[Interface, ...]:
    """Of `ifconfig`, the hardware ports, the Thunderbolt receptacles and the RDMA devices.

    An interface without a hardware port is foreign unless it is the loopback. A Thunderbolt bridge is a
    Thunderbolt link; its members are, too, and name it.
    """
    bridges = {member: entry.name for entry in entries for member in entry.members}
    receptacles = {f"Thunderbolt {port.receptacle}": port for port in thunderbolt}
    return tuple(
        _mac_interface(
            entry, ports.get(entry.name, ""), receptacles, bridges.get(entry.name, ""), rdma_devices
        )
        for entry in entries
    )


def _mac_interface(
    entry: IfconfigEntry,
    port: str,
    receptacles: Mapping[str, ThunderboltPort],
    bridge: str,
    rdma_devices: Sequence[str],
) -> Interface:
    link_class, evidence = _mac_class(entry, port)
    receptacle = receptacles.get(port)
    device = f"rdma_{entry.name}"
    return Interface(
        name=entry.name,
        link_class=link_class,
        evidence=evidence,
        addresses=entry.addresses,
        is_active=entry.is_active,
        mtu=entry.mtu,
        mbits=receptacle.gbits * 1000 if receptacle and receptacle.is_connected else entry.mbits,
        bridge=bridge,
        own_id=receptacle.own_id if receptacle else "",
        peer_id=receptacle.peer_id if receptacle else "",
        generation=receptacle.generation if receptacle else 0,
        rdma=device if device in rdma_devices else "",
    )


def _mac_class(entry: IfconfigEntry, port: str) -> tuple[LinkClass, str]:
    if "LOOPBACK" in entry.flags or entry.name.startswith("lo"):
        return LinkClass.LOOPBACK, "loopback"
    if is_foreign(entry.name):
        return LinkClass.FOREIGN, "not a link between hosts"
    if not port:
        return LinkClass.FOREIGN, "no hardware port"
    if port.startswith("Thunderbolt Ethernet"):  # an adapter on a Thunderbolt plug
        return LinkClass.ETHERNET, port
    if port.startswith("Thunderbolt"):
        return LinkClass.THUNDERBOLT, port
    if port.startswith(("Wi-Fi", "AirPort")):
        return LinkClass.WIFI, port
    if "Ethernet" in port or "LAN" in port:
        return LinkClass.ETHERNET, port
    return LinkClass.FOREIGN, f"{port}: not a kind that is known"


class LinuxEntry(msgspec.Struct, frozen=True, kw_only=True):
    """What /sys/class/net and the kernel say of one interface."""

    name: str
    addresses: tuple[str, ...] = ()
    is_loopback: bool = False
    is_wireless: bool = False
    driver: str = ""  # '' = no device behind it
    is_active: bool = True
    mtu: int = 0
    mbits: int = 0


def linux_interface(entry: LinuxEntry) -> Interface:
    """An interface without a device (a container's, a namespace's) counts as Ethernet unless its name says
    that it leads elsewhere."""
    if entry.is_loopback:
        link_class, evidence = LinkClass.LOOPBACK, "loopback"
    elif is_foreign(entry.name):
        link_class, evidence = LinkClass.FOREIGN, "not a link between hosts"
    elif entry.is_wireless:
        link_class, evidence = LinkClass.WIFI, f"wireless, driver {entry.driver or 'unknown'}"
    elif entry.driver.startswith("thunderbolt"):
        link_class, evidence = LinkClass.THUNDERBOLT, f"driver {entry.driver}"
    else:
        link_class, evidence = LinkClass.ETHERNET, f"driver {entry.driver}" if entry.driver else "virtual"
    return Interface(
        name=entry.name,
        link_class=link_class,
        evidence=evidence,
        addresses=entry.addresses,
        is_active=entry.is_active,
        mtu=entry.mtu,
        mbits=entry.mbits,
    )
