"""Which IPv4 address of each host the other hosts use. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.mesh.host_entry import HostEntry


@dataclass(frozen=True, slots=True)
class SeenAddresses:
    """What is known of one host's addresses."""

    entry: HostEntry
    own: tuple[str, ...]  # all IPv4 addresses it has, loopback included
    reached_at: str = ""  # the one under which the launcher reached it; '' for this machine or unknown
    towards_others: str = ""  # this machine: the one that leads to the other hosts


def choose_addresses(hosts: Sequence[SeenAddresses]) -> tuple[dict[str, str], list[HostFault]]:
    """The address of each host for control and data links, by host name, and what is wrong."""
    if len(hosts) == 1 and not hosts[0].entry.addresses:
        return {hosts[0].entry.name: "127.0.0.1"}, []
    chosen: dict[str, str] = {}
    faults: list[HostFault] = []
    for host in hosts:
        name = host.entry.name
        try:
            chosen[name] = _address_of(host)
        except HostFault as fault:
            faults.append(fault)
    if not faults:
        faults = _check_together(hosts, chosen)
    return chosen, faults


def _address_of(host: SeenAddresses) -> str:
    name, own = host.entry.name, host.own
    for address in host.entry.addresses:
        if address not in own:
            raise HostFault(
                name,
                "address",
                f"the hostfile gives it {address}, which it does not have; it has {_list(own)}",
                "correct `addresses:` for this host, or set that address up on it",
            )
    if host.entry.addresses:
        return host.entry.addresses[0]
    for address in (host.reached_at, host.towards_others):
        if address and address in own:
            return address
    others = [address for address in own if not address.startswith(("127.", "169.254."))]
    if len(others) == 1:
        return others[0]
    raise HostFault(
        name,
        "address",
        f"it cannot be told which of its addresses the other hosts reach; it has {_list(own)}",
        "add `addresses: [...]` for this host to the hostfile",
    )


def _check_together(hosts: Sequence[SeenAddresses], chosen: dict[str, str]) -> list[HostFault]:
    faults: list[HostFault] = []
    names = [host.entry.name for host in hosts]
    on_loopback = [name for name in names if chosen[name].startswith("127.")]
    if on_loopback and len(on_loopback) < len(names):
        for name in on_loopback:
            faults.append(
                HostFault(
                    name,
                    "address",
                    f"it would be reached at {chosen[name]}, its loopback, and other hosts are elsewhere",
                    "add its address on the common network as `addresses: [...]` to the hostfile",
                )
            )
        return faults
    for index, name in enumerate(names):
        for earlier in names[:index]:
            if chosen[earlier] == chosen[name] and not chosen[name].startswith("127."):
                faults.append(
                    HostFault(
                        name,
                        "address",
                        f"it has the same address as {earlier}, {chosen[name]}: both are one machine",
                        "remove one of them; for several ranks on one machine use `slots: N`",
                    )
                )
    return faults


def _list(addresses: Sequence[str]) -> str:
    return ", ".join(addresses) or "none"
