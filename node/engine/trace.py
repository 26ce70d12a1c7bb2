"""What crosses from layer to layer in a model, found by watching lazy forwards that are never evaluated.

Three forwards with different batch, length and history give every layer call's inputs and outputs, and by
comparison the shape of each output in terms of batch and length. A fourth one, in which every layer is
replaced by fresh placeholders, gives for each call exactly which earlier outputs and which parameters
outside the layers it depends on, through whatever the model computes between its layers. From that follow
the cuts at which a pipeline may be divided, what must be sent over each, and what each stage must load.
No weight is read and nothing here knows a model by name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from mlx_mesh.mesh.kv_options import KV_GROUP_SIZES
from mlx_mesh.node.engine import tree
from mlx_mesh.node.engine.caches import CachePart, cache_ids, cache_parts, can_tick
from mlx_mesh.node.engine.dependencies import TAIL, find_dependencies
from mlx_mesh.node.engine.ghosts import (
    ArrayShape,
    Attributes,
    Const,
    Dim,
    Entries,
    Form,
    Items,
    LayerCall,
    Made,
    Pass,
    Ref,
)
from mlx_mesh.node.engine.hooks import Original, hook_model, unhook_model
from mlx_mesh.node.engine.tree import Path

_RUNS = ((1, 3, 0), (2, 5, 0), (1, 3, 4))  # (batch, length, tokens already in the cache)


class TraceError(Exception):
    """This model cannot be traced; the message says what it does that the trace does not understand."""


@dataclass(frozen=True, slots=True)
class CacheSize:
    """What the caches of a layer keep: bytes per token, per sequence whatever its length, and the window. If
    they are all plain caches of all tokens, they may be quantised: in groups of up to `group_size` numbers
    (0 = the heads do not divide) of `itemsize` bytes (0 = of another kind)."""

    bytes_per_token: int
    fixed_bytes: int
    window: int
    group_size: int = 0
    itemsize: int = 0


@dataclass(frozen=True, slots=True)
class ModelTrace:
    """The calls of one forward and what each depends on. `needs[p]`, `parameters[p]` and `reads[p]`: the
    earlier outputs, the paths of parameters outside the layers, and the layers whose cached keys and values
    the inputs of call p (or TAIL) depend on."""

    num_layers: int
    calls: tuple[LayerCall, ...]
    shapes: dict[Ref, ArrayShape]
    needs: dict[int, frozenset[Ref]]
    parameters: dict[int, frozenset[str]]
    reads: dict[int, frozenset[int]]
    caches: tuple[CacheSize, ...]  # per layer
    cache_layers: tuple[int, ...]  # per cache of make_prompt_cache: the layer that fills it; -1 = none
    logits_shape: tuple[int, ...]

    def crossing(self, position: int) -> tuple[Ref, ...]:
        """What calls before `position` made and later ones (or the model's output) need, in order."""
        needed: set[Ref] = set(self.needs[TAIL])
        for later in range(position, len(self.calls)):
            needed |= self.needs[later]
        return tuple(sorted(ref for ref in needed if ref[0] < position))

    def positions_of_cut(self, cut: int) -> list[int]:
        """The call positions at which work goes over the cut before layer `cut`, back or forth."""
        calls = self.calls
        return [p for p in range(1, len(calls)) if (calls[p - 1].layer < cut) != (calls[p].layer < cut)]

    def why_not(self, cut: int) -> str:
        """Why a stage may not end before layer `cut`; '' when it may."""
        before: set[int] = set()
        after: set[int] = set()
        for position, call in enumerate(self.calls):
            (before if call.layer < cut else after).update(call.caches)
            if any((layer < cut) != (call.layer < cut) for layer in self.reads[position]):
                return "layers on one side read keys and values of the other side"
        if before & after:
            return "layers on both sides share a KV cache"
        positions = self.positions_of_cut(cut)
        if not positions:
            return "the model never calls a layer on one side of it"
        for position in positions:
            refs = self.crossing(position)
            if any(self.shapes[ref].grows for ref in refs):
                return "layers on one side read keys and values of the other side"
            if not refs:
                return "nothing the trace can see crosses it"
        return ""

    def why_attention_is_shared(self) -> str:
        """Why the attention of one layer cannot be divided without regard to other layers; '' when it can."""
        users: dict[int, int] = {}
        for call in self.calls:
            for cache in call.caches:
                if users.setdefault(cache, call.layer) != call.layer:
                    return "layers share a KV cache"
        if any(self.reads.values()):
            return "layers read keys and values of other layers"
        crossing = {ref for position, refs in self.needs.items() if position != TAIL for ref in refs}
        if any(self.shapes[ref].grows or len(self.shapes[ref].dims) > 3 for ref in crossing):
            return "layers hand keys and values to other layers"
        return ""


def trace_model(model: Any) -> ModelTrace:
    """Trace a lazily built model. Raises TraceError when it does something that no ghost can imitate."""
    layers = list(model.layers)
    if not layers:
        raise TraceError("the model has no list of layers")
    try:
        first, second, third = [_watch(model, layers, *run) for run in _RUNS]
        if not first.calls:
            raise TraceError("the model never calls its layers as a whole")
        shapes = _compare(first, second, third)
        found = find_dependencies(model, layers, third.calls, shapes)
        return ModelTrace(
            num_layers=len(layers),
            calls=tuple(third.calls),
            shapes=shapes,
            needs=found.needs,
            parameters=found.parameters,
            reads=found.reads,
            caches=_cache_sizes(third, len(layers)),
            cache_layers=tuple(_first_user(third, cache) for cache in third.caches),
            logits_shape=third.logits_shape,
        )
    except TraceError:
        raise
    except Exception as error:
        raise TraceError(f"a lazy forward of the model raised {type(error).__name__}: {error}") from error


@dataclass(slots=True, eq=False)
class _Watcher:
    """Runs the real layers and notes what goes in and out of each."""

    caches: list[Any]
    opaque: set[int]  # ids of cache objects
    calls: list[LayerCall] = field(default_factory=list)
    arrays: dict[Ref, tuple[tuple[int, ...], Any]] = field(default_factory=dict)
    cache_objects: dict[int, Any] = field(default_factory=dict)  # id -> object, in order of first use
    cache_layers: dict[int, int] = field(default_factory=dict)  # id -> the first layer that got it
    logits_shape: tuple[int, ...] = ()
    _known: dict[int, Ref] = field(default_factory=dict)
    _keep: list[Any] = field(default_factory=list)  # ids stay valid only while the objects live

    def call_model(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = original(*args, **kwargs)
        self.logits_shape = tuple(out.shape) if isinstance(out, mx.array) else ()
        return out

    def call_layer(
        self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        position = len(self.calls)
        before = dict(tree.walk_call(args, kwargs, self.opaque))
        came_in: dict[int, Path] = {}
        caches: dict[CachePart, tuple[Any, dict[str, Any]]] = {}
        used: set[int] = set()
        for path, leaf in before.items():
            if isinstance(leaf, mx.array):
                came_in.setdefault(id(leaf), path)
            elif id(leaf) in self.opaque:
                for parts, cache in cache_parts(leaf):
                    caches[CachePart(path, parts)] = (cache, _state(cache))
                    self.cache_objects.setdefault(id(cache), cache)
                    self.cache_layers.setdefault(id(cache), index)
                    used.add(list(self.cache_objects).index(id(cache)))
        containers = dict(_containers(args, kwargs, self.opaque))

        out = original(*args, **kwargs)

        after = dict(tree.walk_call(args, kwargs, self.opaque))
        self._keep += [before, after, out]
        numbers = iter(range(1 << 30))

        def note(value: Any) -> Form:
            if isinstance(value, mx.array):
                if id(value) in came_in:
                    return Pass(came_in[id(value)])
                if id(value) not in self._known:
                    ref = (position, next(numbers))
                    self._known[id(value)] = ref
                    self.arrays[ref] = (tuple(value.shape), value.dtype)
                return Made(self._known[id(value)])
            if id(value) in containers:
                return Pass(containers[id(value)])
            if id(value) in self.opaque:
                raise TraceError(f"layer {index} returns a cache object")
            if isinstance(value, (list, tuple)):
                return Items(type(value), tuple(note(item) for item in value))
            if isinstance(value, dict):
                return Entries(tuple((key, note(item)) for key, item in value.items()))
            if tree.is_plain_object(value):
                attributes = tuple((name, note(item)) for name, item in vars(value).items())
                return Attributes(value, attributes)
            return Const(value)

        changed = []
        for path, leaf in after.items():
            if isinstance(leaf, mx.array) and (path not in before or before[path] is not leaf):
                if len(path) < 2:
                    continue
                changed.append((path, note(leaf)))
        answer = note(out)
        ticks = []
        for part, (cache, state) in caches.items():
            if _changed(state, _state(cache)):
                if not can_tick(cache):
                    raise TraceError(f"layer {index} keeps its state in a {type(cache).__name__}")
                ticks.append(part)
        self.calls.append(LayerCall(index, answer, tuple(changed), tuple(ticks), frozenset(used)))
        return out


def _containers(
    args: tuple[Any, ...], kwargs: dict[str, Any], opaque: set[int]
) -> Iterator[tuple[int, Path]]:
    """(id, path) of every mutable container and plain object in the arguments."""
    seen: set[int] = set()

    def below(value: Any, path: Path) -> Iterator[tuple[int, Path]]:
        if isinstance(value, mx.array) or id(value) in opaque or id(value) in seen:
            return
        if isinstance(value, (list, tuple)):
            parts = [(("item", i), item) for i, item in enumerate(value)]
        elif isinstance(value, dict) and not hasattr(value, "parameters"):
            parts = [(("item", key), item) for key, item in value.items()]
        elif tree.is_plain_object(value):
            parts = [(("attr", name), item) for name, item in vars(value).items()]
        else:
            return
        seen.add(id(value))
        if value or not isinstance(value, tuple):  # the empty tuple is one object everywhere
            yield id(value), path
        for step, item in parts:
            yield from below(item, (*path, step))

    for i, arg in enumerate(args):
        yield from below(arg, (("arg", i),))
    for name, arg in kwargs.items():
        yield from below(arg, (("kw", name),))


def _state(cache: Any) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in vars(cache).items()}


def _changed(before: dict[str, Any], after: dict[str, Any]) -> bool:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, tuple) and isinstance(b, tuple):
            return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
        return a is b or (isinstance(a, (int, float, str)) and isinstance(b, (int, float, str)) and a == b)

    return before.keys() != after.keys() or not all(same(before[name], after[name]) for name in before)


def _watch(model: Any, layers: list[Any], batch: int, length: int, history: int) -> _Watcher:
    caches = make_prompt_cache(model)
    if history:
        model(mx.zeros((batch, history), dtype=mx.uint32), cache=caches)
    watcher = _Watcher(caches=caches, opaque=cache_ids(caches))
    hook_model(model, layers, watcher)
    try:
        model(mx.zeros((batch, length), dtype=mx.uint32), cache=caches)
    finally:
        unhook_model(model, layers)
    return watcher


def _compare(first: _Watcher, second: _Watcher, third: _Watcher) -> dict[Ref, ArrayShape]:
    order = [call.layer for call in first.calls]
    for other in (second, third):
        if [call.layer for call in other.calls] != order or other.arrays.keys() != first.arrays.keys():
            raise TraceError("which layers the model calls, or what they return, depends on batch or length")
    shapes = {}
    for ref in first.arrays:
        (a, dtype), (b, _), (c, _) = first.arrays[ref], second.arrays[ref], third.arrays[ref]
        if not len(a) == len(b) == len(c):
            raise TraceError(f"an output of layer {order[ref[0]]} changes its number of dimensions")
        dims, grows = [], False
        for sizes in zip(a, b, c, strict=True):
            dim = _dim(*sizes)
            grows = grows or dim is None
            dims.append(dim or Dim(1, per_length=True))
        shapes[ref] = ArrayShape(tuple(dims), dtype, grows)
    return shapes


def _dim(a: int, b: int, c: int) -> Dim | None:
    """One dimension's rule from its sizes in the three runs; None when it depends on the history."""
    (b1, l1, _), (b2, l2, _), _ = _RUNS
    if a != c:
        return None
    for per_batch in (False, True):
        for per_length in (False, True):
            at_1 = (b1 if per_batch else 1) * (l1 if per_length else 1)
            at_2 = (b2 if per_batch else 1) * (l2 if per_length else 1)
            if a % at_1 == 0 and b == a // at_1 * at_2:
                return Dim(a // at_1, per_batch, per_length)
    return None


def _first_user(watcher: _Watcher, cache: Any) -> int:
    """The first layer that gets this cache, or a member of it; -1 when none does."""
    users = [watcher.cache_layers.get(id(leaf), -1) for _, leaf in cache_parts(cache)]
    return max(users, default=-1)


def _cache_sizes(watcher: _Watcher, num_layers: int) -> tuple[CacheSize, ...]:
    sizes = [[0, 0, 0, 0] for _ in range(num_layers)]  # per token, fixed, window, any unbounded
    plain: list[list[Any]] = [[] for _ in range(num_layers)]  # keys and values in caches of all tokens
    others = [0] * num_layers  # bytes per token in caches of another kind
    whole = {id(cache) for cache in watcher.caches}
    for key, cache in watcher.cache_objects.items():
        layer = watcher.cache_layers[key]
        size = sizes[layer]
        if hasattr(cache, "update_and_fetch"):
            kept = [
                x
                for x in (getattr(cache, "keys", None), getattr(cache, "values", None))
                if isinstance(x, mx.array) and x.ndim == 4
            ]
            per_token = sum(x.nbytes // x.shape[0] // max(1, x.shape[2]) for x in kept)
            window = int(getattr(cache, "max_size", 0) or getattr(cache, "chunk_size", 0) or 0)
            size[0] += per_token
            size[2] = max(size[2], window)
            size[3] |= per_token > 0 and not window
            if type(cache) is KVCache and key in whole:
                plain[layer] += kept
            else:
                others[layer] += per_token
        elif isinstance(getattr(cache, "cache", None), list):
            size[1] += sum(x.nbytes for x in cache.cache if isinstance(x, mx.array))
    found = []
    for (token, fixed, window, unbounded), kept, other in zip(sizes, plain, others, strict=True):
        group_size, itemsize = (0, 0) if other else _quantised_by(kept)
        found.append(CacheSize(token, fixed, 0 if unbounded else window, group_size, itemsize))
    return tuple(found)


def _quantised_by(kept: list[Any]) -> tuple[int, int]:
    """The largest groups that divide the heads of these keys and values, and the size of their numbers."""
    itemsizes = {x.dtype.size for x in kept}
    if len(itemsizes) != 1:
        return 0, 0
    fitting = [size for size in KV_GROUP_SIZES if all(x.shape[-1] % size == 0 for x in kept)]
    return max(fitting, default=0), itemsizes.pop()
