"""`mlx-mesh sync MODEL [hosts.yaml]`: bring a model, or each host's part of it, to the hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mlx_mesh.launcher.bring import show_plans
from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.console import Console
from mlx_mesh.launcher.delivery import Brought, Delivery
from mlx_mesh.launcher.preflight import check_hosts, close_all
from mlx_mesh.launcher.signals import StopSignals
from mlx_mesh.launcher.text import table
from mlx_mesh.mesh.delivery import Holding, gigabytes
from mlx_mesh.mesh.types import Placement


@dataclass(frozen=True, slots=True)
class SyncOptions:
    """`is_full`: all of the model on every host. `verify`: read everything again that is there."""

    is_full: bool = False
    verify: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    """One host after it."""

    brought: Brought
    holding: Holding


def sync(config: LaunchConfig, options: SyncOptions, console: Console) -> list[Synced]:
    """Raises MeshError. What has come by then stays, and counts the next time."""
    with StopSignals():
        for note in config.notes:
            console.warn(note)
        preflight = check_hosts(config, may_lack_model=True)
        hosts = preflight.hosts
        try:
            for warning in preflight.warnings:
                console.warn(warning)
            delivery = Delivery(config, hosts, console)
            delivery.look(verify=options.verify)
            delivery.find()
            placements: tuple[Placement, ...] = ()
            if not options.is_full and len(hosts) > 1:
                placements = show_plans(config, hosts, console, delivery.source)
            needs = delivery.needs(placements)
            if options.verify:
                delivery.compare(needs)
            brought = delivery.bring(placements)
        finally:
            close_all(hosts)
    return [Synced(each, delivery.holdings[each.host]) for each in brought]


def lines(synced: Sequence[Synced]) -> list[str]:
    """For people."""
    rows = [
        [
            each.brought.host,
            gigabytes(each.brought.needed),
            gigabytes(each.brought.missing),
            gigabytes(each.brought.received),
            f"{each.brought.seconds:.1f} s",
            each.brought.words or "as it was",
            each.brought.folder,
        ]
        for each in synced
    ]
    return table(["host", "needs", "lacked", "received", "time", "from", "folder"], rows)
