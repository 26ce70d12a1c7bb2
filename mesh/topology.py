"""One address plan for the whole mesh: the IPv4 address that each host uses for its data links."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.interfaces import Interface, is_allowed, unknown_names
from mlx_mesh.mesh.link_plan import PairLink, ring_links

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class HostLink:
    """What is known of one host's addresses."""

    host: str
    planned: str  # from the hostfile, or found by the launcher; '' = neither
    joined: str  # the one by which it talks to the coordinator; '' = in-process
    addresses: tuple[str, ...]  # its own IPv4 addresses, as it reports them
    is_pinned: bool = False  # `planned` is the user's word
    interfaces: tuple[Interface, ...] = ()
    rules: tuple[str, ...] = ()  # which of them may carry data; () = all

    @property
    def allowed(self) -> tuple[Interface, ...]:
        return tuple(interface for interface in self.interfaces if is_allowed(interface.name, self.rules))

    def owner(self, address: str) -> Interface | None:
        """Its interface that has this address."""
        return next(
            (i for i in self.interfaces if any(text.partition("/")[0] == address for text in i.addresses)),
            None,
        )


class AddressPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Where hosts listen: for data, by host, and the leader for what all of them dial."""

    data: dict[str, str] = {}
    control: str = LOOPBACK
    links: dict[str, PairLink] = {}  # by the host that listens: the link that was chosen


def plan_addresses(
    hosts: Sequence[HostLink], *, is_ring: bool = True, allow_wifi: bool = False
) -> AddressPlan:
    """Addresses of all hosts, in rank order: loopback when there is one host only; the user's; in a ring the
    one on the best link that a host has in common with the host before it; else the one by which the host
    is reached anyway.

    Raises BringUpError that names every host whose address cannot be used, and the fix.
    """
    if len(hosts) == 1 and not hosts[0].planned:
        return AddressPlan(data={hosts[0].host: LOOPBACK})
    reached: dict[str, str] = {}
    errors: list[str] = []
    for link in hosts:
        try:
            reached[link.host] = _address_of(link)
        except ValueError as error:
            errors.append(f"host {link.host}: {error}")
    if not errors:
        errors = _mixed_loopback(reached)
    if errors:
        raise BringUpError("the data links have no usable address plan:\n  " + "\n  ".join(errors))
    plan = AddressPlan(data=reached, control=reached[hosts[0].host])
    if not is_ring or all(ipaddress.ip_address(address).is_loopback for address in reached.values()):
        return plan
    _check_rules(hosts)
    pinned = {link.host: reached[link.host] for link in hosts if link.is_pinned}
    chosen = ring_links([(link.host, link.allowed) for link in hosts], allow_wifi, pinned)
    data = reached | {host: link.listens.address for host, link in chosen.items()}
    _check_excluded(hosts, data)
    return msgspec.structs.replace(plan, data=data, links=chosen)


def _check_rules(hosts: Sequence[HostLink]) -> None:
    """Raises BringUpError for interfaces that are named and not there."""
    errors = [
        f"host {link.host}: it has no interface {', '.join(unknown)}; it has "
        f"{', '.join(i.name for i in link.interfaces) or 'none'}"
        for link in hosts
        if (unknown := unknown_names(link.interfaces, link.rules))
    ]
    if errors:
        raise BringUpError("the interfaces that are to be used are not there:\n  " + "\n  ".join(errors))


def _check_excluded(hosts: Sequence[HostLink], data: dict[str, str]) -> None:
    """Raises BringUpError where only an interface is left that the rules leave out."""
    errors = []
    for index, link in enumerate(hosts):
        owner = link.owner(data[link.host])
        if owner is not None and not is_allowed(owner.name, link.rules):
            before = hosts[index - 1].host
            errors.append(
                f"host {link.host}: {before} could reach it at {data[link.host]} only, on {owner.what}, "
                f"which `interfaces` ({', '.join(link.rules)}) leaves out; allow it, or give both another "
                "network in common"
            )
    if errors:
        raise BringUpError("the data links have no usable address plan:\n  " + "\n  ".join(errors))


def _address_of(link: HostLink) -> str:
    """Raises ValueError with the fix."""
    text = link.planned or link.joined or LOOPBACK
    source = "address in the hostfile" if link.planned else "address towards the coordinator"
    own = ", ".join(link.addresses) or "none reported"
    fix = f"set `addresses: [<IPv4>]` of {link.host} to one of its own ({own})"
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        raise ValueError(f"the {source}, {text!r}, is not an IP address; {fix}") from None
    if address.version != 4:
        raise ValueError(f"the {source}, {text}, is IPv6, which MLX's data links do not take; {fix}")
    if address.is_unspecified:
        raise ValueError(f"the {source}, {text}, stands for all interfaces; {fix}")
    if not address.is_loopback and text not in link.addresses:
        raise ValueError(f"the {source}, {text}, is not an address of this host; {fix}")
    return str(address)


def _mixed_loopback(plan: dict[str, str]) -> list[str]:
    """Loopback is fine for all hosts (one machine) or for none."""
    local = [host for host, address in plan.items() if ipaddress.ip_address(address).is_loopback]
    if not local or len(local) == len(plan):
        return []
    return [
        f"host {host}: {plan[host]} is loopback, which the other hosts cannot reach; "
        f"set `addresses: [<IPv4>]` of {host} to one that they can"
        for host in local
    ]
