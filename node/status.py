"""The live state of a mesh as /v1/cluster/status shows it: a pure function of the coordinator's books."""

from __future__ import annotations

from mlx_mesh.mesh.interfaces import LinkClass
from mlx_mesh.mesh.messages import LinkStatus, RankStatus
from mlx_mesh.mesh.prefix_settings import PrefixCounters
from mlx_mesh.mesh.topology import AddressPlan
from mlx_mesh.mesh.types import Phase, Placement, Shard, Sharding
from mlx_mesh.node.roster import RankRecord, Roster, Seat


def rank_rows(
    roster: Roster, placement: Placement | None, addresses: AddressPlan, epoch: int, now: float
) -> tuple[RankStatus, ...]:
    """One row per rank. What no heartbeat has told yet is 0 or None, never a guess."""
    return tuple(
        _row(record, roster.seat_of(record.rank), roster, placement, addresses, epoch, now)
        for record in roster.ranks
    )


def _row(
    record: RankRecord,
    seat: Seat,
    roster: Roster,
    placement: Placement | None,
    addresses: AddressPlan,
    epoch: int,
    now: float,
) -> RankStatus:
    member = seat.member if seat.is_taken else None
    beat = record.beat
    loaded = record.reached.get(Phase.LOADED)
    return RankStatus(
        rank=roster.mesh.first_rank + record.rank,
        user_rank=roster.mesh.first_rank + _user_rank(record.rank, seat, roster),
        host=seat.host,
        address=addresses.data.get(seat.host, member.join.address if member else ""),
        agent_pid=member.join.agent_pid if member else 0,
        engine_pid=record.pid if record.exit is None else 0,
        epoch=epoch,
        phase=phase_of(record),
        step=beat.step if beat else 0,
        layers=describe_layers(placement.sharding, placement.shards[record.rank]) if placement else "",
        weights_bytes=loaded.weights_bytes if loaded and record.exit is None else 0,
        memory_bytes=beat.memory_bytes if beat and record.exit is None else 0,
        peak_memory_bytes=beat.peak_memory_bytes if beat else 0,
        last_heartbeat_s=None if record.beat_at is None else round(max(0.0, now - record.beat_at), 3),
        is_leader=record.rank == 0,
        chip=member.join.facts.chip if member else "",
        detail=_detail(record, seat),
        prefix=beat.prefix if beat and record.exit is None else PrefixCounters(),
        link=_link(record, roster, addresses),
        replica=roster.mesh.replica + 1,
    )


def _link(record: RankRecord, roster: Roster, addresses: AddressPlan) -> LinkStatus | None:
    """From this rank to the next one, when it is connected."""
    connected = record.reached.get(Phase.CONNECTED)
    measured = connected.link if connected else None
    if measured is None:
        return None
    peer_host = roster.host_of(measured.peer)
    is_local = peer_host == roster.host_of(record.rank)
    chosen = None if is_local else addresses.links.get(peer_host)
    return LinkStatus(
        peer=roster.mesh.first_rank + measured.peer,
        peer_address=addresses.data.get(peer_host, ""),
        interface=chosen.dials.interface if chosen else "",
        link_class=LinkClass.LOOPBACK if is_local else chosen.link_class if chosen else "",
        evidence=chosen.dials.evidence if chosen else "",
        rtt_ms=round(measured.rtt_ns / 1e6, 3),
        bandwidth_bytes_per_s=measured.bandwidth,
    )


def _user_rank(rank: int, seat: Seat, roster: Roster) -> int:
    """The number that a user gave a rank by hand, which it keeps when others are missing."""
    if seat.plan.name and not roster.mesh.server_rank:  # nobody gave it one
        return rank
    planned = seat.planned_ranks[seat.ranks.index(rank)]
    return (planned + roster.mesh.server_rank) % roster.full_size


def phase_of(record: RankRecord) -> Phase:
    """A rank that ended or failed is that, whatever it reached before."""
    if record.failure is not None:
        return Phase.FAILED
    return Phase.STOPPED if record.exit is not None else record.phase


def describe_layers(sharding: Sharding, shard: Shard) -> str:
    """ "0-14" of a pipeline stage, "all" else."""
    return f"{shard.start_layer}-{shard.end_layer - 1}" if sharding is Sharding.PIPELINE else "all"


def _detail(record: RankRecord, seat: Seat) -> str:
    if seat.member is None:
        return "waiting for its agent"
    if seat.member.lost:
        return seat.member.lost
    if record.failure is not None:
        return record.failure.message
    if record.exit is not None:
        return f"its engine {record.exit_words()}"
    if record.phase is Phase.LOADING and record.progress is not None:
        return f"{record.progress.done} of {record.progress.total} layers"
    return ""
