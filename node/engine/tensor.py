"""Make one rank's share of a layer in place: slice the parameters of its units, lower the head counts, and
let the last linear of each unit add up over the ranks.

Row-parallel biases are added after the sum, on every rank, so they count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mesh.node.engine.exchange import Exchange
from mlx_mesh.node.engine.rules import Cut, Unit, dims_of

Slicer = Callable[[str, Any, int, tuple[int, int]], Any]
"""(parameter path, array, axis, [start, stop)) -> that part of the array, evaluated or lazy."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One parameter of a unit and the part of it that a rank keeps."""

    linear: str  # '' = a parameter of the unit's own module
    parameter: str
    axis: int
    start: int
    stop: int


class _Summing:
    """Mixed into the class of a row-parallel linear: its output is summed over the ranks."""

    def __call__(self, x: Any) -> Any:
        partial = super().__call__(x)  # type: ignore[misc]
        module: Any = self
        y = module._mesh_exchange.all_sum(partial)
        return y + module["summed_bias"] if "summed_bias" in module else y


_summing_classes: dict[type, type] = {}


def slices_of(module: Any, unit: Unit, share: tuple[int, int]) -> Iterator[Slice]:
    """What a rank with groups [start, stop) of `unit` keeps of each parameter that is divided."""
    start, stop = share
    for cut in unit.cuts:
        yield from _linear_slices(cut, module[cut.name], start * cut.per_group, stop * cut.per_group)
    for name, per_group in unit.vectors:
        yield Slice("", name, 0, start * per_group, stop * per_group)


def _linear_slices(cut: Cut, linear: Any, start: int, stop: int) -> Iterator[Slice]:
    _, inputs = dims_of(linear)
    for parameter, array in linear.items():
        if not isinstance(array, mx.array):
            continue
        if cut.rows:
            yield Slice(cut.name, parameter, 0, start, stop)
        elif array.ndim == 2:  # weight, and scales and biases of a quantised one; packed along the inputs
            stored = array.shape[1]
            yield Slice(cut.name, parameter, 1, start * stored // inputs, stop * stored // inputs)


def bytes_of_share(layer: Any, units: Iterable[Unit], weights: Sequence[int], rank: int) -> int:
    """Bytes of the divided parameters of `layer` that one rank keeps; nothing is read."""
    total = 0
    modules = dict(layer.named_modules())
    for unit in units:
        module = modules[unit.path]
        for part in slices_of(module, unit, unit.share(weights, rank)):
            array = (module[part.linear] if part.linear else module)[part.parameter]
            total += array.nbytes // array.shape[part.axis] * (part.stop - part.start)
    return total


def divide_layer(
    layer: Any,
    prefix: str,
    units: Iterable[Unit],
    weights: Sequence[int],
    exchange: Exchange,
    slicer: Slicer,
) -> None:
    """Turn a whole layer into this rank's share. `prefix` is the layer's path in the model's parameters."""
    modules = dict(layer.named_modules())
    for unit in units:
        module = modules[unit.path]
        share = unit.share(weights, exchange.rank)
        for part in list(slices_of(module, unit, share)):
            owner = module[part.linear] if part.linear else module
            path = ".".join(x for x in (prefix, unit.path, part.linear, part.parameter) if x)
            owner[part.parameter] = slicer(path, owner[part.parameter], part.axis, (part.start, part.stop))
        for name, per_group in unit.counts:
            setattr(module, name, per_group * (share[1] - share[0]))
        for cut in unit.cuts:
            if not cut.rows:
                _make_summing(module[cut.name], exchange)


def _make_summing(linear: nn.Module, exchange: Exchange) -> None:
    cls = type(linear)
    if cls not in _summing_classes:
        _summing_classes[cls] = type(cls.__name__, (_Summing, cls), {"__module__": cls.__module__})
    if "bias" in linear:
        linear["summed_bias"] = linear.pop("bias")
    target: Any = linear
    target.__class__ = _summing_classes[cls]
    target._mesh_exchange = exchange
