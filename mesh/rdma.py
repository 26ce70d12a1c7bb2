"""Which RDMA device leads from which host to which, and so which backend can be had. Pure.

RDMA over Thunderbolt does not route: each pair of ranks that talks needs a cable of its own. It needs
Thunderbolt 5 at both ends; a list of devices alone proves nothing, since macOS 26 makes them on Thunderbolt 4
Macs, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.interfaces import Interface
from mlx_mesh.mesh.types import Backend

RDMA_GENERATION = 5


class BackendChoice(msgspec.Struct, frozen=True, kw_only=True):
    """`devices` has a row for each host with the device that leads to each host, None where none is needed:
    what jaccl reads. () for the ring."""

    backend: Backend
    reason: str
    devices: tuple[tuple[str | None, ...], ...] = ()


def device_between(here: Sequence[Interface], there: Sequence[Interface]) -> str | None:
    """The RDMA device on `here` whose cable ends at `there`; None = no cable that can do it."""
    theirs = {port.own_id: port for port in there if port.own_id}
    for port in sorted(here, key=lambda port: port.name):
        peer = theirs.get(port.peer_id) if port.peer_id else None
        if peer is None or peer.peer_id != port.own_id or not (port.rdma and peer.rdma):
            continue
        if min(port.generation, peer.generation) >= RDMA_GENERATION and not (port.bridge or peer.bridge):
            return port.rdma
    return None


def choose_backend(hosts: Sequence[tuple[str, Sequence[Interface]]]) -> BackendChoice:
    """For `backend: auto`, of hosts, (name, interfaces) each, in rank order: jaccl when every pair has a
    cable with RDMA at both ends, jaccl over a ring of cables when only neighbours have, else MLX's ring over
    TCP."""
    if len(hosts) < 2:
        return BackendChoice(backend=Backend.RING, reason="all ranks are on one host")
    devices = tuple(
        tuple(None if here is there else device_between(here[1], there[1]) for there in hosts)
        for here in hosts
    )
    missing = [
        (one, other)
        for one in range(len(hosts))
        for other in range(one + 1, len(hosts))
        if devices[one][other] is None or devices[other][one] is None
    ]
    if not missing:
        return BackendChoice(
            backend=Backend.JACCL, reason="every pair of hosts has an RDMA cable", devices=devices
        )
    neighbours = {tuple(sorted((index, (index + 1) % len(hosts)))) for index in range(len(hosts))}
    if not neighbours.intersection(missing):
        return BackendChoice(
            backend=Backend.JACCL_RING, reason="neighbouring hosts have RDMA cables", devices=devices
        )
    one, other = next(pair for pair in missing if pair in neighbours)
    return BackendChoice(backend=Backend.RING, reason=_why_not(hosts[one], hosts[other]))


def pick_backend(
    asked: Backend,
    hosts: Sequence[tuple[str, Sequence[Interface]]],
    *,
    world_size: int,
    told: tuple[tuple[str | None, ...], ...] = (),
) -> BackendChoice:
    """What the ranks talk over, on hosts with ranks in their order; `told`: devices that the hostfile names.
    The ring is what every MLX has; one rank has no data group. Raises PreflightError with what is missing for
    a backend that was asked for."""
    if world_size == 1:
        return BackendChoice(backend=Backend.NONE, reason="one rank")
    if asked in (Backend.AUTO, Backend.NONE):
        if len(hosts) < world_size:
            return BackendChoice(backend=Backend.RING, reason="a host has several ranks")
        return choose_backend(hosts)
    if told or asked not in (Backend.JACCL, Backend.JACCL_RING):
        return BackendChoice(backend=asked, reason="as asked", devices=told)
    found = choose_backend(hosts)
    if not found.devices or (asked is Backend.JACCL and found.backend is not asked):
        raise PreflightError(f"backend {asked} cannot be had: {found.reason}. Use `backend: ring`.")
    return BackendChoice(backend=asked, reason="as asked", devices=found.devices)


def _why_not(one: tuple[str, Sequence[Interface]], other: tuple[str, Sequence[Interface]]) -> str:
    """The first thing that a pair lacks for RDMA, in words."""
    for name, interfaces in (one, other):
        generations = [port.generation for port in interfaces if port.own_id]
        if not generations:
            return f"{name} has no Thunderbolt port that tells of itself"
        if max(generations) < RDMA_GENERATION:
            return f"{name} has Thunderbolt 4 or older, which has no RDMA"
        if not any(port.rdma for port in interfaces):
            return f"{name} has no RDMA devices (optional: `rdma_ctl enable` in macOS Recovery, at the Mac)"
    ends = [port for port in one[1] if port.peer_id in {peer.own_id for peer in other[1] if peer.own_id}]
    if not ends:
        return f"no Thunderbolt cable joins {one[0]} and {other[0]}"
    if any(port.bridge for port in (*one[1], *other[1])):
        return f"the Thunderbolt ports of {one[0]} or {other[0]} are members of a bridge"
    return (
        f"the cable between {one[0]} and {other[0]} is no Thunderbolt 5 link, or one end has no RDMA device"
    )
