"""N ranks in one process: a greenlet each, with a stand-in for send, recv and all_sum.

A rank that needs another's value switches to the next greenlet. Ranks that all wait for each other are a
deadlock and raise, where a real ring would hang. Values are handed on as new array objects, because models
change arrays in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx
from greenlet import getcurrent, greenlet


class Deadlock(Exception):
    """Every rank that has not ended waits for another one."""


class Simulator:
    """Runs one function per rank; `exchange(rank)` is what it gives to the code under test."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.messages: dict[tuple[int, int], deque[Any]] = {}
        self.sums: list[dict[int, Any]] = []  # per all_sum so far: rank -> its part
        self.results: list[Any] = [None] * world_size
        self.num_sent = 0
        self.progress = 0
        self._exchanges = [SimulatedExchange(self, rank) for rank in range(world_size)]

    def exchange(self, rank: int) -> SimulatedExchange:
        return self._exchanges[rank]

    def run(self, body: Callable[[int, SimulatedExchange], Any]) -> list[Any]:
        """`body(rank, exchange)` on every rank, interleaved; their results by rank."""
        main = getcurrent()

        def start(rank: int) -> None:
            self.results[rank] = body(rank, self._exchanges[rank])

        ranks = [greenlet(lambda rank=rank: start(rank), parent=main) for rank in range(self.world_size)]
        idle_rounds, seen = 0, -1
        while not all(rank.dead for rank in ranks):
            ended = sum(rank.dead for rank in ranks)
            for rank in ranks:
                if not rank.dead:
                    rank.switch()
            if self.progress == seen and ended == sum(rank.dead for rank in ranks):
                idle_rounds += 1
                if idle_rounds > 2:
                    raise Deadlock(f"all of {self.world_size} ranks wait for each other")
            else:
                idle_rounds, seen = 0, self.progress
        unread = sum(len(queue) for queue in self.messages.values())
        assert unread == 0, f"{unread} messages were sent and never received"
        return list(self.results)

    def wait(self) -> None:
        """Let the other ranks run."""
        getcurrent().parent.switch()


class SimulatedExchange:
    """The Exchange protocol over the simulator."""

    def __init__(self, simulator: Simulator, rank: int) -> None:
        self.simulator = simulator
        self.rank = rank
        self.world_size = simulator.world_size
        self._num_sums = 0

    def send(self, x: Any, to: int) -> Any:
        assert (self.rank - to) % self.world_size in (1, self.world_size - 1), "only ring neighbours"
        self.simulator.messages.setdefault((self.rank, to), deque()).append(mx.stop_gradient(x))
        self.simulator.progress += 1
        self.simulator.num_sent += 1
        return x

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Any:
        queue = self.simulator.messages.setdefault((source, self.rank), deque())
        while not queue:
            self.simulator.wait()
        self.simulator.progress += 1
        x = queue.popleft()
        assert tuple(x.shape) == tuple(shape), f"sent {x.shape}, expected {shape}"
        assert x.dtype == dtype, f"sent {x.dtype}, expected {dtype}"
        return mx.stop_gradient(x)

    def all_sum(self, x: Any) -> Any:
        number, self._num_sums = self._num_sums, self._num_sums + 1
        sums = self.simulator.sums
        if len(sums) <= number:
            sums.append({})
        parts = sums[number]
        parts[self.rank] = mx.stop_gradient(x)
        self.simulator.progress += 1
        while len(parts) < self.world_size:
            self.simulator.wait()
        assert len({(tuple(part.shape), part.dtype) for part in parts.values()}) == 1, "shapes differ"
        total = parts[0]
        for rank in range(1, self.world_size):
            total = total + parts[rank]
        return mx.stop_gradient(total)

    def all_gather(self, x: Any) -> Any:
        whole = mx.zeros((self.world_size, *x.shape), x.dtype)
        whole[self.rank] = x
        return self.all_sum(whole)

    def settle(self) -> None:
        """Nothing is under way here."""

    def broadcast_ids(self, ids: Any, num_rows: int, after: list[Any]) -> Any:
        mine = mx.zeros((num_rows,), dtype=mx.uint32) if ids is None else ids.astype(mx.uint32)
        return self.all_sum(mine)
