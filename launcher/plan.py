"""What goes where, before anything is started: sizes from the leader's host, then the placement."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mlx_mesh.launcher.config import LaunchConfig, plan_size
from mlx_mesh.launcher.measured import read_measurements
from mlx_mesh.launcher.preflight import ReadyHost
from mlx_mesh.launcher.remote import CommandTimeout, RemoteHost, run
from mlx_mesh.mesh.capacity import wired_limit_advice
from mlx_mesh.mesh.errors import ExitCode, PlacementError, PreflightError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.kv_options import with_kv_options
from mlx_mesh.mesh.measurements import Measurements, rates_of, slowest_link
from mlx_mesh.mesh.memory import format_bytes
from mlx_mesh.mesh.placement import (
    HostCapacity,
    PlacementRequest,
    PlanRow,
    plan_placement,
    plan_rows,
    predict,
)
from mlx_mesh.mesh.replicas import share_of
from mlx_mesh.mesh.survey import hosts_that_hold_all
from mlx_mesh.mesh.types import Placement, VisionMode

INSPECT_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Plan:
    placement: Placement
    rows: tuple[PlanRow, ...]
    notes: tuple[str, ...] = ()  # predicted speed, and what else is worth knowing


def make_plans(
    config: LaunchConfig, hosts: Sequence[ReadyHost], source: ReadyHost | None = None
) -> tuple[Plan, ...]:
    """One for each replica. `source`: a host that has the model, when the leader does not. Raises
    PlacementError with the reason and the valid choices; nothing was loaded then."""
    found = read_footprint(source or hosts[0], is_offline=config.is_offline, vision=config.vision)
    footprint = with_kv_options(found, config.kv_options)
    if config.num_replicas == 1:
        return (make_plan(config, hosts, footprint, hosts[0]),)
    plans = []
    for replica in range(config.num_replicas):
        members = [host for host in hosts if host.entry.replica == replica]
        try:
            plans.append(make_plan(config, members, footprint, hosts[0]))
        except PlacementError as error:
            raise PlacementError(f"{_about_replica(config, replica, members, hosts[0])} {error}") from error
    return tuple(plans)


def _about_replica(
    config: LaunchConfig, replica: int, members: Sequence[ReadyHost], leader: ReadyHost
) -> str:
    """Which one cannot be placed, and what it has."""
    shares = [
        f"{host.entry.name} has 1/{host.entry.num_shares} of the "
        f"{format_bytes(host.facts.usable_memory_bytes - embedding_bytes(host, leader))} of "
        f"{host.entry.machine}"
        for host in members
        if host.entry.num_shares > 1
    ]
    what = f" ({', '.join(shares)})" if shares else ""
    return (
        f"The memory does not carry {config.num_replicas} replicas, or the hosts cannot be divided so. "
        f"Replica {replica + 1}{what}:"
    )


def embedding_bytes(host: ReadyHost, leader: ReadyHost) -> int:
    """What the embedding model takes of this machine's memory."""
    is_same = (host.entry.machine or host.entry.name) == (leader.entry.machine or leader.entry.name)
    return leader.facts.embedding_bytes if is_same else 0


def reserved_bytes(host: ReadyHost, leader: ReadyHost) -> int:
    """The same of another part of the leader's machine, whose own facts do not have it."""
    return 0 if host is leader else embedding_bytes(host, leader)


def make_plan(
    config: LaunchConfig, hosts: Sequence[ReadyHost], footprint: ModelFootprint, leader: ReadyHost
) -> Plan:
    """Of one replica. Raises PlacementError."""
    measurements = read_measurements(os.environ)
    request = request_of(config, hosts, measurements)
    capacities = [capacity_of(host, measurements, reserved_bytes(host, leader)) for host in hosts]
    try:
        placement = plan_placement(footprint, capacities, request)
    except PlacementError as error:
        raise PlacementError("\n".join([str(error), *limit_advice(hosts)])) from error
    notes = context_notes(config.context_length, footprint.context_length)
    if config.embedding_model and hosts[0] is leader:
        notes.append(
            f"on {hosts[0].entry.name} {hosts[0].facts.embedding_bytes / 1e9:.2f} GB more for the embedding "
            f"model {config.embedding_model}"
        )
    predicted = predict(placement, footprint, capacities, request)
    if predicted is not None:
        prefill = (
            f", prefill {predicted.prefill_tokens_per_s:.0f}" if predicted.prefill_ns else ", prefill unknown"
        )
        notes.append(
            f"predicted for one request: decode {predicted.decode_tokens_per_s:.1f}{prefill} tokens/s"
        )
    if len(hosts) > 1 and (whole := hosts_that_hold_all(footprint, capacities, request)):
        notes.append(
            f"it fits on one host: {', '.join(whole)} could serve it alone, without a link to wait for"
        )
    return Plan(placement, plan_rows(placement, footprint, request), tuple(notes))


def context_notes(asked: int, own: int) -> list[str]:
    """What is to be said of a context that was asked for and that the model does not have; 0 = not asked for,
    not known."""
    if not own or asked <= own:
        return []
    return [f"warning: --context {asked} is longer than the model's own context of {own} tokens; {own} count"]


def limit_advice(hosts: Sequence[ReadyHost]) -> list[str]:
    """What Macs among the hosts could give their GPUs beyond their present limit. Advice only: nothing here
    changes a system setting."""
    told = (
        wired_limit_advice(host.entry.name, host.facts.memory_bytes, host.facts.usable_memory_bytes)
        for host in hosts
        if host.facts.system == "Darwin"
    )
    return [line for line in told if line]


def request_of(
    config: LaunchConfig, hosts: Sequence[ReadyHost], measurements: Measurements
) -> PlacementRequest:
    """What the coordinator will ask for."""
    context, sequences = plan_size(config)
    return PlacementRequest(
        sharding=config.sharding,
        context_tokens=context,
        num_sequences=sequences,
        link=slowest_link([host.facts for host in hosts], measurements, config.backend),
    )


def capacity_of(host: ReadyHost, measurements: Measurements, reserved: int = 0) -> HostCapacity:
    """`reserved`: bytes of its machine that something else takes."""
    rates = rates_of(host.facts, measurements)
    return HostCapacity(
        name=host.entry.name,
        slots=host.entry.slots,
        usable_memory_bytes=share_of(host.facts.engine_memory_bytes, host.entry.num_shares, reserved),
        layers=host.entry.layers,
        memory_limit_bytes=host.entry.memory_limit_bytes,
        memory_rate=rates.memory_rate,
        matrix_rate=rates.matrix_rate,
    )


def read_footprint(
    leader: ReadyHost, *, is_offline: bool = False, vision: VisionMode = VisionMode.AUTO
) -> ModelFootprint:
    """Sizes and legal cuts, told by a short-lived process on the leader's host. Raises PlacementError."""
    flags = inspect_flags(leader.adapter, is_offline=is_offline, vision=vision)
    return ask_footprint(leader.remote, leader.python, leader.model, *flags)


def inspect_flags(adapter: str, *, is_offline: bool, vision: VisionMode = VisionMode.AUTO) -> list[str]:
    """Further words for the process that reads sizes."""
    return [
        *(["--adapter-path", adapter] if adapter else []),
        *(["--vision", vision.value] if vision is not VisionMode.AUTO else []),
        *(["--offline"] if is_offline else []),
    ]


def ask_footprint(remote: RemoteHost, python: str, model: str, *flags: str) -> ModelFootprint:
    """The same of any host. Raises PlacementError, or PreflightError when model or adapter are not there."""
    words = [python, "-I", "-u", "-m", "mlx_mesh.node.engine.inspect", model, *flags]
    try:
        completed = run(remote, words, b"", INSPECT_TIMEOUT_S)
    except CommandTimeout as error:
        raise PlacementError(
            f"Reading the sizes of {model} on {remote.name} took over {INSPECT_TIMEOUT_S:g} s. "
            "Is the folder on a slow network disk?"
        ) from error
    for line in reversed(completed.stdout):
        if completed.exit.code == 0 and line.startswith("{"):
            try:
                return msgspec.json.decode(line, type=ModelFootprint)
            except msgspec.MsgspecError as error:
                raise PlacementError(
                    f"{remote.name} tells the sizes of {model} in another form than this "
                    f"launcher knows ({error}). Install the same mlx-mesh on both."
                ) from error
    said = completed.last_words()
    if completed.exit.code == ExitCode.PREFLIGHT:  # no usable files: it names model or adapter itself
        raise PreflightError(f"{remote.name}: {said}")
    if completed.exit.signal is not None:
        said = (
            f"the process that reads its sizes did not end by itself, {completed.exit}, perhaps because the "
            f"host is short of memory. {said}"
        ).strip()
    raise PlacementError(f"{model} on {remote.name} cannot be used: {said or completed.exit}")
