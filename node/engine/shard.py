"""Load one rank's share of a model: build it lazily, apply the placement, read only its own bytes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.kv_options import KvOptions
from mlx_mesh.mesh.tensor_units import Range
from mlx_mesh.mesh.types import Placement, Sharding
from mlx_mesh.node.engine.certificate import certify
from mlx_mesh.node.engine.dependencies import TAIL
from mlx_mesh.node.engine.exchange import Exchange
from mlx_mesh.node.engine.hooks import Original, hook_model
from mlx_mesh.node.engine.loader import LazyModel, open_lazy
from mlx_mesh.node.engine.needs import check_present
from mlx_mesh.node.engine.pipeline import (
    PipelinePlan,
    PipelineRuntime,
    check_sums,
    check_transfers,
    plan_pipeline,
)
from mlx_mesh.node.engine.probe import divisible_units, why_undivided
from mlx_mesh.node.engine.quantised_kv import quantised_caches
from mlx_mesh.node.engine.reading import Reading
from mlx_mesh.node.engine.rules import Proposal, Unit
from mlx_mesh.node.engine.tensor import divide_layer
from mlx_mesh.node.engine.trace import ModelTrace, TraceError, trace_model
from mlx_mesh.node.engine.vision_model import tower_arrays
from mlx_mesh.node.engine.vocabulary import gives_logits

OnProgress = Callable[[int, int], None]
OnLayer = Callable[[int], None]
NewCaches = Callable[[], list[Any]]


@dataclass(slots=True)
class LoadedShard:
    """A model ready for `BatchGenerator` and `make_prompt_cache` on this rank. On followers its call returns
    zeros of shape (batch, length, 1)."""

    model: Any
    config: dict[str, Any]
    sharding: Sharding
    weights_bytes: int  # of the parameters that were read
    num_layers_here: int
    layer_bytes: tuple[int, ...]  # per local layer, in order
    pipeline: PipelinePlan | None = None
    whole_parts: tuple[str, ...] = field(default=())  # tensor: what stayed whole, and why
    new_caches: NewCaches | None = None  # makes those of a new sequence; None = mlx-lm's own
    whole: Any = None  # on the leader of a vision model: the model with its towers, which are read


def load_shard(
    model: str,
    placement: Placement,
    rank: int,
    exchange: Exchange,
    on_progress: OnProgress,
    on_layer: OnLayer | None = None,
    adapter: str = "",
    kv: KvOptions | None = None,
    *,
    with_vision: bool = False,
) -> LoadedShard:
    """Load rank `rank` of `placement` from the folder `model`, with the adapter of the folder `adapter`.
    `with_vision`: the language part of a vision model, and on rank 0 its towers.

    Reads layer by layer; `on_progress(done, total)` after each. `on_layer(i)` is called whenever a local
    layer is entered. `kv`: how caches are kept, None = as they come. Raises SettingsError for an unusable
    folder, PlacementError for an impossible placement, PreflightError for a folder that lacks bytes of it.
    """
    check_present(Path(model).expanduser(), placement, rank, adapter, with_vision=with_vision)
    lazy = open_lazy(model, adapter, with_vision=with_vision)
    return load_opened(lazy, placement, rank, exchange, None, on_progress, on_layer, kv)


def load_opened(
    lazy: LazyModel,
    placement: Placement,
    rank: int,
    exchange: Exchange,
    reading: Reading | None,
    on_progress: OnProgress = lambda done, total: None,
    on_layer: OnLayer | None = None,
    kv: KvOptions | None = None,
) -> LoadedShard:
    """`load_shard` of a model that is already open; `reading` None = from its files."""
    proposal = trace = None
    if placement.sharding == Sharding.TENSOR:  # the same verdict as the plan's, and on every rank
        trace = _trace_or_none(lazy)
        proposal = certify(lazy, trace).proposal
    return shard_model(lazy, placement, rank, exchange, on_progress, on_layer, proposal, trace, kv, reading)


def shard_model(
    lazy: LazyModel,
    placement: Placement,
    rank: int,
    exchange: Exchange,
    on_progress: OnProgress,
    on_layer: OnLayer | None = None,
    proposal: Proposal | None = None,
    trace: ModelTrace | None = None,
    kv: KvOptions | None = None,
    reading: Reading | None = None,
) -> LoadedShard:
    """`load_shard` for a model that is already open; the model is changed in place. `proposal` and `trace`:
    its tensor units and its trace, when they are known already. `reading` None = from its files."""
    with reading or Reading() as used:
        if kv is not None and kv.bits:
            trace = trace or trace_model(lazy.model)  # the plan has refused a model that has none
        shard = _shard_model(lazy, placement, rank, exchange, on_progress, on_layer, proposal, trace, used)
        if kv is None or not kv.bits or trace is None:
            return _with_towers(shard, lazy, used) if rank == 0 else shard
    here = placement.shards[rank]
    layers = range(here.start_layer, here.end_layer)
    shard.new_caches = functools.partial(quantised_caches, shard.model, trace, kv, layers)
    return shard


def _with_towers(shard: LoadedShard, lazy: LazyModel, reading: Reading) -> LoadedShard:
    """Read what only the leader has of a vision model: the towers, and what embeds text among pictures."""
    if lazy.whole is not None:
        towers = _Loading(reading)
        towers.rest(tower_arrays(lazy.whole))
        shard.weights_bytes += towers.total
        if shard.pipeline is not None:
            shard.weights_bytes += _read_embedding(lazy, shard.pipeline, reading)
        shard.whole = lazy.whole
    return shard


def _read_embedding(lazy: LazyModel, plan: PipelinePlan, reading: Reading) -> int:
    """On the last stage; the bytes that it did not have yet."""
    had = plan.parameters_of(0)
    calls = range(len(plan.shapes_of.calls))
    wanted = set().union(*(plan.shapes_of.parameters[call] for call in calls)) - had
    loading = _Loading(reading)
    loading.rest(array for path, array in tree_flatten(lazy.model.parameters()) if path in wanted)
    return loading.total


def _shard_model(
    lazy: LazyModel,
    placement: Placement,
    rank: int,
    exchange: Exchange,
    on_progress: OnProgress,
    on_layer: OnLayer | None,
    proposal: Proposal | None,
    trace: ModelTrace | None,
    reading: Reading,
) -> LoadedShard:
    if len(lazy.layers) != placement.num_layers:
        raise PlacementError(
            f"The placement is for {placement.num_layers} layers, {lazy.folder} has {len(lazy.layers)}. "
            "The hosts do not have the same model."
        )
    if placement.sharding == Sharding.PIPELINE:
        return _load_stage(lazy, placement, rank, exchange, on_progress, on_layer, trace, reading)
    if placement.sharding == Sharding.TENSOR:
        trace = trace or _trace_or_none(lazy)
        return _load_slices(lazy, placement, rank, exchange, on_progress, on_layer, proposal, trace, reading)
    return _load_whole(lazy, on_progress, on_layer, reading)


def check_cuts(shard: LoadedShard, exchange: Exchange) -> None:
    """Exchange known values of three shapes in a row the way the model will; all ranks at the same time.
    Raises BringUpError naming the ranks when a value arrives wrong."""
    if shard.pipeline is not None:
        check_transfers(shard.pipeline, exchange)
    elif shard.sharding == Sharding.TENSOR:
        check_sums(exchange)


@dataclass(slots=True, eq=False)
class _WholeForward:
    """All layers run here. Followers of a tensor mesh have no use for the logits, but where the head is
    divided they make some of them."""

    has_logits: bool
    makes_logits: bool
    on_layer: OnLayer | None

    def call_model(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = original(*args, **kwargs)
        if self.has_logits:
            return out
        tokens = next(x for x in (*args, *kwargs.values()) if isinstance(x, mx.array) and x.ndim >= 2)
        nothing = mx.zeros((*tokens.shape[:2], 1))
        return mx.depends([nothing], [out])[0] if self.makes_logits else nothing

    def call_layer(
        self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if self.on_layer is not None:
            self.on_layer(index)
        return original(*args, **kwargs)


def _load_whole(
    lazy: LazyModel, on_progress: OnProgress, on_layer: OnLayer | None, reading: Reading
) -> LoadedShard:
    total = len(lazy.layers) + 1
    loading = _Loading(reading)
    for done, layer in enumerate(lazy.layers, 1):
        loading.layer(layer)
        on_progress(done, total)
    loading.rest(array for _, array in tree_flatten(lazy.model.parameters()))
    on_progress(total, total)
    hook_model(lazy.model, lazy.layers, _WholeForward(True, True, on_layer))
    return LoadedShard(
        lazy.model, lazy.config, Sharding.NONE, loading.total, len(lazy.layers), tuple(loading.layers)
    )


def _load_stage(
    lazy: LazyModel,
    placement: Placement,
    rank: int,
    exchange: Exchange,
    on_progress: OnProgress,
    on_layer: OnLayer | None,
    trace: ModelTrace | None,
    reading: Reading,
) -> LoadedShard:
    try:
        trace = trace or trace_model(lazy.model)
    except TraceError as error:
        raise PlacementError(
            f"{lazy.folder} cannot run as a pipeline: {error}. Use one host, or tensor sharding."
        ) from error
    plan = plan_pipeline(trace, placement)
    shard = placement.shards[rank]
    layers = lazy.layers[shard.start_layer : shard.end_layer]
    loading = _Loading(reading)
    for done, layer in enumerate(layers, 1):
        loading.layer(layer)
        on_progress(done, len(layers) + 1)
    wanted = plan.parameters_of(rank)
    loading.rest(array for path, array in tree_flatten(lazy.model.parameters()) if path in wanted)
    on_progress(len(layers) + 1, len(layers) + 1)
    hook_model(lazy.model, lazy.layers, PipelineRuntime(plan, exchange, on_layer))
    return LoadedShard(
        lazy.model,
        lazy.config,
        Sharding.PIPELINE,
        loading.total,
        len(layers),
        tuple(loading.layers),
        pipeline=plan,
    )


def _load_slices(
    lazy: LazyModel,
    placement: Placement,
    rank: int,
    exchange: Exchange,
    on_progress: OnProgress,
    on_layer: OnLayer | None,
    proposal: Proposal | None,
    trace: ModelTrace | None,
    reading: Reading,
) -> LoadedShard:
    weights = [shard.weight for shard in placement.shards]
    if proposal is None:
        proposal = divisible_units(lazy, trace)
    units = proposal.for_ranks(len(weights))
    if not units:
        raise PlacementError(
            f"{lazy.folder} cannot be divided over {len(weights)} ranks by tensor sharding: "
            f"{why_undivided(proposal)}. Use pipeline sharding."
        )
    vocabulary = proposal.vocabulary_for(len(weights))
    makes_logits = rank == 0 or any(trace and gives_logits(unit, trace) for unit in vocabulary)
    prefixes = {id(module): name for name, module in lazy.model.named_modules()}
    wanted = _parameters_outside_layers(lazy, trace, makes_logits)
    loading = _Loading(reading)
    total = len(lazy.layers) + 1

    def slicer(path: str, array: Any, axis: int, ranges: Sequence[Range]) -> Any:
        return reading.slice(lazy.stored.get(path), array, axis, ranges)

    for index, layer in enumerate(lazy.layers):
        own = [unit for unit in units if unit.layer == index]
        divide_layer(layer, prefixes[id(layer)], own, weights, exchange, slicer)
        loading.layer(layer)
        on_progress(index + 1, total)
    divide_layer(lazy.model, "", vocabulary, weights, exchange, slicer)
    loading.rest(array for path, array in tree_flatten(lazy.model.parameters()) if path in wanted)
    on_progress(total, total)
    hook_model(lazy.model, lazy.layers, _WholeForward(rank == 0, makes_logits, on_layer))
    return LoadedShard(
        lazy.model,
        lazy.config,
        Sharding.TENSOR,
        loading.total,
        len(lazy.layers),
        tuple(loading.layers),
        whole_parts=whole_parts(proposal, units),
    )


def whole_parts(proposal: Proposal, units: list[Unit]) -> tuple[str, ...]:
    """What looks divisible and stays whole on every rank, each with the reason."""
    few = [
        f"layers.{unit.layer}.{unit.path}: only {unit.num_units} parts"
        for unit in proposal.units
        if unit not in units
    ]
    return (*proposal.refusals, *few)


def _trace_or_none(lazy: LazyModel) -> ModelTrace | None:
    try:
        return trace_model(lazy.model)
    except TraceError:
        return None


def _parameters_outside_layers(lazy: LazyModel, trace: ModelTrace | None, makes_logits: bool) -> set[str]:
    """Paths of the parameters outside the layers that the forward uses: all when it cannot be traced."""
    if trace is None:
        return {path for path, _ in tree_flatten(lazy.model.parameters())}
    return {
        path for call, paths in trace.parameters.items() if makes_logits or call != TAIL for path in paths
    }


class _Loading:
    """Evaluates parameters in an order that keeps only the share and one layer in flight in memory."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.total = 0
        self.layers: list[int] = []
        self._seen: list[Any] = []  # the arrays themselves: an id is only good while its object lives
        self._ids: set[int] = set()

    def layer(self, layer: Any) -> None:
        self.layers.append(self._evaluate([array for _, array in tree_flatten(layer.parameters())]))

    def rest(self, arrays: Any) -> None:
        for array in arrays:  # one by one: an embedding can be as large as many layers
            self._evaluate([array])

    def _evaluate(self, arrays: list[Any]) -> int:
        new = [array for array in arrays if id(array) not in self._ids]
        self._reading.evaluate(new)
        self._seen += new
        self._ids.update(id(array) for array in new)
        size = sum(int(array.nbytes) for array in new)
        self.total += size
        return size
