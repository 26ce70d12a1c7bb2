"""What `status` shows, from /v1/cluster/status and /v1/cluster/nodes. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mlx_mesh.launcher.text import table
from mlx_mesh.mesh.placement import format_bytes

HEADERS = ("rank", "host", "address", "phase", "step", "layers", "weights", "memory", "engine", "heartbeat")
KEPT_PLAN = (
    "the mesh does not go on with fewer hosts, but waits for one that is lost; `mlx-mesh sync --full` before "
    "`up` lifts that"
)
_MEDIA = {"image": "images", "audio": "audio", "video": "video"}
LINK_HEADERS = ("link", "to", "at", "interface", "round trip", "bandwidth")


def status_lines(status: Mapping[str, Any], nodes: Mapping[str, Any]) -> list[str]:
    """A few words about the mesh, and a row per rank."""
    model, backend = status.get("model", "?"), status.get("backend", "?")
    ready = "ready" if status.get("ready") else f"not ready: {status.get('reason') or 'no reason given'}"
    why = f" ({status['backend_reason']})" if status.get("backend_reason") else ""
    cause = f" ({status['epoch_cause']})" if status.get("epoch_cause") else ""
    replicas = status.get("replicas") or []
    epoch, size = status.get("epoch", "?"), f"world size {status.get('world_size', '?')}"
    if replicas:
        size = f"{len(replicas)} replicas of {size}"
    lines = [
        f"{status.get('name', '?')}: {ready}",
        f"  model {model}",
        *_media_lines(status.get("media") or {}),
        f"  {size}, sharding {status.get('sharding', '?')}, "
        f"backend {backend}{why}{'' if replicas else f', epoch {epoch}{cause}'}",
        f"  requests: {status.get('num_running', 0)} running, {status.get('num_waiting', 0)} waiting",
    ]
    lines += [_replica_line(replica) for replica in replicas]
    if status.get("ready") and status.get("lineup"):
        lines.append(f"  {status['lineup']}")
    lines += ["", *table(HEADERS, [_row(rank) for rank in nodes.get("ranks", [])])]
    links = [(rank, rank["link"]) for rank in nodes.get("ranks", []) if rank.get("link")]
    if links:
        lines += ["", *table(LINK_HEADERS, [_link_row(rank, link) for rank, link in links])]
    hosts = nodes.get("hosts", [])
    if awake := [f"{host['host']} {host['awake']}" for host in hosts if host.get("awake")]:
        lines += ["", f"held awake: {', '.join(awake)}"]
    if events := [f"{host['host']}: {event}" for host in hosts for event in host.get("events", [])]:
        lines += ["", *events]
    if parts := [f"{host['host']} ({host['model_part']})" for host in hosts if host.get("model_part")]:
        lines += ["", f"parts of the model only on {', '.join(parts)}: {KEPT_PLAN}"]
    others = [host for host in nodes.get("hosts", []) if host.get("state") != "serving"]
    if others:
        lines += ["", *(f"{host['host']}: {host['state']}: {host.get('detail', '')}" for host in others)]
    return lines


def _media_lines(media: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What the model takes beside text, and why not, a reason once. None before that is known."""
    if not media:
        return []
    taken = [name for kind, name in _MEDIA.items() if media.get(kind, {}).get("available")]
    refused: dict[str, list[str]] = {}
    for kind, name in _MEDIA.items():
        if name not in taken:
            refused.setdefault(str(media.get(kind, {}).get("reason") or "no reason given"), []).append(name)
    said = [f"takes {', '.join(taken) or 'text only'}"]
    for why, names in refused.items():
        if not why.endswith(" only"):  # that it takes the others only is said already
            said.append(f"no {', '.join(names)}: {why}")
        elif taken:
            said.append(f"no {', '.join(names)}")
    return [f"  {'; '.join(said)}"]


def _replica_line(replica: Mapping[str, Any]) -> str:
    """One replica's state, and how many requests it got, by why."""
    state = "ready" if replica.get("ready") else f"not ready: {replica.get('reason') or 'no reason given'}"
    sent = sum((replica.get("num_requests") or {}).values())
    return (
        f"  replica {replica.get('replica', '?')} ({', '.join(replica.get('hosts', []))}): {state}, "
        f"epoch {replica.get('epoch', '?')} ({replica.get('epoch_cause', '')}), "
        f"{replica.get('num_open', 0)} open, {sent} requests so far"
    )


def _row(rank: Mapping[str, Any]) -> list[str]:
    number = str(rank.get("rank", "?"))
    user_rank = rank.get("user_rank", rank.get("rank"))
    beat = rank.get("last_heartbeat_s")
    return [
        number if user_rank == rank.get("rank") else f"{number} (RANK {user_rank})",
        str(rank.get("host", "?")) + (" *" if rank.get("is_leader") else ""),
        str(rank.get("address", "")) or "-",
        str(rank.get("phase", "?")),
        str(rank.get("step", "?")),
        str(rank.get("layers", "?")),
        format_bytes(int(rank.get("weights_bytes") or 0)),
        format_bytes(int(rank.get("memory_bytes") or 0)),
        str(rank.get("engine_pid", "?")),
        "-" if beat is None else f"{float(beat):.1f} s",
    ]


def _link_row(rank: Mapping[str, Any], link: Mapping[str, Any]) -> list[str]:
    """From one rank to the next, as it was measured when they connected."""
    name, kind = str(link.get("interface") or ""), str(link.get("evidence") or link.get("link_class") or "")
    rtt, rate = link.get("rtt_ms"), link.get("bandwidth_bytes_per_s")
    return [
        str(rank.get("rank", "?")),
        str(link.get("peer", "?")),
        str(link.get("peer_address") or "-"),
        f"{name} ({kind})" if name else kind or "-",
        "-" if rtt is None else f"{float(rtt):.2f} ms",
        "-" if rate is None else f"{float(rate) / 1e9:.2f} GB/s",
    ]
