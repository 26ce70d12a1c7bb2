"""The exchanges between ranks over mx.distributed, one for each form that backends offer.

Order is everything: a backend pairs the n-th operation of one rank with the n-th of another, by
position only. Each operation therefore depends on the ones before it (`mx.depends`), except a receive, which
has no input to hang a dependency on and is put into its stream at once instead.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx

from mlx_mesh.node.engine.exchange import Array, Exchange


class DataExchange(Exchange, Protocol):
    """An exchange that owns real connections."""

    def settle(self) -> None:
        """Wait until nothing is under way: an open collective would burn a core for as long as it waits."""
        ...


class SoloExchange:
    """World size 1: everything is already here."""

    rank = 0
    world_size = 1

    def send(self, x: Array, to: int) -> Array:
        raise AssertionError(f"a mesh of one rank sends nothing, not to rank {to}")

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Array:
        raise AssertionError(f"a mesh of one rank receives nothing, not from rank {source}")

    def all_sum(self, x: Array) -> Array:
        return x

    def all_gather(self, x: Array) -> Array:
        return x[None]

    def broadcast_ids(self, ids: Array | None, num_rows: int, after: list[Array]) -> Array:
        assert ids is not None
        return ids

    def settle(self) -> None:
        """See DataExchange."""


class _GroupExchange:
    """What both forms share: the chain, sums and the broadcast."""

    def __init__(self, group: Any, stream: Any) -> None:
        self.rank: int = group.rank()
        self.world_size: int = group.size()
        self._group = group
        self._stream = stream
        self._before: list[Array] = []  # results of the operations that the next one comes after

    def all_sum(self, x: Array) -> Array:
        return self._note(mx.distributed.all_sum(self._after(x), group=self._group, stream=self._stream))

    def all_gather(self, x: Array) -> Array:
        # Not noted: of a prefill's logits nobody needs any, and then nobody computes or sends them.
        return mx.distributed.all_gather(self._after(x)[None], group=self._group, stream=self._stream)

    def broadcast_ids(self, ids: Array | None, num_rows: int, after: list[Array]) -> Array:
        x = mx.zeros((num_rows,), mx.uint32) if ids is None else ids
        # Without this a follower's zeros would overtake its own forward and meet the leader's forward.
        (x,) = mx.depends([x], after)
        return self.all_sum(x)

    def _after(self, x: Array) -> Array:
        if not self._before:
            return x
        (x,) = mx.depends([x], self._before)
        return x

    def _note(self, result: Array) -> Array:
        self._before = [result]
        return result

    def _finish_queued(self) -> None:
        if self._before:
            mx.eval(self._before)


class RingExchange(_GroupExchange):
    """send and recv between ring neighbours; sums over the ring. Both run on CPU streams of their own, apart
    from the model's, so that a rank computes its next chunk while the last one is still on the wire."""

    def __init__(self, group: Any) -> None:
        # Receives and sums share a stream: they read from the same socket and must keep their order.
        super().__init__(group, mx.new_stream(mx.cpu))
        self._send_stream = mx.new_stream(mx.cpu)

    def send(self, x: Array, to: int) -> Array:
        return self._note(
            mx.distributed.send(self._after(x), to, group=self._group, stream=self._send_stream)
        )

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Array:
        if self._before:
            mx.async_eval(self._before)  # into the stream before the receive
        x = mx.distributed.recv(shape, dtype, source, group=self._group, stream=self._stream)
        mx.async_eval(x)
        self._before = [*self._before, x]
        return x

    def settle(self) -> None:
        """See DataExchange."""
        self._finish_queued()
        mx.synchronize(self._stream)
        mx.synchronize(self._send_stream)


class CollectiveExchange(_GroupExchange):
    """All-rank sums only, for backends without a usable send: nccl has none on CUDA, and on jaccl consecutive
    sends of different shapes are an open bug (https://github.com/ml-explore/mlx/issues/3149).

    A transfer is a sum to which the receiver adds zeros, so both ranks of a world of two take part by
    themselves; in a larger world the others would have to know every shape. phases.load refuses that.
    """

    def __init__(self, group: Any) -> None:
        super().__init__(
            group, None
        )  # the backend's own stream: on CUDA a collective must not name a CPU stream

    def send(self, x: Array, to: int) -> Array:
        return self.all_sum(x)

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Array:
        return self.all_sum(mx.zeros(shape, dtype))

    def settle(self) -> None:
        """See DataExchange."""
        self._finish_queued()
        mx.synchronize()
