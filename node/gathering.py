"""The hosts that joined, looked at together: who is missing, what differs, and what the model gets where.

Decisions on the coordinator's books; nothing is sent from here.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from mlx_mesh.mesh.errors import PlacementError, PreflightError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.interfaces import is_allowed
from mlx_mesh.mesh.messages import Join
from mlx_mesh.mesh.placement import HostCapacity, PlacementRequest, plan_placement
from mlx_mesh.mesh.rdma import BackendChoice, pick_backend
from mlx_mesh.mesh.replicas import share_of
from mlx_mesh.mesh.topology import AddressPlan, HostLink, plan_addresses
from mlx_mesh.mesh.types import Backend, Placement, Sharding, Versions
from mlx_mesh.node.roster import Roster, Seat

_NUM_REFUSALS = 3


def seat_names(roster: Roster, seats: Sequence[Seat]) -> str:
    """ "rank 1 (host mac2), rank 2 (host mac3)"; with the user's number where it is another one."""
    parts = []
    for seat in seats:
        about = []
        if seat.plan.name or seat.member is not None:
            about.append(f"host {seat.host}")
        if shift := roster.mesh.server_rank:
            user_ranks = ((rank + shift) % roster.full_size for rank in seat.planned_ranks)
            about.append("RANK=" + ",".join(map(str, user_ranks)))
        ranks = ", ".join(map(str, seat.planned_ranks))
        parts.append(f"rank {ranks} ({', '.join(about)})" if about else f"rank {ranks}")
    return ", ".join(parts)


def who_is_missing(
    roster: Roster, limit_s: float, limit_name: str, endpoint: str, num_failed_handshakes: int
) -> str:
    """The message of a mesh whose agents did not all come."""
    missing = roster.missing()
    text = f"{seat_names(roster, missing)} did not join within {limit_s:g} s ({limit_name})."
    for seat in missing:
        if seat.member is not None:
            text += f" Host {seat.host} was here before: {seat.member.lost}."
    if roster.refusals:
        text += " Refused were: " + " ".join(roster.refusals[-_NUM_REFUSALS:])
    if num_failed_handshakes:
        text += (
            f" {num_failed_handshakes} connections failed the handshake: an agent with another secret, or a "
            "program that is not of this mesh."
        )
    if endpoint:
        text += (
            f" Start the missing agents so that they reach the coordinator at {endpoint}, and check any "
            "firewall between the hosts."
        )
    return text


def compare_hosts(roster: Roster) -> None:
    """Raises PreflightError with a table when the hosts differ in versions, model or adapter."""
    facts = {seat.host: member.join.facts for seat, member in roster.members()}
    errors = [f"  {host}: {fact.model_error}" for host, fact in facts.items() if fact.model_error]
    if errors:
        raise PreflightError("the model is not on every host:\n" + "\n".join(errors))
    errors = [f"  {host}: {fact.adapter_error}" for host, fact in facts.items() if fact.adapter_error]
    if errors:
        raise PreflightError("the adapter is not on every host:\n" + "\n".join(errors))
    if differences := version_differences({host: fact.versions for host, fact in facts.items()}):
        raise PreflightError(
            f"the hosts have different versions:\n{differences}\nInstall the same ones on all hosts."
        )
    if len({fact.model_digest for fact in facts.values()}) > 1:
        rows = [["", "model digest"], *([host, fact.model_digest[:16]] for host, fact in facts.items())]
        raise PreflightError(
            "the hosts have different models (config.json, index, names and sizes of weight files):\n"
            f"{_table(rows)}\nCopy the same model folder to all hosts."
        )

    if len({fact.adapter_digest for fact in facts.values()}) > 1:
        rows = [
            ["", "adapter digest"],
            *([host, fact.adapter_digest[:16] or "(none)"] for host, fact in facts.items()),
        ]
        raise PreflightError(
            "the hosts have different adapters (their config and weights):\n"
            f"{_table(rows)}\nCopy the same adapter folder to all hosts, and name it on each."
        )


def version_differences(versions: dict[str, Versions]) -> str:
    """A table of what differs, '' when nothing does. Python's version may differ: nothing pickled crosses."""
    columns = ("mlx_mesh", "mlx", "mlx_lm", "protocol")
    different = [
        name for name in columns if len({getattr(version, name) for version in versions.values()}) > 1
    ]
    if not different:
        return ""
    rows = [["", *different]]
    rows += [
        [who, *(str(getattr(version, name)) or "-" for name in different)]
        for who, version in versions.items()
    ]
    return _table(rows)


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def mismatch(roster: Roster, join: Join) -> str:
    """Why a host that comes later cannot take part in a mesh that runs: its versions, its model or its
    adapter are others than the leader's. '' when they are the same."""
    leader = roster.seats[0].member
    if leader is None or not leader.join.facts.model_digest:
        return ""
    mine, its = leader.join.facts, join.facts
    if its.model_error:
        return f"host {join.host}: {its.model_error}"
    if its.adapter_error:
        return f"host {join.host}: {its.adapter_error}"
    if differences := version_differences({roster.seats[0].host: mine.versions, join.host: its.versions}):
        return f"host {join.host} has other versions now:\n{differences}\nInstall the same ones."
    if its.model_digest != mine.model_digest:
        return f"host {join.host} has another model now: copy the folder of {roster.seats[0].host} there."
    if its.adapter_digest != mine.adapter_digest:
        return f"host {join.host} has another adapter now: copy the folder of {roster.seats[0].host} there."
    return ""


def place_model(roster: Roster, footprint: ModelFootprint, chosen: Sequence[int]) -> Placement:
    """What each rank of the chosen hosts holds, all of which are there. Fewer than all hosts cannot keep what
    was asked of all of them: pinned layers, and a sharding that is impossible for so few. A host that was
    brought a part of the model can do with it only what it was brought for. Raises PlacementError."""
    is_whole = len(chosen) == len(roster.seats)
    if parts := _parts(roster, footprint, chosen):
        planned = roster.mesh.planned[roster.mesh.replica :][:1]
        if is_whole and planned and planned[0].model_digest == footprint.model_digest:
            return planned[0]
        raise PlacementError(
            f"Of the model {', '.join(parts)}, for another plan. `mlx-mesh sync --full` brings all of it to "
            "all hosts, and then any of them can go on without the others."
        )
    hosts = [
        HostCapacity(
            name=seat.host,
            slots=seat.plan.slots,
            usable_memory_bytes=share_of(
                member.join.facts.engine_memory_bytes, seat.plan.num_shares, seat.plan.reserved_bytes
            ),
            layers=seat.plan.layers if is_whole else (),
            memory_limit_bytes=seat.plan.memory_limit_bytes,
            memory_rate=seat.plan.memory_rate,
            matrix_rate=seat.plan.matrix_rate,
        )
        for seat, member in roster.members()
        if seat.index in chosen
    ]
    request = PlacementRequest(
        sharding=roster.mesh.sharding,
        context_tokens=roster.mesh.plan_context,
        num_sequences=roster.mesh.plan_sequences,
        link=roster.mesh.link,
    )
    if is_whole or request.sharding is Sharding.AUTO:
        return plan_placement(footprint, hosts, request)
    try:
        return plan_placement(footprint, hosts, request)
    except PlacementError as impossible:
        free = msgspec.structs.replace(request, sharding=Sharding.AUTO)
        placement = plan_placement(footprint, hosts, free)
        why = f"not {request.sharding} as asked, with {len(hosts)} of {len(roster.seats)} hosts: {impossible}"
        return msgspec.structs.replace(placement, reasons=(*placement.reasons, why))


def _parts(roster: Roster, footprint: ModelFootprint, chosen: Sequence[int]) -> list[str]:
    """In words, those of the chosen hosts that have only a part of this model."""
    return [
        f"{seat.host} has only {member.join.facts.model_part}"
        for seat, member in roster.members()
        if seat.index in chosen
        and member.join.facts.model_part
        and member.join.facts.model_digest == footprint.model_digest
    ]


def backend_of(roster: Roster) -> BackendChoice:
    """What the ranks talk over. Raises PreflightError."""
    hosts = [
        (seat.host, [i for i in member.join.facts.interfaces if is_allowed(i.name, seat.plan.interfaces)])
        for seat, member in roster.placed()
    ]
    told = _rdma_of_hostfile(roster)
    return pick_backend(roster.mesh.backend, hosts, world_size=roster.world_size, told=told)


def _rdma_of_hostfile(roster: Roster) -> tuple[tuple[str | None, ...], ...]:
    """A row per rank, a column per host that takes part."""
    placed = [seat for seat in roster.seats if seat.ranks]
    rows = tuple(
        tuple(seat.plan.rdma[other.index] for other in placed)
        if len(seat.plan.rdma) == len(roster.seats)
        else seat.plan.rdma
        for seat in placed
        for _ in seat.ranks
    )
    return rows if any(rows) else ()


def plan_links(roster: Roster, backend: Backend) -> AddressPlan:
    """Where the hosts that have ranks listen. Raises BringUpError."""
    return plan_addresses(
        [
            HostLink(
                host=seat.host,
                planned=seat.plan.address,
                joined=member.join.address,
                addresses=member.join.facts.addresses,
                is_pinned=seat.plan.is_pinned,
                interfaces=member.join.facts.interfaces,
                rules=seat.plan.interfaces,
            )
            for seat, member in roster.placed()
        ],
        # Only a ring goes from neighbour to neighbour; other backends have one meeting point for all.
        is_ring=backend is Backend.RING,
        allow_wifi=roster.mesh.allow_wifi,
    )
