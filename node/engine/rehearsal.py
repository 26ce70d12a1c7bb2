"""N ranks in one process, one at a time: a greenlet each, with stand-ins for send, receive and sum.

A rank that needs what another has not given yet lets the next one run. Ranks that all wait for each other
raise, where a real data group would hang. (Threads will not do: MLX's streams belong to one thread.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from greenlet import getcurrent, greenlet


class Rehearsal:
    """Runs one function per rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.messages: dict[tuple[int, int], deque[Any]] = {}
        self.sums: list[dict[int, Any]] = []  # per sum so far: rank -> its part
        self.progress = 0

    def run(self, body: Callable[[int, Any], Any]) -> list[Any]:
        """`body(rank, exchange)` on every rank; their results by rank. Raises what a rank raises."""
        results: list[Any] = [None] * self.world_size
        main = getcurrent()

        def start(rank: int) -> None:
            results[rank] = body(rank, RehearsedExchange(self, rank))

        ranks = [greenlet(lambda rank=rank: start(rank), parent=main) for rank in range(self.world_size)]
        while any(not rank.dead for rank in ranks):
            before = self.progress, sum(rank.dead for rank in ranks)
            for rank in reversed(ranks):  # in a pipeline the highest has the first layers
                if not rank.dead:
                    rank.switch()
            if before == (self.progress, sum(rank.dead for rank in ranks)):
                raise RuntimeError("the ranks wait for each other")
        return results

    def wait(self) -> None:
        """Let the other ranks run."""
        getcurrent().parent.switch()


class RehearsedExchange:
    """The Exchange protocol inside a rehearsal."""

    def __init__(self, rehearsal: Rehearsal, rank: int) -> None:
        self.rehearsal = rehearsal
        self.rank = rank
        self.world_size = rehearsal.world_size
        self._num_sums = 0

    # Every value is handed on as a new array object: models change arrays in place.

    def send(self, x: Any, to: int) -> Any:
        self.rehearsal.messages.setdefault((self.rank, to), deque()).append(mx.stop_gradient(x))
        self.rehearsal.progress += 1
        return x

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Any:
        queue = self.rehearsal.messages.setdefault((source, self.rank), deque())
        while not queue:
            self.rehearsal.wait()
        self.rehearsal.progress += 1
        x = queue.popleft()
        if tuple(x.shape) != tuple(shape) or x.dtype != dtype:
            raise RuntimeError(f"sent {x.shape} {x.dtype}, expected {shape} {dtype}")
        return mx.stop_gradient(x)

    def all_sum(self, x: Any) -> Any:
        number, self._num_sums = self._num_sums, self._num_sums + 1
        sums = self.rehearsal.sums
        if len(sums) <= number:
            sums.append({})
        parts = sums[number]
        parts[self.rank] = mx.stop_gradient(x)
        self.rehearsal.progress += 1
        while len(parts) < self.world_size:
            self.rehearsal.wait()
        if len({(tuple(part.shape), part.dtype) for part in parts.values()}) > 1:
            raise RuntimeError(f"ranks add up arrays of shapes {[part.shape for part in parts.values()]}")
        total = parts[0]
        for rank in range(1, self.world_size):
            total = total + parts[rank]
        return mx.stop_gradient(total)

    def all_gather(self, x: Any) -> Any:
        whole = mx.zeros((self.world_size, *x.shape), x.dtype)
        whole[self.rank] = x
        return self.all_sum(whole)

    def broadcast_ids(self, ids: Any, num_rows: int, after: list[Any]) -> Any:
        return self.all_sum(mx.zeros((num_rows,), mx.uint32) if ids is None else ids)
