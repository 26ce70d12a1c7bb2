"""Which parts of a layer can be divided over ranks, told from module structure and shapes.

A unit takes the whole hidden state and gives the whole hidden state; inside, each rank computes with some
of its heads or inner columns, and the outputs add up. `rules_mixers` proposes units for attention and
recurrent mixers, `rules_mlp` for MLPs and experts. A rule may be wrong: each proposal is tried with numbers
(`probe`) before it is used, and what no rule divides is cut linear by linear (`gathered`): every rank
computes some outputs of such a linear and the ranks put them together, which is right for any use of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.mla import MultiLinear, QuantizedMultiLinear
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.dora import DoRALinear
from mlx_lm.tuner.lora import LoRALinear, LoRASwitchLinear

from mlx_mesh.mesh.tensor_units import Division, Layout, Segment

UnitKind = Literal["attention", "mlp", "gathered", "vocabulary"]
"""`attention` stands for every mixer with heads or channels, whose state is divided too."""


@dataclass(frozen=True, slots=True)
class Cut:
    """One module with parameters, or one parameter, of a unit. `rows`: the outputs of a linear are divided;
    `columns`: its inputs; `axis`: axis `axis` of every array there, or of the parameter of that path."""

    path: str  # inside the unit's module
    side: Literal["rows", "columns", "axis"]
    layout: Layout
    axis: int = 0


@dataclass(frozen=True, slots=True)
class Count:
    """An integer attribute of the module at `path`, or "args.x" of its config: as many as the rank has
    elements of `layout`; with `over`, that number divided by the elements of `over`."""

    path: str
    name: str
    layout: Layout
    over: Layout = ()


@dataclass(frozen=True, slots=True)
class WideNorm:
    """A norm over elements of all ranks. `sums_squares`: an RMS norm, which needs only one number of the
    other ranks; any other norm gets its whole input put together."""

    path: str
    layout: Layout
    sums_squares: bool


@dataclass(frozen=True, slots=True)
class State:
    """Bytes that a mixer keeps between tokens, as measured on a copy, and which of them every rank keeps."""

    kv: int = 0  # keys and values
    whole_kv: int = 0
    fixed: int = 0  # whatever the length (SSM, convolution)
    whole_fixed: int = 0


@dataclass(frozen=True, slots=True)
class Unit:
    """A divisible part of one layer, or (layer -1) of what is outside the layers. `sums` are the modules
    inside whose outputs add up over the ranks, '' the unit's own; of `gathered` ones the outputs are put
    together instead."""

    layer: int
    path: str  # module path inside the layer
    kind: UnitKind
    division: Division
    cuts: tuple[Cut, ...]
    counts: tuple[Count, ...] = ()
    sums: tuple[str, ...] = ()
    norms: tuple[WideNorm, ...] = ()
    gathers: tuple[str, ...] = ()
    state: State = State()
    num_heads: int = 0  # of a mixer, by which its fixed states are divided
    kv_heads: Layout = ()  # and by which its keys and values are

    @property
    def num_units(self) -> int:
        """Parts without a copy of anything."""
        return len(self.division.edges) - 1

    @property
    def num_collectives(self) -> int:
        """Sums over the ranks in each forward."""
        return len(self.sums) + len(self.norms) + len(self.gathers)


@dataclass(slots=True)
class Proposal:
    """All units of a model, and why other parts that look like units are not."""

    units: list[Unit] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # "layers.0.self_attn: reason"
    vocabulary: list[Unit] = field(default_factory=list)  # embeddings and output heads

    def for_ranks(self, num_ranks: int) -> list[Unit]:
        """The units with work for every rank; the others stay whole on every rank."""
        return [unit for unit in self.units if unit.division.can_serve(num_ranks)]

    def vocabulary_for(self, num_ranks: int) -> list[Unit]:
        """The same of what is divided by vocabulary."""
        return [unit for unit in self.vocabulary if unit.division.can_serve(num_ranks)]


# ------------------------------------------------------------ linears


_LINEAR_CALLS = {
    cls.__call__
    for cls in (
        nn.Linear,
        nn.QuantizedLinear,
        SwitchLinear,
        QuantizedSwitchLinear,
        LoRALinear,
        LoRASwitchLinear,
        DoRALinear,
    )
}
_LINEAR_TYPES = (
    nn.Linear,
    nn.QuantizedLinear,
    SwitchLinear,
    QuantizedSwitchLinear,
    LoRALinear,
    LoRASwitchLinear,
    DoRALinear,
)


def is_linear(module: Any) -> bool:
    """Whether the rules know how to slice it; a subclass with a call of its own may do anything."""
    return isinstance(module, _LINEAR_TYPES) and type(module).__call__ in _LINEAR_CALLS


def is_expert_linear(module: Any) -> bool:
    """Whether it has one matrix per expert, and is called with the experts' numbers."""
    return isinstance(module, (SwitchLinear, QuantizedSwitchLinear, LoRASwitchLinear))


def is_head_linear(module: Any) -> bool:
    """Whether it has one matrix per head."""
    return isinstance(module, (MultiLinear, QuantizedMultiLinear))


def base_of(linear: Any) -> Any:
    """The linear that holds the weight: itself, or the one inside an adapter."""
    return linear.get("linear", linear)


def dims_of(linear: Any) -> tuple[int, int]:
    """(outputs, inputs) of a linear, quantised or not; of one expert when there are several."""
    base = base_of(linear)
    outputs, inputs = base.weight.shape[-2:]
    if "scales" in base:
        inputs = inputs * 32 // base.bits
    return outputs, inputs


def input_grain(linear: Any) -> int:
    """Inputs can be cut only at multiples of this: the quantisation group."""
    base = base_of(linear)
    return int(base.group_size) if "scales" in base else 1


def modules_below(module: Any) -> Iterator[tuple[str, Any]]:
    """(path, module) of a module and all below it, parents first; a linear or head linear is one thing,
    whatever is inside."""

    def below(value: Any, path: str) -> Iterator[tuple[str, Any]]:
        if isinstance(value, nn.Module):
            yield path, value
            if is_linear(value) or is_head_linear(value):
                return
            items: Any = value.items()
        elif isinstance(value, dict):
            items = value.items()
        elif isinstance(value, (list, tuple)):
            items = enumerate(value)
        else:
            return
        for name, item in items:
            yield from below(item, f"{path}.{name}" if path else str(name))

    yield from below(module, "")


def module_at(root: Any, path: str) -> Any:
    """The module (or parameter) at a path of `modules_below`."""
    for step in path.split(".") if path else ():
        root = root[int(step)] if isinstance(root, (list, tuple)) else root[step]
    return root


def edges_of(count: int, step: int) -> tuple[int, ...]:
    """0, step, 2*step, ... count; a remainder smaller than a step joins the last unit."""
    edges = list(range(0, count - step + 1, step)) or [0]
    edges.append(count)
    if len(edges) > 2 and edges[-1] - edges[-2] < step:
        del edges[-2]
    return tuple(dict.fromkeys(edges))


def own_arrays(module: Any) -> Iterator[tuple[str, Any]]:
    """The arrays that a module holds itself, those of fixed tables (named with _) too."""
    for name, value in module.items():
        if isinstance(value, mx.array):
            yield name, value


# ------------------------------------------------------------ what is left

_WORTH_A_SUM = 50  # a linear below 1/50 of its layer stays whole
_WORTH_CUTTING = 20  # and so do all of a layer's together below 1/20
_ROW_STEP = 32


def gathered(layer: int, root: Any, taken: Sequence[Unit]) -> list[Unit]:
    """The large linears of a layer that belong to none of the units `taken`, each cut by itself."""
    used = {".".join(x for x in (unit.path, cut.path) if x) for unit in taken for cut in unit.cuts}
    total = sum(array.nbytes for _, array in _parameters(root))
    units, in_units = [], 0
    for path, module in modules_below(root):
        if path in used or not is_linear(module):
            continue
        size = sum(array.nbytes for _, array in _parameters(module))
        outputs = dims_of(module)[0]
        if size * _WORTH_A_SUM < total or outputs < 2:
            continue
        step = _ROW_STEP
        while outputs // step < 16 and step > 1:
            step //= 2
        layout = (Segment(outputs, 1),)
        division = Division(edges_of(outputs, step), tuple(range(outputs + 1)) if outputs < 256 else ())
        units.append(Unit(layer, path, "gathered", division, (Cut("", "rows", layout),), gathers=("",)))
        in_units += size
    return units if in_units * _WORTH_CUTTING >= total else []


def _parameters(module: Any) -> Iterator[tuple[str, Any]]:
    for path, inner in module.named_modules():
        for name, array in own_arrays(inner):
            if not name.startswith("_"):
                yield f"{path}.{name}", array
