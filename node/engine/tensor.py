"""Make one rank's share of a layer in place: slice the parameters of its units, lower the counts of heads and
channels, and let what the ranks compute in parts come together (`sums`).

Row-parallel biases count once: they are added after the sum, or only rank 0 keeps them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_mesh.mesh.tensor_units import DividedBytes, Layout, Range, Segment, count_of, ranges_of
from mlx_mesh.node.engine.exchange import Exchange
from mlx_mesh.node.engine.rules import Cut, Unit, base_of, dims_of, is_linear, module_at, own_arrays
from mlx_mesh.node.engine.sums import gather_outputs, sum_outputs, widen_norm
from mlx_mesh.node.engine.vocabulary import spread_vocabulary

Slicer = Callable[[str, Any, int, Sequence[Range]], Any]
"""(parameter path, array, axis, [start, stop) ranges) -> those parts joined, evaluated or lazy."""


@dataclass(frozen=True, slots=True)
class Slice:
    """One array of a unit and how one of its axes is divided. `scale`: stored elements per element of the
    layout, as (numerator, denominator); packed quantised inputs have fewer."""

    owner: str  # path of the module that holds it, inside the unit's
    parameter: str
    axis: int
    layout: Layout
    scale: tuple[int, int] = (1, 1)

    def ranges(self, start: int, stop: int) -> list[Range]:
        up, down = self.scale
        return [(a * up // down, b * up // down) for a, b in ranges_of(self.layout, start, stop)]


def slices_of(module: Any, unit: Unit) -> Iterator[Slice]:
    """Every array of the unit that is divided."""
    for cut in unit.cuts:
        target = module_at(module, cut.path)
        if isinstance(target, mx.array):
            owner, _, name = cut.path.rpartition(".")
            yield Slice(owner, name, cut.axis, cut.layout)
        elif is_linear(target):
            yield from _linear_slices(cut, target)
        else:
            for name, array in own_arrays(target):
                if array.ndim > cut.axis and array.shape[cut.axis] == sum(x.size for x in cut.layout):
                    yield Slice(cut.path, name, cut.axis, cut.layout)


def _linear_slices(cut: Cut, linear: Any) -> Iterator[Slice]:
    base = base_of(linear)
    inner = cut.path if base is linear else f"{cut.path}.linear" if cut.path else "linear"
    outputs, inputs = dims_of(linear)
    for name, array in own_arrays(base):
        if name in ("bias", "summed_bias"):
            if cut.side == "rows":
                yield Slice(inner, name, array.ndim - 1, cut.layout)
        elif name not in ("weight", "scales", "biases"):
            continue  # one value per expert
        elif cut.side == "rows":
            yield Slice(inner, name, array.ndim - 2, cut.layout)
        else:
            yield Slice(inner, name, array.ndim - 1, cut.layout, (array.shape[-1], inputs))
    if base is not linear:
        yield from _adapter_slices(cut, linear, outputs, inputs)


def _adapter_slices(cut: Cut, linear: Any, outputs: int, inputs: int) -> Iterator[Slice]:
    """Low-rank matrices: (inputs, r), (r, outputs) of a linear; (r, inputs), (outputs, r) of experts."""
    size, name = (outputs, "lora_b") if cut.side == "rows" else (inputs, "lora_a")
    array = linear[name]
    is_stacked = array.ndim == 3
    axis = 1 if is_stacked == (name == "lora_b") else 2
    axis = axis if is_stacked else (1 if name == "lora_b" else 0)
    assert array.shape[axis] == size, f"{name} {array.shape} of a linear {outputs}x{inputs}"
    yield Slice(cut.path, name, axis, cut.layout)
    if "m" in linear and cut.side == "rows":
        yield Slice(cut.path, "m", 0, cut.layout)


def bytes_of_unit(module: Any, unit: Unit) -> list[DividedBytes]:
    """The divided parameters of a unit by how they are cut; nothing is read."""
    found = [
        DividedBytes(unit.division, (Segment(bias.size),), bias.nbytes // bias.size, is_leaders=True)
        for cut in unit.cuts
        if (bias := _bias_of_one(module, unit, cut)) is not None
    ]
    for part in slices_of(module, unit):
        array = module_at(module, part.owner)[part.parameter]
        up, down = part.scale
        if part.parameter.startswith("_"):
            continue
        size, total = sum(x.size for x in part.layout), int(array.nbytes)
        if total % size == 0:
            layout, per_element = part.layout, total // size
        else:  # packed to less than a byte: count in quantisation groups
            step = down // _gcd(up, down)
            layout = tuple(
                Segment(x.size // step, x.per_group // step or (1 if x.per_group else 0), x.ratio)
                for x in part.layout
            )
            per_element = total * step // size
        found.append(DividedBytes(unit.division, layout, per_element))
    return found


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a


def divide_layer(
    layer: Any,
    prefix: str,
    units: Iterable[Unit],
    weights: Sequence[int],
    exchange: Exchange,
    slicer: Slicer,
) -> None:
    """Turn a whole layer (or for vocabulary units the model) into this rank's share. `prefix` is the layer's
    path in the model's parameters."""
    for unit in units:
        module = module_at(layer, unit.path)
        share = unit.division.share(weights, exchange.rank)
        for part in list(slices_of(module, unit)):
            owner = module_at(module, part.owner)
            path = ".".join(x for x in (prefix, unit.path, part.owner, part.parameter) if x)
            owner[part.parameter] = slicer(path, owner[part.parameter], part.axis, part.ranges(*share))
        counts = [
            (count, count_of(count.layout, *share), count_of(count.over, *share) if count.over else 1)
            for count in unit.counts
        ]
        for count, value, over in counts:
            _set_attribute(module_at(module, count.path), count.name, value // over)
        _join(module, unit, share, weights, exchange)


def _set_attribute(target: Any, name: str, value: int) -> None:
    holder, _, name = name.rpartition(".")
    if holder:  # a config that other modules share: this module gets one of its own
        own = copy.copy(getattr(target, holder))
        setattr(target, holder, own)
        target = own
    setattr(target, name, value)


def _bias_of_one(module: Any, unit: Unit, cut: Cut) -> Any | None:
    """The bias of a row-parallel linear that only rank 0 may add: where the sum comes after other things (the
    whole block is summed, or the bias is chosen inside the call)."""
    if cut.side != "columns":
        return None
    bias = base_of(module_at(module, cut.path)).get("bias")
    return None if bias is None or (cut.path in unit.sums and bias.ndim == 1) else bias


def _join(module: Any, unit: Unit, share: Range, weights: Sequence[int], exchange: Exchange) -> None:
    for path in unit.sums:
        sum_outputs(module_at(module, path), exchange)
    for cut in unit.cuts:
        # The block is summed as a whole, so only one rank may add this linear's bias.
        if cut.side == "columns" and cut.path not in unit.sums and exchange.rank > 0:
            base_of(module_at(module, cut.path)).pop("bias", None)
    shares = [unit.division.share(weights, rank) for rank in range(exchange.world_size)]
    if unit.kind == "vocabulary":
        spread_vocabulary(module, shares, exchange)
        return
    for norm in unit.norms:
        held = [ranges_of(norm.layout, *each) for each in shares]
        widen_norm(module_at(module, norm.path), held, norm.sums_squares, exchange)
    for path in unit.gathers:
        (cut,) = unit.cuts
        gather_outputs(module_at(module, path), sum(x.size for x in cut.layout), share[0], exchange)
