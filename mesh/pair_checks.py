"""What is wrong between two neighbouring hosts, and what to do about it. Pure.

In the ring each rank dials the next one, so the pairs that have to meet are those of hosts that follow each
other. First what their interfaces tell, then what came of really dialling.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Sequence

import msgspec

from mlx_mesh.mesh.doctor import CLOCK_S, Area, Examined, Finding, Level
from mlx_mesh.mesh.hostfile_text import cable_between
from mlx_mesh.mesh.interfaces import LINK_LOCAL, Interface, LinkClass, is_allowed
from mlx_mesh.mesh.link_plan import PairLink, links_between

FIREWALL_TOOL = "/usr/libexec/ApplicationFirewall/socketfilterfw"


class PairHost(msgspec.Struct, frozen=True, kw_only=True):
    """One host with what the hostfile says of its links."""

    examined: Examined
    rules: tuple[str, ...] = ()  # about interfaces
    addresses: tuple[str, ...] = ()  # the user's

    @property
    def name(self) -> str:
        return self.examined.name

    @property
    def interfaces(self) -> tuple[Interface, ...]:
        return tuple(i for i in self.examined.report.facts.interfaces if is_allowed(i.name, self.rules))


class Dialled(msgspec.Struct, frozen=True, kw_only=True):
    """What came of one host's dialling another one's listener, from the interpreters that ranks would use."""

    error: str = ""  # symbol, like ECONNREFUSED; '' = they met
    said: str = ""  # the system's words
    has_route: bool = True  # the dialling host's system knows where the address would be
    not_listening: str = ""  # why there was no listener


Ring = Sequence[PairHost | None]
"""Hosts in rank order; None = one that did not answer."""


def neighbours(ring: Ring) -> Iterator[tuple[PairHost, PairHost]]:
    """(dials, listens), each host once as the listening one, of those that answered."""
    for index, listens in enumerate(ring):
        dials = ring[index - 1]
        if dials is not None and listens is not None and dials is not listens:
            yield dials, listens


def chosen_link(dials: PairHost, listens: PairHost) -> PairLink | None:
    """The link that a ring would use, Wi-Fi only where nothing else is; None = none that is known."""
    ends = (dials.name, dials.interfaces), (listens.name, listens.interfaces)
    links = links_between(*ends, allow_wifi=False) or links_between(*ends, allow_wifi=True)
    if listens.addresses:
        links = [link for link in links if link.listens.address == listens.addresses[0]]
    return links[0] if links else None


def pair_findings(ring: Ring) -> list[Finding]:
    """One line per check and pair; each pair once."""
    pairs = {frozenset((one.name, other.name)): (one, other) for one, other in neighbours(ring)}
    return [
        Finding(
            host=f"{one.name} - {other.name}",
            check=check,
            area=area,
            level=level,
            evidence=evidence,
            fix=fix,
        )
        for one, other in (sorted(pair, key=ring.index) for pair in pairs.values())
        for check, area, (level, evidence, fix) in (
            ("link", Area.NETWORK, _link(one, other)),
            ("cable", Area.NETWORK, _cable(one, other)),
            ("pair mtu", Area.NETWORK, _mtu(one, other)),
            ("pair clock", Area.MACHINE, _clock(one, other)),
        )
    ]


_Seen = tuple[Level, str, str]


def _link(one: PairHost, other: PairHost) -> _Seen:
    link = chosen_link(one, other)
    if link is not None and link.link_class is LinkClass.WIFI:
        seen = f"Wi-Fi is all that they have in common ({link.dials.address}, {link.listens.address})"
        return Level.FAIL, seen, "join them by a cable, or start with --allow-wifi"
    if link is not None:
        return Level.OK, str(link), ""
    if one.addresses or other.addresses:
        return Level.OK, "as `addresses` says", ""
    return (
        Level.WARN,
        "they have no subnet in common; the addresses by which they are reached are used, as behind a router",
        "join them by a cable and run `mlx-mesh net plan`, or give `addresses`",
    )


def _cable(one: PairHost, other: PairHost) -> _Seen:
    ends = cable_between(one.interfaces, other.interfaces)
    if ends is None:
        return Level.OK, "no Thunderbolt cable between them", ""
    here, there = ends
    what = f"{one.name} {here.name} - {other.name} {there.name}"
    link = chosen_link(one, other)
    if link is not None and link.link_class is LinkClass.THUNDERBOLT:
        return Level.OK, what, ""
    nets = [_routable(end) for end in ends]
    if all(nets) and not (here.bridge or there.bridge):
        seen = f"the ends of the cable {what} are in different subnets, {nets[0]} and {nets[1]}"
        return Level.FAIL, seen, "`mlx-mesh net plan` gives them one"
    used = f"{link.link_class} is used" if link is not None else "it is not used"
    return Level.WARN, f"the cable {what} has no addresses at both ends; {used}", "`mlx-mesh net plan`"


def _routable(end: Interface) -> str:
    """Networks of an end that are not self-assigned, in words."""
    found = [ipaddress.ip_interface(text) for text in end.addresses]
    return ", ".join(str(i.network) for i in found if i.ip not in LINK_LOCAL)


def _mtu(one: PairHost, other: PairHost) -> _Seen:
    link = chosen_link(one, other)
    if link is None:
        return Level.OK, "no link to compare", ""
    mtus = {
        host.name: next((i.mtu for i in host.interfaces if i.name == name), 0)
        for host, name in ((one, link.dials.interface), (other, link.listens.interface))
    }
    if len(set(mtus.values())) > 1 and all(mtus.values()):
        told = " and ".join(f"{mtu} on {name}" for name, mtu in mtus.items())
        return (
            Level.WARN,
            f"the link has MTU {told}",
            "set the same on both ends, else large packets are lost",
        )
    return Level.OK, f"{next(iter(mtus.values()))} at both ends", ""


def _clock(one: PairHost, other: PairHost) -> _Seen:
    apart = one.examined.skew_s - other.examined.skew_s
    if abs(apart) > CLOCK_S:
        return Level.WARN, f"their clocks differ by {abs(apart):.0f} s", "switch on network time on both"
    return Level.OK, f"{abs(apart):.1f} s apart", ""


# ---------------------------------------------------------------- dialled


def dial_finding(dials: PairHost, listens: PairHost, address: str, dialled: Dialled) -> Finding:
    """What came of it, with the likeliest cause of its kind."""
    level, check, evidence, fix = _dial(dials, listens, address, dialled)
    return Finding(
        host=f"{dials.name} - {listens.name}",
        check=check,
        area=Area.NETWORK,
        level=level,
        evidence=evidence,
        fix=fix,
    )


def _dial(dials: PairHost, listens: PairHost, address: str, dialled: Dialled) -> tuple[Level, str, str, str]:
    if dialled.not_listening:
        seen = f"{listens.name} cannot listen on {address} ({dialled.not_listening})"
        return Level.FAIL, "dial", seen, f"see which addresses {listens.name} has; they may have changed"
    if not dialled.error:
        return Level.OK, "dial", f"{dials.name} reaches {listens.name} at {address}", ""
    seen = f"{dials.name} cannot reach {listens.name} at {address}: {dialled.said or dialled.error}"
    is_mac = dials.examined.report.facts.system == "Darwin"
    if dialled.error == "EHOSTUNREACH" and dialled.has_route and is_mac:
        return (
            Level.FAIL,
            "local network",
            f"{seen}, though it has a route there: macOS's Local Network privacy refuses it",
            f"on {dials.name}, System Settings > Privacy & Security > Local Network: allow the program from "
            "which this was started (off and on again if it is); or start from an SSH session outside tmux",
        )
    if dialled.error in ("EHOSTUNREACH", "ENETUNREACH"):
        return Level.FAIL, "dial", seen, "see that both have addresses of one subnet: `mlx-mesh net plan`"
    fix = "see what filters between them"
    if listens.examined.report.facts.system == "Darwin":
        fix = (
            f"on {listens.name}: {FIREWALL_TOOL} --getappblocked {listens.examined.python}; allow it with "
            f"sudo {FIREWALL_TOOL} --add and --unblockapp"
        )
    return Level.FAIL, "dial", seen, fix
