"""One stage of a pipeline: the model's own forward runs unchanged, but only the local layers compute.

The other layers are ghosts. A ghost answers with what the trace says its layer would answer in form and
advances its cache by zeros; where a local layer needs an array that an earlier stage made, the ghost that
stands for the maker returns what arrives from that stage. So whatever the model computes between its layers
runs on every rank alike, and what nobody needs is never evaluated, hence never read.

Stage s is rank N-1-s: rank 0, the leader, is the last stage and has the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from mlx_mesh.mesh.errors import BringUpError, PlacementError
from mlx_mesh.mesh.types import Placement
from mlx_mesh.node.engine.caches import find_cache, tick
from mlx_mesh.node.engine.dependencies import TAIL
from mlx_mesh.node.engine.exchange import Exchange
from mlx_mesh.node.engine.ghosts import (
    Attributes,
    Entries,
    Form,
    Items,
    LayerCall,
    Made,
    Ref,
    ghost_answer,
    made_arrays,
    stand_in,
)
from mlx_mesh.node.engine.hooks import Original
from mlx_mesh.node.engine.trace import ModelTrace

_SETTLE_EVERY = 16  # forwards between two evaluations of the ghosts' caches
_CHECK_SHAPES = ((1, 3), (2, 5), (1, 8))  # (batch, length): three different shapes in a row over each cut


@dataclass(frozen=True, slots=True)
class Transfer:
    """Arrays that go from one rank to a ring neighbour just before the call at `position`."""

    position: int
    sender: int
    receiver: int
    refs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """Who runs which call of a forward, and everything that is sent, in order; the same on every rank."""

    rank_of_call: tuple[int, ...]
    transfers: tuple[Transfer, ...]
    shapes_of: ModelTrace

    def parameters_of(self, rank: int) -> set[str]:
        """Paths of the parameters outside the layers that this rank's part of the forward uses."""
        trace = self.shapes_of
        paths = set(trace.parameters[TAIL]) if rank == 0 else set()
        for position, owner in enumerate(self.rank_of_call):
            if owner == rank:
                paths |= trace.parameters[position]
        return paths


def plan_pipeline(trace: ModelTrace, placement: Placement) -> PipelinePlan:
    """Lay a placement over a traced model. Raises PlacementError when a cut is not legal."""
    num_ranks = placement.world_size
    rank_of_layer: dict[int, int] = {}
    expected = 0
    for rank in reversed(range(num_ranks)):
        shard = placement.shards[rank]
        if shard.start_layer != expected or shard.end_layer <= shard.start_layer:
            raise PlacementError(
                f"Rank {rank} has layers {shard.start_layer} to {shard.end_layer}, but its stage must not be "
                f"empty and must start at layer {expected}. Plan the mesh again."
            )
        for layer in range(shard.start_layer, shard.end_layer):
            rank_of_layer[layer] = rank
        expected = shard.end_layer
        if rank > 0:
            reason = trace.why_not(expected) if expected < trace.num_layers else "no layer is left"
            if reason:
                legal = [k for k in range(1, trace.num_layers) if not trace.why_not(k)]
                raise PlacementError(
                    f"The pipeline cannot be cut before layer {expected}: {reason}. "
                    f"Possible cuts: {legal or 'none'}."
                )
    if expected != trace.num_layers:
        raise PlacementError(f"The placement covers {expected} layers, the model has {trace.num_layers}.")

    owners = tuple(rank_of_layer[call.layer] for call in trace.calls)
    have: list[set[Ref]] = [set() for _ in range(num_ranks)]
    transfers = []
    for position, owner in enumerate(owners):
        if position and owners[position - 1] != owner:
            sender = owners[position - 1]
            refs = tuple(ref for ref in trace.crossing(position) if ref not in have[owner])
            missing = [ref for ref in refs if ref not in have[sender]]
            if missing or (sender - owner) % num_ranks not in (1, num_ranks - 1):
                raise PlacementError(
                    f"What layer {trace.calls[position].layer} needs cannot go from rank {sender} to {owner}."
                )
            transfers.append(Transfer(position, sender, owner, refs))
            have[owner].update(refs)
        have[owner].update(ref for ref in trace.shapes if ref[0] == position)
    lost = [ref for ref in trace.needs[TAIL] if ref not in have[0]]
    if lost or owners[-1] != 0:
        raise PlacementError("The model's output needs values that do not reach the last stage.")
    return PipelinePlan(owners, tuple(transfers), trace)


@dataclass(slots=True, eq=False)
class PipelineRuntime:
    """Runs this rank's part of every forward. On rank 0 the model returns its logits, on the others zeros of
    shape (batch, length, 1)."""

    plan: PipelinePlan
    exchange: Exchange
    on_layer: Callable[[int], None] | None = None
    _position: int = 0
    _batch: int = 0
    _length: int = 0
    _values: dict[Ref, Any] = field(default_factory=dict)
    _forwards: int = 0
    _ticked: list[Any] = field(default_factory=list)
    _sends: dict[int, tuple[Transfer, ...]] = field(default_factory=dict)  # after this call
    _arrivals: dict[int, tuple[tuple[Ref, int], ...]] = field(default_factory=dict)  # at this ghost call
    _waits: set[int] = field(default_factory=set)  # ghost calls that complete a transfer
    _kept: set[Ref] = field(default_factory=set)  # values that outlive their call

    def __post_init__(self) -> None:
        rank = self.exchange.rank
        arrivals: dict[int, list[tuple[Ref, int]]] = {}
        for transfer in self.plan.transfers:
            before = transfer.position - 1
            if transfer.sender == rank:
                self._sends[before] = (*self._sends.get(before, ()), transfer)
                self._kept.update(transfer.refs)
            if transfer.receiver == rank:
                self._waits.add(before)
                for ref in transfer.refs:
                    arrivals.setdefault(ref[0], []).append((ref, transfer.sender))
        self._arrivals = {position: tuple(refs) for position, refs in arrivals.items()}
        for position, call in enumerate(self.plan.shapes_of.calls):
            self._kept.update(ref for ref in _refs_of(call) if ref[0] != position)

    def call_model(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        tokens = next(x for x in (*args, *kwargs.values()) if isinstance(x, mx.array) and x.ndim >= 2)
        self._batch, self._length = tokens.shape[:2]
        self._position = 0
        self._values.clear()
        self._ticked.clear()
        out = original(*args, **kwargs)
        if self._position != len(self.plan.rank_of_call):
            raise RuntimeError(
                f"the model made {self._position} layer calls, its trace has {len(self.plan.rank_of_call)}"
            )
        self._values.clear()
        self._settle()
        return out if self.exchange.rank == 0 else mx.zeros((self._batch, self._length, 1))

    def call_layer(
        self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        position = self._position
        self._position += 1
        call = self.plan.shapes_of.calls[position]
        if call.layer != index:
            raise RuntimeError(f"the model called layer {index} where its trace has layer {call.layer}")
        if self.plan.rank_of_call[position] != self.exchange.rank:
            return self._ghost(position, call, args, kwargs)
        if self.on_layer is not None:
            self.on_layer(index)
        out = original(*args, **kwargs)
        for ref, array in made_arrays(call, out, args, kwargs):
            if ref in self._kept:
                # A second object for the same value: the model may change its own in place.
                self._values.setdefault(ref, mx.stop_gradient(array))
        for transfer in self._sends.get(position, ()):
            mx.async_eval(
                *[self.exchange.send(self._values[ref], transfer.receiver) for ref in transfer.refs]
            )
        return out

    def _ghost(self, position: int, call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for part in call.ticks:
            cache = find_cache(args, kwargs, part)
            tick(cache, self._batch, self._length)
            if cache is not None:
                self._ticked.append(cache)
        shapes = self.plan.shapes_of.shapes
        for ref, sender in self._arrivals.get(position, ()):
            shape = shapes[ref]
            self._values[ref] = self.exchange.recv(
                shape.shape(self._batch, self._length), shape.dtype, sender
            )
        if position in self._waits:
            # Receive now: a stage whose last layers keep nothing would otherwise not ask in a prefill.
            transfer = next(t for t in self.plan.transfers if t.position == position + 1)
            mx.async_eval(*[self._values[ref] for ref in transfer.refs])

        def value_of(ref: Ref) -> Any:
            if ref in self._values:
                return mx.stop_gradient(self._values[ref])
            return stand_in(shapes[ref], self._batch, self._length)

        return ghost_answer(call, args, kwargs, value_of)

    def _settle(self) -> None:
        """Evaluate the ghosts' offsets now and then: nothing else does, and their graph grows."""
        self._forwards += 1
        if self._forwards % _SETTLE_EVERY == 0 and self._ticked:
            mx.async_eval([x for cache in self._ticked for x in _bookkeeping(cache)])


def _bookkeeping(cache: Any) -> Iterator[Any]:
    for name, value in vars(cache).items():
        if isinstance(value, mx.array) and name not in ("keys", "values"):
            yield value


def _refs_of(call: LayerCall) -> Iterator[Ref]:
    def below(form: Form) -> Iterator[Ref]:
        if isinstance(form, Made):
            yield form.ref
        elif isinstance(form, Items):
            for item in form.items:
                yield from below(item)
        elif isinstance(form, (Entries, Attributes)):
            for _, item in form.items if isinstance(form, Entries) else form.attributes:
                yield from below(item)

    yield from below(call.answer)
    for _, form in call.changed:
        yield from below(form)


def check_transfers(plan: PipelinePlan, exchange: Exchange) -> None:
    """Send known values of three different shapes in a row over every cut and compare what arrives; all ranks
    call this at the same time. Raises BringUpError that names both ranks."""
    shapes = plan.shapes_of.shapes
    for transfer in plan.transfers:
        wanted = [
            (shapes[ref].shape(batch, length), shapes[ref].dtype, number)
            for number, (batch, length) in enumerate(_CHECK_SHAPES)
            for ref in transfer.refs
        ]
        if transfer.sender == exchange.rank:
            mx.eval([exchange.send(_pattern(*want, transfer.sender), transfer.receiver) for want in wanted])
        elif transfer.receiver == exchange.rank:
            arrived = [exchange.recv(shape, dtype, transfer.sender) for shape, dtype, _ in wanted]
            mx.eval(arrived)
            for got, want in zip(arrived, wanted, strict=True):
                if not bool(mx.array_equal(got, _pattern(*want, transfer.sender)).item()):
                    raise BringUpError(
                        f"Rank {exchange.rank} received wrong values of shape {want[0]} from rank "
                        f"{transfer.sender} in the check before serving. The data link between them mixes up "
                        "messages: start the mesh again, and if it happens again choose another backend."
                    )


def check_sums(exchange: Exchange) -> None:
    """The same for all_sum, which tensor sharding uses. Raises BringUpError with this rank's name."""
    for number, (batch, length) in enumerate(_CHECK_SHAPES):
        shape = (batch, length, 64 * (number + 1))
        got = exchange.all_sum(_pattern(shape, mx.float32, number, exchange.rank))
        want = sum(_pattern(shape, mx.float32, number, rank) for rank in range(exchange.world_size))
        mx.eval(got)
        if not bool(mx.array_equal(got, want).item()):
            raise BringUpError(
                f"Rank {exchange.rank} got a wrong sum over {exchange.world_size} ranks for shape {shape} in "
                "the check before serving. Start the mesh again, and if it happens again choose another "
                "backend."
            )


def _pattern(shape: tuple[int, ...], dtype: Any, number: int, sender: int) -> Any:
    """Whole numbers below 128, exact in every dtype, different for every shape number and sender."""
    size = 1
    for dim in shape:
        size *= dim
    values = (mx.arange(size) * 7 + number * 31 + sender * 59 + 1) % 127
    return values.reshape(shape).astype(dtype)
