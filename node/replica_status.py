"""Several replicas as one mesh: its readiness, its status, its numbers. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from mlx_mesh.mesh.kv_budget import UNKNOWN_CONTEXT, KvBudget
from mlx_mesh.mesh.messages import MeshStatus, Metric, Readiness, ReplicaStatus
from mlx_mesh.mesh.routing import Why

Counts = Mapping[tuple[int, Why], int]


def merge_readiness(replicas: Sequence[Readiness], *, is_complete: bool) -> Readiness:
    """What the front end is told. `is_complete`: each was ready once; before that the mesh is starting. A
    request must fit whichever replica gets it, so the least room counts."""
    if len(replicas) == 1:
        return msgspec.structs.replace(replicas[0], num_ready=int(replicas[0].ready))
    ready = [one for one in replicas if one.ready]
    shown = ready[0] if ready else replicas[0]
    contexts = [one.context_length for one in replicas if one.context_length]
    return msgspec.structs.replace(
        shown,
        ready=is_complete and bool(ready),
        reason="" if is_complete and ready else _why_not(replicas),
        context_length=min(contexts, default=0),
        kv=min((one.kv for one in replicas), key=_room),
        lineup=_lineup(replicas) if ready else "",
        num_replicas=len(replicas),
        num_ready=len(ready),
        code="" if ready else replicas[0].code if len({one.code for one in replicas}) == 1 else "",
    )


def _room(kv: KvBudget) -> int:
    return kv.longest_sequence(0) or UNKNOWN_CONTEXT


def _why_not(replicas: Sequence[Readiness]) -> str:
    return "; ".join(f"replica {at + 1}: {one.reason}" for at, one in enumerate(replicas) if not one.ready)


def _lineup(replicas: Sequence[Readiness]) -> str:
    """How replicas fall short; '' when none does."""
    parts = [f"replica {at + 1}: {one.lineup}" for at, one in enumerate(replicas) if one.ready and one.lineup]
    if missing := _why_not(replicas):
        num_ready = sum(one.ready for one in replicas)
        parts.insert(0, f"serving with {num_ready} of {len(replicas)} replicas: {missing}")
    return "; ".join(parts)


def merge_status(replicas: Sequence[MeshStatus], readiness: Readiness, counts: Counts) -> MeshStatus:
    """See MeshStatus."""
    first = replicas[0]
    if len(replicas) == 1:
        return first
    return msgspec.structs.replace(
        first,
        ready=readiness.ready,
        reason=readiness.reason,
        code=readiness.code,
        ranks=tuple(row for one in replicas for row in one.ranks),
        hosts=tuple(row for one in replicas for row in one.hosts),
        num_running=sum(one.num_running for one in replicas),
        num_waiting=sum(one.num_waiting for one in replicas),
        num_open=sum(one.num_open for one in replicas),
        restarts=sum(one.restarts for one in replicas),
        context_length=readiness.context_length or first.context_length,
        lineup=readiness.lineup,
        metrics=tuple(metric for at, one in enumerate(replicas) for metric in _labelled(one.metrics, at)),
        replicas=tuple(_row(one, at, counts) for at, one in enumerate(replicas)),
    )


def _labelled(metrics: Sequence[Metric], at: int) -> Iterator[Metric]:
    for metric in metrics:
        yield msgspec.structs.replace(metric, labels={**metric.labels, "replica": str(at + 1)})


def _row(status: MeshStatus, at: int, counts: Counts) -> ReplicaStatus:
    return ReplicaStatus(
        replica=at + 1,
        ready=status.ready,
        reason=status.reason,
        epoch=status.epoch,
        epoch_cause=status.epoch_cause,
        hosts=tuple(row.host for row in status.hosts),
        placement=status.placement,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        num_open=status.num_open,
        restarts=status.restarts,
        num_requests=dict(_counts_of(counts, at)),
        lineup=status.lineup,
    )


def _counts_of(counts: Counts, at: int) -> Counter[str]:
    found: Counter[str] = Counter()
    for (replica, why), count in counts.items():
        if replica == at:
            found[why] += count
    return found


def replica_metrics(readiness: Readiness, counts: Counts) -> tuple[Metric, ...]:
    """What only several replicas have."""
    num_ready = float(readiness.num_ready)
    return (
        Metric(
            name="mlx_mesh_replicas",
            kind="gauge",
            help="Replicas of the model",
            value=float(readiness.num_replicas),
        ),
        Metric(name="mlx_mesh_replicas_ready", kind="gauge", help="Of these, ready", value=num_ready),
        *(
            Metric(
                name="mlx_mesh_replica_requests_total",
                kind="counter",
                help="Requests that a replica got, by why it was chosen",
                value=float(count),
                labels={"replica": str(replica + 1), "why": why},
            )
            for (replica, why), count in sorted(counts.items())
        ),
    )
