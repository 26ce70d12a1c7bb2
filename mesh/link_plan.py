"""Over which links the ranks' data goes: one address plan for all hosts, made in one place. Pure.

In MLX's ring each rank listens, and dials the next one. So what has to be chosen for a host is the address
under which the host of the rank before it reaches it: on the best link that the two have in common.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.interfaces import LINK_LOCAL, Interface, LinkClass

_USABLE = (LinkClass.THUNDERBOLT, LinkClass.ETHERNET, LinkClass.WIFI)


class LinkEnd(msgspec.Struct, frozen=True, kw_only=True):
    """One host's side of a link."""

    host: str
    interface: str
    address: str  # IPv4
    evidence: str = ""


class PairLink(msgspec.Struct, frozen=True, kw_only=True):
    """A link between two hosts. `listens` is the side that the other one dials."""

    dials: LinkEnd
    listens: LinkEnd
    link_class: LinkClass
    mbits: int = 0
    generation: int = 0  # of Thunderbolt

    def __str__(self) -> str:
        return (
            f"{self.dials.host} {self.dials.interface} - {self.listens.host} {self.listens.interface} "
            f"({self.link_class}, {self.listens.address})"
        )


def usable_interfaces(interfaces: Sequence[Interface], allow_wifi: bool) -> list[Interface]:
    """Those that may carry data, best first. A member of a bridge has no address of its own to use. Equal
    ones stand in the order of their names, so that every host comes to the same choice."""
    chosen = [
        interface
        for interface in interfaces
        if interface.is_active
        and interface.link_class in _USABLE
        and not interface.bridge
        and (allow_wifi or interface.link_class is not LinkClass.WIFI)
    ]
    return sorted(chosen, key=lambda interface: (*interface.rank, interface.name))


def links_between(
    dials: tuple[str, Sequence[Interface]], listens: tuple[str, Sequence[Interface]], allow_wifi: bool
) -> list[PairLink]:
    """All links that two hosts, (name, interfaces) each, have in common, best first: the worse end of a link
    says how good it is."""
    # One subnet on several ports: the system sends everything through one of them.
    is_clear = all(_num_self_assigned(interfaces, allow_wifi) < 2 for _, interfaces in (dials, listens))
    found: list[tuple[tuple[tuple[int, int], ...], PairLink]] = []
    for here in usable_interfaces(dials[1], allow_wifi):
        for there in usable_interfaces(listens[1], allow_wifi):
            for own, peer in _common_addresses(here, there, is_clear):
                link = PairLink(
                    dials=LinkEnd(host=dials[0], interface=here.name, address=own, evidence=here.evidence),
                    listens=LinkEnd(
                        host=listens[0], interface=there.name, address=peer, evidence=there.evidence
                    ),
                    link_class=max(here, there, key=lambda end: end.rank).link_class,
                    mbits=min(filter(None, (here.mbits, there.mbits)), default=0),
                    generation=min(filter(None, (here.generation, there.generation)), default=0),
                )
                order = (max(here.rank, there.rank), min(here.rank, there.rank))
                found.append((order, link))
    return [link for _, link in sorted(found, key=lambda item: (item[0], item[1].listens.address))]


def _num_self_assigned(interfaces: Sequence[Interface], allow_wifi: bool) -> int:
    usable = usable_interfaces(interfaces, allow_wifi)
    return sum(any(ipaddress.ip_interface(a).ip in LINK_LOCAL for a in each.addresses) for each in usable)


def _common_addresses(here: Interface, there: Interface, is_clear: bool) -> Iterator[tuple[str, str]]:
    """Pairs of addresses of one subnet on both. Two ends whose cables lead elsewhere have none. Self-assigned
    addresses count where they are clear, and on Thunderbolt only: on a switch they are what a failed DHCP
    leaves behind."""
    if not may_meet(here, there):
        return
    for own in map(ipaddress.ip_interface, here.addresses):
        for peer in map(ipaddress.ip_interface, there.addresses):
            if own.network != peer.network or own.ip == peer.ip:
                continue
            if own.ip in LINK_LOCAL and not (is_clear and here.link_class is LinkClass.THUNDERBOLT):
                continue
            yield str(own.ip), str(peer.ip)


def may_meet(here: Interface, there: Interface) -> bool:
    """Whether a cable could join the two. Thunderbolt ports know their other end; a Thunderbolt bridge may
    lead to any Thunderbolt port or bridge; other kinds are told apart by their subnets."""
    if LinkClass.THUNDERBOLT in (here.link_class, there.link_class):
        if here.link_class is not there.link_class:
            return False
        if here.own_id and there.own_id:
            return here.peer_id == there.own_id and there.peer_id == here.own_id
    return True


def overlapping_subnets(host: str, interfaces: Sequence[Interface]) -> list[str]:
    """In words, pairs of this host's interfaces whose subnets overlap: the system sends through one of them
    what was meant for the other."""
    nets = [
        (interface, ipaddress.ip_interface(text).network)
        for interface in usable_interfaces(interfaces, allow_wifi=True)
        for text in interface.addresses
        if ipaddress.ip_interface(text).ip not in LINK_LOCAL
    ]
    return [
        f"{host}: {one.what} and {other.what} have overlapping subnets ({net} and {second})"
        for index, (one, net) in enumerate(nets)
        for other, second in nets[index + 1 :]
        if one.name != other.name and net.overlaps(second)
    ]


def ring_links(
    hosts: Sequence[tuple[str, Sequence[Interface]]], allow_wifi: bool, pinned: Mapping[str, str] = {}
) -> dict[str, PairLink]:
    """Host -> the link by which the host of the rank before it reaches it. `hosts` in rank order; the last
    one comes before the first. `pinned`: addresses that hosts must listen on, whatever their links are.

    A host without a common subnet with its neighbour is left out: a router may join them. Raises BringUpError
    when Wi-Fi is all that a pair has and it is not allowed.
    """
    chosen: dict[str, PairLink] = {}
    refused = []
    for index, listens in enumerate(hosts):
        dials, address = hosts[index - 1], pinned.get(listens[0])
        if dials[0] == listens[0]:
            continue
        links = links_between(dials, listens, allow_wifi or address is not None)
        if address is not None:
            links = [link for link in links if link.listens.address == address]
        if links:
            chosen[listens[0]] = links[0]
        elif address is None and links_between(dials, listens, allow_wifi=True):
            refused.append(f"{dials[0]} and {listens[0]}")
    if refused:
        raise BringUpError(
            f"Wi-Fi is the only network that {', '.join(refused)} have in common. Each token would wait for "
            "it (round trips of 5 to 54 ms were measured): join the hosts by a cable, or say --allow-wifi."
        )
    return chosen
