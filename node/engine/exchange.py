"""What ranks say to each other inside a step: one interface, whatever the backend."""

from __future__ import annotations

from typing import Any, Protocol

Array = Any  # mlx.core.array; mlx publishes no complete types


class Exchange(Protocol):
    """Ordered collectives of one rank. Every call takes part in one chain: each collective depends on the
    one before (`mx.depends`), because an independent one can overtake and both ranks then hang.
    All ranks must make the same calls in the same order, apart from send on one side being recv on the other.
    """

    rank: int
    world_size: int

    def send(self, x: Array, to: int) -> Array:
        """Queue `x` for a ring neighbour, `rank - 1` in a pipeline. Evaluate the result to have it sent."""
        ...

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Array:
        """What the neighbour `source` sends; lazy."""
        ...

    def all_sum(self, x: Array) -> Array:
        """Sum over all ranks; `x` has one shape on all of them."""
        ...

    def all_gather(self, x: Array) -> Array:
        """(world_size, *x.shape): every rank's `x`, which has one shape on all of them. It comes after the
        operations before it, but none after it waits for it: ranks evaluate it all or not at all, at the same
        point of their program."""
        ...

    def broadcast_ids(self, ids: Array | None, num_rows: int, after: list[Array]) -> Array:
        """The leader's `ids` (num_rows,) uint32 on every rank; followers pass None. `after`: arrays whose
        collectives come first on this rank (its forward's output)."""
        ...
