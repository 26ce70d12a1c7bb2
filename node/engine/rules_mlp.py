"""Units of MLPs and experts: the inner columns are divided, of every expert alike.

An MLP is one linear down and one or two up (or one twice as wide, its halves side by side or alternating).
A block with experts is divided as a whole, with one sum at its output, when everything that it adds up comes
out of its own MLPs; else each MLP inside has a sum of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from mlx_mesh.mesh.tensor_units import Division, Layout, Segment
from mlx_mesh.node.engine.rules import (
    Cut,
    Unit,
    dims_of,
    edges_of,
    input_grain,
    is_expert_linear,
    is_linear,
    modules_below,
)

_ALIGNMENT = 32  # inner columns per unit, where they divide
_FEWEST_UNITS = 8


def mlp_units(layer: int, path: str, module: Any) -> list[Unit]:
    """Candidates for one MLP with a sum at its last linear."""
    return [
        Unit(layer, path, "mlp", division, cuts, sums=(down,)) for division, cuts, down in _shapes(module)
    ]


def block_units(layer: int, path: str, module: Any) -> list[Unit]:
    """Candidates for a block of several MLPs, at least one with experts, with one sum at its output."""
    inner = [
        (below, shapes)
        for below, child in modules_below(module)
        if below and (shapes := list(_shapes(child)))
    ]
    if not inner or not any(_has_experts(module, below) for below, _ in inner):
        return []
    return [
        unit
        for variant in range(max(len(shapes) for _, shapes in inner))
        if (unit := _block(layer, path, [(p, s[min(variant, len(s) - 1)]) for p, s in inner]))
    ]


def _block(
    layer: int, path: str, parts: Sequence[tuple[str, tuple[Division, tuple[Cut, ...], str]]]
) -> Unit | None:
    """All parts are cut at the same fractions of their inner columns, which their lengths must allow."""
    counts = [part.edges[-1] for _, (part, _, _) in parts]
    steps = [part.edges[1] for _, (part, _, _) in parts]
    units = math.gcd(*(count // step for count, step in zip(counts, steps, strict=True)))
    if any(count % units for count in counts) or units < 2:
        return None
    cuts = tuple(
        Cut(f"{below}.{cut.path}", cut.side, _scaled(cut.layout, count // units))
        for (below, (_, own, _)), count in zip(parts, counts, strict=True)
        for cut in own
    )
    return Unit(layer, path, "mlp", Division(tuple(range(units + 1))), cuts, sums=("",))


def _scaled(layout: Layout, columns: int) -> Layout:
    """The same layout in groups of `columns` inner columns."""
    return tuple(Segment(part.size, part.per_group * columns, part.ratio) for part in layout)


def _has_experts(module: Any, below: str) -> bool:
    child = dict(modules_below(module))[below]
    return any(is_expert_linear(x) for x in child.values())


def _shapes(module: Any) -> Iterator[tuple[Division, tuple[Cut, ...], str]]:
    """(where it may be cut, its cuts, its last linear) for each way to read a module as an MLP."""
    items = module.items() if isinstance(module, dict) else ()
    linears = {name: child for name, child in items if is_linear(child)}
    if not 2 <= len(linears) <= 3 or len({is_expert_linear(x) for x in linears.values()}) > 1:
        return
    sizes = {name: dims_of(linear) for name, linear in linears.items()}
    for down, (outputs, inner) in sizes.items():
        others = {name: size for name, size in sizes.items() if name != down}
        if any(size[1] != outputs for size in others.values()):
            continue
        plain = all(size[0] == inner for size in others.values())
        fused = len(others) == 1 and all(size[0] == 2 * inner for size in others.values())
        if not plain and not fused:
            continue
        if plain and outputs == inner and not _is_last(down, sizes):
            continue
        division = Division(_inner_edges(inner, input_grain(linears[down])))
        columns = Cut(down, "columns", (Segment(inner, 1),))
        if plain:
            yield division, (*(Cut(x, "rows", (Segment(inner, 1),)) for x in others), columns), down
        else:
            (up,) = others
            for rows in ((Segment(inner, 1), Segment(inner, 1)), (Segment(2 * inner, 2),)):
                yield division, (Cut(up, "rows", rows), columns), down


def _is_last(name: str, sizes: dict[str, tuple[int, int]]) -> bool:
    """When all linears are square the name must tell which one is last."""
    marks = ("down", "w2", "c_proj", "fc2", "fc_out", "out", "resid", "proj_2", "value", "4h_to_h")
    if name == "c_proj" or any(mark in name for mark in marks):
        return True
    return not any(mark in other for other in sizes for mark in marks) and name == list(sizes)[-1]


def _inner_edges(inner: int, grain: int) -> tuple[int, ...]:
    step = math.lcm(grain, math.gcd(inner, _ALIGNMENT))
    while inner // step < _FEWEST_UNITS and step % 2 == 0 and (step // 2) % grain == 0:
        step //= 2  # small models: shares as asked matter more than alignment
    return edges_of(inner, step)
