"""What each layer call depends on, through whatever a model computes between its layers.

One lazy forward in which every layer is a ghost that answers with fresh placeholders; the graph of what the
model then feeds to each call leads back to placeholders, cache contents and parameters outside the layers.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.node.engine import tree
from mlx_mesh.node.engine.caches import cache_contents, cache_ids, find_cache, tick
from mlx_mesh.node.engine.ghosts import ArrayShape, LayerCall, Ref, ghost_answer, stand_in
from mlx_mesh.node.engine.hooks import Original, hook_model, unhook_model

TAIL = -1
"""Stands for the model's own output among the calls."""

_BATCH, _LENGTH = 1, 3


@dataclass(frozen=True, slots=True)
class Dependencies:
    """By call position (or TAIL): the earlier outputs, the paths of parameters outside the layers, and the
    layers whose cached keys and values the inputs of that call are computed from."""

    needs: dict[int, frozenset[Ref]]
    parameters: dict[int, frozenset[str]]
    reads: dict[int, frozenset[int]]


@dataclass(slots=True, eq=False)
class _Placeholders:
    """Replaces every layer by fresh placeholders and keeps what the model then feeds to each call."""

    calls: list[LayerCall]
    shapes: dict[Ref, ArrayShape]
    opaque: set[int]
    position: int = 0
    sources: dict[Ref, Any] = field(default_factory=dict)
    handed: dict[Ref, Any] = field(default_factory=dict)
    contents: list[tuple[int, Any]] = field(default_factory=list)  # (layer, array in its cache)
    inputs: dict[int, list[Any]] = field(default_factory=dict)

    def value_of(self, ref: Ref) -> Any:
        if ref not in self.handed:
            # The model gets a copy: it may change its array in place, and the named source must stay.
            self.sources[ref] = stand_in(self.shapes[ref], _BATCH, _LENGTH)
            self.handed[ref] = mx.stop_gradient(self.sources[ref])
        return self.handed[ref]

    def call_model(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = original(*args, **kwargs)
        leaves = [leaf for _, leaf in tree.walk(out, self.opaque) if isinstance(leaf, mx.array)]
        self.inputs[TAIL] = [mx.stop_gradient(leaf) for leaf in leaves]
        return out

    def call_layer(
        self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        call = self.calls[self.position]
        if call.layer != index:
            raise ValueError("the order of layers depends on values")
        leaves = [leaf for _, leaf in tree.walk_call(args, kwargs, self.opaque) if isinstance(leaf, mx.array)]
        self.inputs[self.position] = [mx.stop_gradient(leaf) for leaf in leaves]
        self.position += 1
        for part in call.ticks:
            cache = find_cache(args, kwargs, part)
            tick(cache, _BATCH, _LENGTH)
            self.contents += [(index, array) for array in cache_contents(cache)]
        return ghost_answer(call, args, kwargs, self.value_of)


def find_dependencies(
    model: Any, layers: list[Any], calls: list[LayerCall], shapes: dict[Ref, ArrayShape]
) -> Dependencies:
    """Run the forward; `calls` and `shapes` are what a trace found."""
    caches = make_prompt_cache(model)
    runtime = _Placeholders(calls, shapes, cache_ids(caches))
    hook_model(model, layers, runtime)
    try:
        model(mx.zeros((_BATCH, _LENGTH), dtype=mx.uint32), cache=caches)
    finally:
        unhook_model(model, layers)

    inside = {id(array) for layer in layers for _, array in tree_flatten(layer.parameters())}
    names: dict[str, Any] = {}
    refs: dict[str, Ref] = {}
    paths: dict[str, str] = {}
    owners: dict[str, int] = {}
    for ref, source in runtime.sources.items():
        names[name := f"ref{len(names)}"] = source
        refs[name] = ref
    for layer, source in runtime.contents:
        names[name := f"kv{len(names)}"] = source
        owners[name] = layer
    seen: set[int] = set()
    for path, array in tree_flatten(model.parameters()):
        if id(array) not in inside and id(array) not in seen:
            seen.add(id(array))
            names[name := f"par{len(names)}"] = array
            paths[name] = path
    outputs: list[Any] = []
    consumers: dict[str, int] = {}
    for position, arrays in runtime.inputs.items():
        for array in arrays:
            names[name := f"out{len(names)}"] = array
            consumers[name] = position
            outputs.append(array)
    sources = _reachable(outputs, names, set(consumers))
    reached: dict[int, set[str]] = {position: set() for position in runtime.inputs}
    for name, position in consumers.items():
        reached[position] |= sources[name]
    return Dependencies(
        needs={call: frozenset(refs[x] for x in found if x in refs) for call, found in reached.items()},
        parameters={
            call: frozenset(paths[x] for x in found if x in paths) for call, found in reached.items()
        },
        reads={call: frozenset(owners[x] for x in found if x in owners) for call, found in reached.items()},
    )


def _reachable(outputs: list[Any], names: dict[str, Any], sinks: set[str]) -> dict[str, set[str]]:
    """For each sink everything it is computed from, by name. mlx tells its graph only as DOT text."""
    text = io.StringIO()
    mx.export_to_dot(text, *outputs, **names)
    inputs_of: dict[str, list[str]] = {}
    for line in text.getvalue().splitlines():
        left, arrow, right = line.partition(" -> ")
        if arrow:
            inputs_of.setdefault(right.strip().strip('"'), []).append(left.strip().strip('"'))
    found: dict[str, set[str]] = {}
    for sink in sinks:
        seen, stack = {sink}, [sink]
        while stack:
            for source in inputs_of.get(stack.pop(), ()):
                if source not in seen:
                    seen.add(source)
                    stack.append(source)
        found[sink] = seen
    return found
