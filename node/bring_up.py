"""From joined agents to a ready mesh: one barrier after the other, each with its named deadline.

Spawn, connect, load, warm-up. Whatever goes wrong ends the epoch with a Verdict that names rank, host,
phase and limit; nothing here waits for a single rank without watching all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.kv_options import KvOptions
from mlx_mesh.mesh.membership import Verdict
from mlx_mesh.mesh.messages import (
    Connect,
    Deadlines,
    JoinPlans,
    Load,
    ReservePorts,
    StartEpoch,
    WarmUp,
)
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.mesh.topology import AddressPlan
from mlx_mesh.mesh.types import Backend, Phase, Placement
from mlx_mesh.node.gathering import version_differences
from mlx_mesh.node.roster import RankRecord, Roster, Seat
from mlx_mesh.node.switchboard import Switchboard
from mlx_mesh.node.waits import Waits

_REPORT_S = 1.0
"""How much later than a limit we judge: the words of a rank that missed it by itself are better than ours."""


@dataclass(frozen=True, slots=True)
class EpochPlan:
    """Everything that the ranks of one epoch are told."""

    epoch: int
    placement: Placement
    backend: Backend
    rdma: tuple[tuple[str | None, ...], ...]  # a row for each rank; () = none
    addresses: AddressPlan
    model: str
    is_switched: bool
    model_digest: str  # see Load
    max_sequences: int
    prefill_step_size: int
    context_length: int
    kv: KvBudget
    prefix: PrefixSettings
    kv_options: KvOptions
    with_vision: bool
    is_paranoid: bool
    is_first: bool  # no epoch was ready before: what misses a deadline now is not tried again


@dataclass(frozen=True, slots=True)
class Control:
    """What bring-up works with."""

    roster: Roster
    deadlines: Deadlines
    switchboard: Switchboard
    waits: Waits


async def bring_up(control: Control, plan: EpochPlan) -> None:
    """Run all phases of one epoch; all ranks are READY when it returns."""
    await _spawn(control, plan)
    await _connect(control, plan)
    await _load(control, plan)
    await _warm_up(control, plan)


# ---------------------------------------------------------------- the phases


async def _spawn(control: Control, plan: EpochPlan) -> None:
    """Engine processes start and say what they imported."""
    control.switchboard.enter(Phase.STARTING)
    for seat, member in list(control.roster.placed()):
        control.switchboard.send(
            member,
            StartEpoch(
                epoch=plan.epoch,
                ranks=seat.ranks,
                world_size=control.roster.world_size,
                address=plan.addresses.data[seat.host],
                plan_address=plan.addresses.control,
            ),
        )
    ranks = control.roster.ranks
    await _barrier(
        control,
        plan,
        lambda record: record.hello is not None,
        "its engine has not finished importing",
        "spawn_s",
        control.deadlines.spawn_s,
        Phase.STARTING,
    )
    loaded = {
        f"rank {r.rank} on {control.roster.host_of(r.rank)}": r.hello.versions
        for r in ranks
        if r.hello is not None
    }
    if table := version_differences(loaded):
        raise PreflightError(f"the engines loaded different versions:\n{table}")


async def _connect(control: Control, plan: EpochPlan) -> None:
    """Data ports, then the data group with its checked collective, then the plan channel."""
    control.switchboard.enter(Phase.CONNECTING)
    addresses: tuple[tuple[str, ...], ...] = ()
    coordinator = ""
    if plan.backend is not Backend.NONE:
        addresses = await _reserve_ports(control, plan)
        if plan.backend is not Backend.RING:
            coordinator = addresses[0][0]
    for record in control.roster.ranks:
        control.switchboard.command(
            record.rank,
            Connect(
                epoch=plan.epoch,
                rank=record.rank,
                world_size=plan.placement.world_size,
                backend=plan.backend,
                addresses=addresses,
                coordinator=coordinator,
                rdma=plan.rdma,
                deadline_s=control.deadlines.connect_s,
            ),
        )
    await _barrier(
        control,
        plan,
        lambda record: Phase.CONNECTED in record.reached,
        "not in the data group",
        "connect_s",
        control.deadlines.connect_s,
        Phase.CONNECTING,
    )
    endpoint = control.roster.ranks[0].reached[Phase.CONNECTED].plan_endpoint
    for record in control.roster.ranks[1:]:
        control.switchboard.command(record.rank, JoinPlans(endpoint=endpoint))


async def _reserve_ports(control: Control, plan: EpochPlan) -> tuple[tuple[str, ...], ...]:
    """ "ip:port"s by rank."""
    members = list(control.roster.placed())
    for _, member in members:
        control.switchboard.send(member, ReservePorts(epoch=plan.epoch, num_per_rank=1))

    def late() -> Verdict:
        seat = next(seat for seat, member in members if member.ports is None)
        limit = control.deadlines.connect_s
        return _host_verdict(seat, f"no data ports were reserved within connect_s = {limit:g} s")

    await control.waits.wait(
        lambda: all(member.ports is not None for _, member in members),
        control.waits.timer(control.deadlines.connect_s),
        late,
    )
    by_rank: dict[int, tuple[str, ...]] = {}
    for seat, member in members:
        assert member.ports is not None
        if member.ports.error:
            raise PreflightError(f"host {seat.host}: {member.ports.error}")
        by_rank |= member.ports.addresses
    return tuple(by_rank[record.rank] for record in control.roster.ranks)


async def _load(control: Control, plan: EpochPlan) -> None:
    """Each rank reads its share; the limit is on silence, not on the whole."""
    control.switchboard.enter(Phase.LOADING)
    for record in control.roster.ranks:
        control.switchboard.command(
            record.rank,
            Load(
                model=plan.model,
                is_switched=plan.is_switched,
                model_digest=plan.model_digest,
                placement=plan.placement,
                max_sequences=plan.max_sequences,
                prefill_step_size=plan.prefill_step_size,
                context_length=plan.context_length,
                is_paranoid=plan.is_paranoid,
                kv=plan.kv,
                prefix=plan.prefix,
                kv_options=plan.kv_options,
                with_vision=plan.with_vision,
            ),
        )
    limit = control.deadlines.load_stall_s

    def loading() -> list[RankRecord]:
        return [record for record in control.roster.ranks if Phase.LOADED not in record.reached]

    def left() -> float:
        return min((limit - control.waits.age(record.moved_at) for record in loading()), default=limit)

    def late() -> Verdict:
        record = max(loading(), key=lambda r: control.waits.age(r.moved_at))
        progress = record.progress
        how_far = f"{progress.done} of {progress.total} layers" if progress else "no layer yet"
        return Verdict(
            record.rank,
            control.roster.host_of(record.rank),
            Phase.LOADING,
            f"no progress for load_stall_s = {limit:g} s ({how_far})",
            retryable=not plan.is_first,
        )

    await control.waits.wait(lambda: not loading(), left, late)
    _compare_plans(control.roster, plan.placement)


def _compare_plans(roster: Roster, placement: Placement) -> None:
    """Every rank loaded its share of the same plan, or the mesh ends: raises PreflightError."""
    expected = placement.digest()
    for record in roster.ranks:
        digest = record.reached[Phase.LOADED].plan_digest
        if digest and digest != expected:
            raise PreflightError(
                f"rank {record.rank} on {roster.host_of(record.rank)} loaded plan {digest[:12]}, the "
                f"coordinator made {expected[:12]}. Install the same version of mlx-mesh on all hosts."
            )


async def _warm_up(control: Control, plan: EpochPlan) -> None:
    """Every cut is checked and one token goes through all ranks."""
    control.switchboard.enter(Phase.WARMING)
    prefixes = common_prefixes(control.roster)
    for record in control.roster.ranks:
        control.switchboard.command(record.rank, WarmUp(prefixes=prefixes))
    await _barrier(
        control,
        plan,
        lambda record: Phase.READY in record.reached,
        "the cut check and the first token are not done",
        "warmup_s",
        control.deadlines.warmup_s,
        Phase.WARMING,
    )


def common_prefixes(roster: Roster) -> tuple[str, ...]:
    """Keys of the prefixes that every rank has read whole from its own files, in the leader's order."""
    by_rank = [record.reached[Phase.LOADED].prefixes for record in roster.ranks]
    return tuple(key for key in by_rank[0] if all(key in keys for keys in by_rank))


# ---------------------------------------------------------------- what they share


async def _barrier(
    control: Control,
    plan: EpochPlan,
    arrived: Callable[[RankRecord], bool],
    what: str,
    limit_name: str,
    limit_s: float,
    phase: Phase,
) -> None:
    """Until all ranks have arrived. Only a connection is worth another try at the first bring-up: its ports
    may have been somebody else's."""

    def missing() -> list[RankRecord]:
        return [record for record in control.roster.ranks if not arrived(record)]

    def late() -> Verdict:
        record, *others = missing()
        also = "".join(f", nor on rank {r.rank} ({control.roster.host_of(r.rank)})" for r in others)
        return Verdict(
            record.rank,
            control.roster.host_of(record.rank),
            phase,
            f"{what} within {limit_name} = {limit_s:g} s{also}",
            retryable=phase is Phase.CONNECTING or not plan.is_first,
        )

    await control.waits.wait(lambda: not missing(), control.waits.timer(limit_s + _REPORT_S), late)


def _host_verdict(seat: Seat, evidence: str) -> Verdict:
    return Verdict(None, seat.host, Phase.CONNECTING, evidence)
