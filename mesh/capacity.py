"""What the hosts offer and what the mesh is for: the inputs of placement beside the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.footprint import ModelFootprint
from mlx_mesh.mesh.links import Link
from mlx_mesh.mesh.types import Sharding

_GIB = 1024**3


def mac_usable_bytes(memory_bytes: int, wired_limit_mb: int = 0) -> int:
    """What the GPU of a Mac may wire: `iogpu.wired_limit_mb`, or when that is 0 macOS's default, which is two
    thirds of up to 36 GB of memory and three quarters of more (the exact step is not documented)."""
    if wired_limit_mb > 0:
        return min(memory_bytes, wired_limit_mb * 1024**2)
    return memory_bytes * 2 // 3 if memory_bytes <= 36 * _GIB else memory_bytes * 3 // 4


def wired_limit_advice(name: str, memory_bytes: int, usable_bytes: int) -> str:
    """How a Mac can give its GPU more: a line for people, '' when it already gives what is sensible. An
    eighth of the memory, at least 8 GiB, stays for macOS."""
    sensible = memory_bytes - max(memory_bytes // 8, 8 * _GIB)
    if sensible <= usable_bytes:
        return ""
    return (
        f"On {name} the GPU may use {usable_bytes / 1e9:.1f} of {memory_bytes / 1e9:.1f} GB; "
        f"`sudo sysctl iogpu.wired_limit_mb={sensible // 1024**2}` there raises it to "
        f"{sensible / 1e9:.1f} GB until the next boot."
    )


class HostCapacity(msgspec.Struct, frozen=True, kw_only=True):
    """One host, in rank order. `memory_limit_bytes` can only lower `usable_memory_bytes`; 0 = no limit."""

    name: str
    slots: int
    usable_memory_bytes: int  # of the whole host, shared by its slots
    layers: tuple[int, ...] = ()  # pinned number of layers of each slot; () = planned
    memory_limit_bytes: int = 0
    memory_rate: int = 0  # bytes a second that weights are read with; 0 = unknown
    matrix_rate: int = 0  # half-precision operations a second; 0 = unknown

    @property
    def rank_memory_bytes(self) -> int:
        """What one rank of this host may use."""
        limit = self.memory_limit_bytes or self.usable_memory_bytes
        return min(limit, self.usable_memory_bytes) // self.slots


class PlacementRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Memory is planned for so many sequences of so many tokens (never more than the model's context)."""

    sharding: Sharding = Sharding.AUTO
    context_tokens: int = 4096
    num_sequences: int = 4
    link: Link | None = None  # the slowest between hosts; None = unknown. Within a host it is the loopback

    def context_for(self, footprint: ModelFootprint) -> int:
        """The planned context in tokens: a model cannot use more than its own."""
        return usable_context(self.context_tokens, footprint.context_length)


def usable_context(asked: int, own: int) -> int:
    """Tokens of the context when `asked` were wished for and the model has its `own`; 0 = not given, not
    known."""
    return min(asked, own) if asked and own else asked or own


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank before anything is placed on it."""

    rank: int
    host: str
    memory_bytes: int
    pinned_layers: int  # 0 = free
    memory_rate: int = 0  # of its host; 0 = unknown
    matrix_rate: int = 0
    slots: int = 1  # ranks that share this host's rates when they work at the same time

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


def ranks_of(hosts: Sequence[HostCapacity]) -> tuple[Rank, ...]:
    """All ranks, numbered over hosts in order, then slots. Raises PlacementError when there is none, or a
    host offers no memory."""
    if not hosts:
        raise PlacementError("There are no hosts to place the model on.")
    ranks: list[Rank] = []
    for host in hosts:
        if host.slots < 1:
            raise PlacementError(f"Host {host.name} has {host.slots} slots; it needs at least one.")
        if host.layers and (len(host.layers) != host.slots or min(host.layers) < 1):
            raise PlacementError(
                f"Host {host.name} has {host.slots} slots pinned to {list(host.layers)} layers; each slot "
                "needs one number, at least 1."
            )
        if host.rank_memory_bytes < 1:
            raise PlacementError(
                f"Host {host.name} offers no memory (usable {host.usable_memory_bytes} bytes, limit "
                f"{host.memory_limit_bytes}). Free some, raise `memory_limit`, or leave the host out."
            )
        for pinned in host.layers or (0,) * host.slots:
            ranks.append(
                Rank(
                    len(ranks),
                    host.name,
                    host.rank_memory_bytes,
                    pinned,
                    host.memory_rate,
                    host.matrix_rate,
                    host.slots,
                )
            )
    return tuple(ranks)
