"""What goes where, before anything is started: sizes from the leader's host, then the placement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mlx_mesh.launcher.config import LaunchConfig, plan_size
from mlx_mesh.launcher.preflight import ReadyHost
from mlx_mesh.launcher.remote import CommandTimeout, run
from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.placement import HostCapacity, PlacementRequest, PlanRow, plan_placement, plan_rows
from mlx_mesh.mesh.types import Placement

INSPECT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    placement: Placement
    rows: tuple[PlanRow, ...]


def make_plan(config: LaunchConfig, hosts: Sequence[ReadyHost]) -> Plan:
    """Raises PlacementError with the reason and the valid choices; nothing was loaded then."""
    context, sequences = plan_size(config)
    request = PlacementRequest(sharding=config.sharding, context_tokens=context, num_sequences=sequences)
    footprint = read_footprint(hosts[0])
    placement = plan_placement(footprint, [capacity_of(host) for host in hosts], request)
    return Plan(placement, plan_rows(placement, footprint, request))


def capacity_of(host: ReadyHost) -> HostCapacity:
    return HostCapacity(
        name=host.entry.name,
        slots=host.entry.slots,
        usable_memory_bytes=host.facts.usable_memory_bytes,
        layers=host.entry.layers,
        memory_limit_bytes=host.entry.memory_limit_bytes,
    )


def read_footprint(leader: ReadyHost) -> ModelFootprint:
    """Sizes and legal cuts, told by a short-lived process on the leader's host. Raises PlacementError."""
    words = [leader.python, "-I", "-u", "-m", "mlx_mesh.node.engine.inspect", leader.model]
    try:
        completed = run(leader.remote, words, b"", INSPECT_TIMEOUT_S)
    except CommandTimeout as error:
        raise PlacementError(
            f"Reading the sizes of {leader.model} on {leader.entry.name} took over {INSPECT_TIMEOUT_S:g} s. "
            "Is the folder on a slow network disk?"
        ) from error
    for line in reversed(completed.stdout):
        if completed.exit.code == 0 and line.startswith("{"):
            try:
                return msgspec.json.decode(line, type=ModelFootprint)
            except msgspec.MsgspecError as error:
                raise PlacementError(
                    f"{leader.entry.name} tells the sizes of {leader.model} in another form than this "
                    f"launcher knows ({error}). Install the same mlx-mesh on both."
                ) from error
    raise PlacementError(
        f"{leader.model} on {leader.entry.name} cannot be used: {completed.last_words() or completed.exit}"
    )
