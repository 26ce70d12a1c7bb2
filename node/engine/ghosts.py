"""The form of a layer's call as data, and the ghosts that answer such a call without the layer.

`LayerCall` says what a call returns and changes, in terms of its arguments and of arrays that layers make.
`ghost_answer` builds such an answer out of other arrays; `tick` does to a cache what the layer would do to
its offsets.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_mesh.node.engine import tree
from mlx_mesh.node.engine.caches import CachePart
from mlx_mesh.node.engine.tree import Path

Ref = tuple[int, int]
"""An array that a layer call made: (position of the call in the forward, number among its outputs)."""


@dataclass(frozen=True, slots=True)
class Const:
    """A value that is no array."""

    value: Any


@dataclass(frozen=True, slots=True)
class Pass:
    """The very object that came in at this path of the arguments."""

    path: Path


@dataclass(frozen=True, slots=True)
class Made:
    """An array that a layer computed, this one or an earlier one."""

    ref: Ref


@dataclass(frozen=True, slots=True)
class Items:
    kind: type
    items: tuple[Form, ...]


@dataclass(frozen=True, slots=True)
class Entries:
    items: tuple[tuple[Any, Form], ...]


@dataclass(frozen=True, slots=True)
class Attributes:
    prototype: Any
    attributes: tuple[tuple[str, Form], ...]


Form = Const | Pass | Made | Items | Entries | Attributes


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension as factor x (batch if per_batch) x (length if per_length)."""

    factor: int
    per_batch: bool = False
    per_length: bool = False

    def size(self, batch: int, length: int) -> int:
        return self.factor * (batch if self.per_batch else 1) * (length if self.per_length else 1)


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """The shape of a layer's output array. `grows`: with the tokens in the cache, so it can never cross."""

    dims: tuple[Dim, ...]
    dtype: Any
    grows: bool

    def shape(self, batch: int, length: int) -> tuple[int, ...]:
        return tuple(dim.size(batch, length) for dim in self.dims)

    def nbytes(self, batch: int, length: int) -> int:
        size: int = self.dtype.size
        for dim in self.dims:
            size *= dim.size(batch, length)
        return size


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer. `changed` are mutable arguments the layer stores arrays into; `ticks` the caches
    it advances; `caches` numbers all cache objects it gets, in the order in which the forward meets them."""

    layer: int
    answer: Form
    changed: tuple[tuple[Path, Form], ...]
    ticks: tuple[CachePart, ...]
    caches: frozenset[int]


def stand_in(shape: ArrayShape, batch: int, length: int) -> Any:
    """Zeros of the right shape; a new object each time, because models change arrays in place."""
    return mx.zeros(shape.shape(batch, length), dtype=shape.dtype)


def ghost_answer(
    call: LayerCall, args: tuple[Any, ...], kwargs: dict[str, Any], value_of: Callable[[Ref], Any]
) -> Any:
    """Answer a layer call without the layer: the traced form filled with `value_of` each made array, and
    the same changes to mutable arguments that the layer would make."""

    def build(form: Form) -> Any:
        if isinstance(form, Const):
            return form.value
        if isinstance(form, Pass):
            return tree.get(args, kwargs, form.path)
        if isinstance(form, Made):
            return value_of(form.ref)
        if isinstance(form, Items):
            items = [build(item) for item in form.items]
            return form.kind(*items) if hasattr(form.kind, "_fields") else form.kind(items)
        if isinstance(form, Entries):
            return {key: build(item) for key, item in form.items}
        made = copy.copy(form.prototype)
        for name, item in form.attributes:
            setattr(made, name, build(item))
        return made

    changes = [(path, build(form)) for path, form in call.changed]
    for path, value in changes:
        tree.assign(args, kwargs, path, value)
    return build(call.answer)


def made_arrays(
    call: LayerCall, answer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[Ref, Any]]:
    """The (ref, array) pairs that a real call of the layer just made."""

    def take(form: Form, value: Any) -> Iterator[tuple[Ref, Any]]:
        if isinstance(form, Made):
            yield form.ref, value
        elif isinstance(form, Items):
            for item, part in zip(form.items, value, strict=True):
                yield from take(item, part)
        elif isinstance(form, Entries):
            for key, item in form.items:
                yield from take(item, value[key])
        elif isinstance(form, Attributes):
            for name, item in form.attributes:
                yield from take(item, getattr(value, name))

    for path, form in call.changed:
        yield from take(form, tree.get(args, kwargs, path))
    yield from take(call.answer, answer)
