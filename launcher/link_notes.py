"""What a plan says of links and backend before anything is started: by the coordinator's own rules."""

from __future__ import annotations

from collections.abc import Sequence

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.preflight import ReadyHost
from mlx_mesh.mesh.interfaces import is_allowed
from mlx_mesh.mesh.rdma import pick_backend
from mlx_mesh.mesh.topology import HostLink, plan_addresses
from mlx_mesh.mesh.types import Backend


def link_notes(config: LaunchConfig, hosts: Sequence[ReadyHost]) -> list[str]:
    """Of the hosts of one replica: the backend with its reason, and the link that each host is dialled on.
    Raises PreflightError for a backend that cannot be had, and BringUpError when two neighbours have no link
    that may be used."""
    if len(hosts) == 1:
        return []
    seen = [
        (host.entry.name, [i for i in host.facts.interfaces if is_allowed(i.name, host.entry.interfaces)])
        for host in hosts
    ]
    told = tuple(host.entry.rdma for host in hosts if host.entry.rdma)
    choice = pick_backend(config.backend, seen, world_size=sum(host.entry.slots for host in hosts), told=told)
    notes = [f"backend {choice.backend}: {choice.reason}"]
    plan = plan_addresses(
        [
            HostLink(
                host=host.entry.name,
                planned=host.address,
                joined=host.address,
                addresses=host.facts.addresses,
                is_pinned=bool(host.entry.addresses),
                interfaces=host.facts.interfaces,
                rules=host.entry.interfaces,
            )
            for host in hosts
        ],
        is_ring=choice.backend is Backend.RING,
        allow_wifi=config.allow_wifi,
    )
    notes += [f"link {link}" for link in plan.links.values()]
    return notes
