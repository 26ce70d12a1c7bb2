"""What happened to a mesh since it began, as numbers for /metrics. The coordinator counts, this formats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import get_args

from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.messages import Metric
from mlx_mesh.mesh.prefix_settings import PrefixCounters
from mlx_mesh.node.desk import Desk
from mlx_mesh.node.lineup import Change
from mlx_mesh.node.roster import RankRecord, Roster


@dataclass(slots=True)
class MeshCounters:
    """Counts and seconds over all epochs."""

    num_epochs: int = 0
    verdicts: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # kind, phase, rank or host
    silent_s: float = 0.0  # for how long failed ranks had shown no life when they were judged
    num_resumed: int = 0
    resume_s: float = 0.0  # from verdict to ready
    last_resume_s: float = 0.0
    first_load_s: float = 0.0  # of the first epoch: from its begin to ready
    num_convicted: int = 0
    num_divergences: int = 0

    def note_ready(self, began_s: float, ended_s: float | None) -> None:
        """An epoch is ready, so long after it began, and after the verdict on the one before."""
        if ended_s is None:
            self.first_load_s = self.first_load_s or began_s  # not of a model that was unloaded and came back
        else:
            self.num_resumed += 1
            self.resume_s += ended_s
            self.last_resume_s = ended_s


@dataclass(frozen=True, slots=True)
class ChannelCounters:
    """What the control channel turned away."""

    failed_handshakes: int
    rejected_frames: int
    rejected_messages: Counter[str]  # by what was wrong
    lost_links: int
    lost_agents: int


def metrics_of(
    counters: MeshCounters,
    channel: ChannelCounters,
    roster: Roster,
    desk: Desk,
    kv: KvBudget,
    changes: Mapping[Change, int],
) -> tuple[Metric, ...]:
    """Everything, in the order in which it is shown."""
    return (
        *_of_epochs(counters),
        *_of_hosts(roster, changes),
        *_of_channel(channel),
        *_of_requests(desk),
        *(m for record in roster.ranks for m in _of_rank(record, roster, kv)),
    )


def _counter(name: str, text: str, value: float, **labels: str) -> Metric:
    return Metric(name=f"mlx_mesh_{name}_total", kind="counter", help=text, value=float(value), labels=labels)


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    return Metric(name=f"mlx_mesh_{name}", kind="gauge", help=text, value=float(value), labels=labels)


def _of_epochs(counters: MeshCounters) -> Iterator[Metric]:
    yield _counter("epochs", "Epochs that began", counters.num_epochs)
    for (kind, phase, who), count in sorted(counters.verdicts.items()):
        text = "Epochs that broke, by kind of failure, phase and who was at fault"
        yield _counter("verdicts", text, count, kind=kind, phase=phase, who=who)
    yield _counter("silent_seconds", "Seconds without a sign of life before verdicts", counters.silent_s)
    yield _counter("recoveries", "Epochs that became ready after another broke", counters.num_resumed)
    yield _counter("recovery_seconds", "Seconds from a verdict until ready again", counters.resume_s)
    yield _gauge("last_recovery_seconds", "The newest of these", counters.last_resume_s)
    yield _gauge("first_load_seconds", "Seconds from the first epoch's begin to ready", counters.first_load_s)
    text = "Requests that ended because they ended an engine while alone in it"
    yield _counter("convicted_requests", text, counters.num_convicted)
    yield _counter("divergences", "Epochs that ended because ranks disagreed", counters.num_divergences)


def _of_hosts(roster: Roster, changes: Mapping[Change, int]) -> Iterator[Metric]:
    """The number of ranks is the front end's own mlx_mesh_world_size."""
    yield _gauge("hosts", "Hosts of the hostfile", len(roster.seats))
    yield _gauge(
        "hosts_serving", "Hosts that hold a part of the model", sum(bool(s.ranks) for s in roster.seats)
    )
    yield _gauge("hosts_connected", "Hosts whose agent is there", sum(s.is_taken for s in roster.seats))
    for seat, member in roster.members():
        text = "1 while this host is short of memory, so that no new request is taken"
        yield _gauge("host_memory_pressure", text, float(bool(member.pressure)), host=seat.host)
    for why in get_args(Change):
        text = "Hosts that left the plan or came into it, by reason"
        yield _counter("host_changes", text, changes.get(why, 0), why=why)


def _of_channel(channel: ChannelCounters) -> Iterator[Metric]:
    text = "Connections to the coordinator that did not prove the mesh secret"
    yield _counter("handshakes_rejected", text, channel.failed_handshakes)
    rejected = {name: channel.rejected_messages[name] for name in ("sender", "rank", "epoch", "sequence")}
    for why, count in {"schema": channel.rejected_frames, **rejected}.items():
        yield _counter("frames_rejected", "Control messages that changed nothing", count, why=why)
    yield _counter("links_lost", "Connections to the coordinator that ended", channel.lost_links)
    yield _counter("agents_lost", "Connections of members that ended without a bye", channel.lost_agents)


def _of_requests(desk: Desk) -> Iterator[Metric]:
    yield _gauge("requests_open", "Requests in the journal", len(desk.journal))
    yield _gauge("requests_suspect", "Of these, suspected to end engines", desk.journal.num_suspects)
    yield _counter("requests_resumed", "Requests that went on in a later epoch", desk.num_resumed)
    yield _counter("requests_cancelled", "Requests cancelled by their client", desk.num_cancelled)
    yield _counter("requests_expired", "Requests that reached their deadline", desk.num_expired)
    for code, count in sorted(desk.num_refused.items()):
        yield _counter("requests_refused", "Requests that were not taken", count, code=code)


def _of_rank(record: RankRecord, roster: Roster, kv: KvBudget) -> Iterator[Metric]:
    beat = record.beat
    if beat is None:
        return
    number = roster.mesh.first_rank + record.rank
    labels = {"rank": str(number), "host": roster.host_of(record.rank)}
    yield _gauge("rank_step", "Steps of this epoch", beat.step, **labels)
    yield _gauge("rank_steps_seconds", "Seconds in the steps of this epoch", beat.steps_s, **labels)
    yield _gauge("rank_running", "Sequences that are computed", beat.num_sequences, **labels)
    yield _gauge("rank_waiting", "Sequences that wait for a place", beat.num_waiting, **labels)
    yield _counter("rank_preempted", "Sequences that made room for older ones", beat.num_preempted, **labels)
    if record.rank < len(kv.ranks):
        mine: RankKv = kv.ranks[record.rank]
        reserved = mine.bytes_of(beat.num_sequences, beat.kv_longest)
        yield _gauge("rank_kv_bytes", "Predicted bytes of all caches, padding included", reserved, **labels)
        if mine.budget_bytes is not None:
            yield _gauge("rank_kv_budget_bytes", "What they may take", mine.budget_bytes, **labels)
    prefix = beat.prefix
    yield _gauge("rank_prefix_entries", "Prefixes whose caches are kept", prefix.num_entries, **labels)
    yield _gauge("rank_prefix_bytes", "What these take", prefix.num_bytes, **labels)
    if record.rank == 0:
        yield from _of_prefixes(prefix)
    yield _gauge("rank_memory_bytes", "Bytes that MLX holds", beat.memory_bytes, **labels)
    yield _gauge("rank_peak_memory_bytes", "The most it held", beat.peak_memory_bytes, **labels)


def _of_prefixes(prefix: PrefixCounters) -> Iterator[Metric]:
    """Of this epoch; every rank does the same."""
    yield _gauge("prefix_limit_bytes", "The most that kept prefixes take on rank 0", prefix.limit_bytes)
    yield _counter("prefix_hits", "Sequences that began with a kept prefix", prefix.num_hits)
    yield _counter("prefix_misses", "Sequences that did not", prefix.num_misses)
    yield _counter("prefix_tokens", "Prompt tokens that were not computed again", prefix.num_tokens)
    yield _counter("prefix_stored", "Caches that were kept", prefix.num_stored)
    yield _counter(
        "prefix_evicted", "Of these, dropped for want of room or for a longer one", prefix.num_evicted
    )
