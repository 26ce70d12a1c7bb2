"""Hosts that were seen once: `.peers.json` in the state folder, which no mesh can be named after.

At most MAX_HOSTS of the last CACHE_KEPT_S. It says where to look when multicast brings nothing, and no more:
what is in it is never taken for a host that is there.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mlx_mesh.mesh.discovery import CACHE_KEPT_S, MAX_HOSTS, Announcement, Sighting

MAX_FILE_BYTES = 1 << 20


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    announcement: Announcement
    seen_at: float  # seconds since 1970


def peers_file(state: Path) -> Path:
    return state / ".peers.json"


def read_peers(state: Path, now: float) -> list[Sighting]:
    """What is remembered, the latest first. A file that cannot be read remembers nothing."""
    return [
        Sighting(announcement=peer.announcement, source="cache", age_s=round(max(0.0, now - peer.seen_at), 1))
        for peer in _read(state, now)
    ]


def _read(state: Path, now: float) -> list[Peer]:
    path = peers_file(state)
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        if path.stat().st_size <= MAX_FILE_BYTES:
            peers = msgspec.json.decode(path.read_bytes(), type=list[Peer])
            fresh = [peer for peer in peers if now - peer.seen_at < CACHE_KEPT_S]
            return sorted(fresh, key=lambda peer: -peer.seen_at)[:MAX_HOSTS]
    return []


def remember(state: Path, announcements: Sequence[Announcement], now: float) -> None:
    """Add agents that were seen just now; those that take part in a mesh have no port to be asked at. A disk
    that is full is no reason to see nobody."""
    agents = {_key(said): said for said in announcements if said.role == "agent"}
    if not agents:
        return
    kept = [peer for peer in _read(state, now) if _key(peer.announcement) not in agents]
    peers = [*(Peer(announcement=said, seen_at=now) for said in agents.values()), *kept][:MAX_HOSTS]
    path = peers_file(state)
    draft = path.with_name(f".peers.{os.getpid()}")
    with contextlib.suppress(OSError):
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(msgspec.json.encode(peers))
        draft.replace(path)


def _key(said: Announcement) -> tuple[str, str]:
    return said.host, said.key or said.ssh or said.hardware
