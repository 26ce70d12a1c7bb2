"""Which parts of a layer can be divided over ranks, told from module structure and shapes.

A unit is an attention or an MLP whose input is the whole hidden state and whose output is one linear: each
rank computes with some of its heads or inner columns, and the outputs add up. The rules know the usual
names of linears and head counts, and check them against the shapes; what does not fit stays replicated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn

from mlx_mesh.mesh.partition import split_units

_QUERY = ("q_proj", "wq", "query", "q")
_KEY = ("k_proj", "wk", "key", "k")
_VALUE = ("v_proj", "wv", "value", "v")
_OUT = ("o_proj", "out_proj", "wo", "dense", "c_proj", "o")
_HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head", "num_q_heads", "n_q_heads")
_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads", "n_head_kv")
_LEAVES_WITHOUT_HEADS = ("rope", "rotary_emb")

_MLP_ALIGNMENT = 32  # inner columns per unit, where they divide

UnitKind = Literal["attention", "mlp"]


@dataclass(frozen=True, slots=True)
class Cut:
    """One linear of a unit. `rows`: its outputs are divided (column-parallel), else its inputs
    (row-parallel). `per_group`: outputs or inputs per group of the unit."""

    name: str
    rows: bool
    per_group: int


@dataclass(frozen=True, slots=True)
class Unit:
    """A divisible part of one layer. `edges` are the group numbers where a rank's share may begin or end;
    one unit of work lies between two of them. `counts` are head-count attributes and their value per group;
    `vectors` are parameters whose first axis has `n` entries per group."""

    layer: int
    path: str  # module path inside the layer
    kind: UnitKind
    edges: tuple[int, ...]
    cuts: tuple[Cut, ...]
    counts: tuple[tuple[str, int], ...] = ()
    vectors: tuple[tuple[str, int], ...] = ()

    @property
    def num_units(self) -> int:
        return len(self.edges) - 1

    def share(self, weights: Sequence[int], rank: int) -> tuple[int, int]:
        """The groups [start, stop) of one rank."""
        units = split_units(self.num_units, weights)
        start = sum(units[:rank])
        return self.edges[start], self.edges[start + units[rank]]


@dataclass(slots=True)
class Proposal:
    """All units of a model, and why other parts that look like units are not."""

    units: list[Unit] = field(default_factory=list)
    refusals: list[str] = field(default_factory=list)  # "layers.0.self_attn: reason"

    def for_ranks(self, num_ranks: int) -> list[Unit]:
        """The units with at least one unit of work per rank; the others stay whole on every rank."""
        return [unit for unit in self.units if unit.num_units >= num_ranks]


def propose(layers: Sequence[Any]) -> Proposal:
    """Find the divisible units of every layer."""
    proposal = Proposal()
    for index, layer in enumerate(layers):
        for path, module in layer.named_modules():
            for rule in (_attention, _mlp):
                result = rule(index, path, module)
                if isinstance(result, Unit):
                    proposal.units.append(result)
                    break
                if result:
                    proposal.refusals.append(f"layers.{index}.{path}: {result}")
                    break
    return proposal


def is_linear(module: Any) -> bool:
    """Whether the rules know how to slice it; a subclass with a call of its own may do anything."""
    return isinstance(module, (nn.Linear, nn.QuantizedLinear)) and type(module).__call__ in (
        nn.Linear.__call__,
        nn.QuantizedLinear.__call__,
    )


def dims_of(linear: Any) -> tuple[int, int]:
    """(outputs, inputs) of a plain or quantised linear."""
    outputs, inputs = linear.weight.shape
    if isinstance(linear, nn.QuantizedLinear):
        inputs = inputs * 32 // linear.bits
    return outputs, inputs


def input_grain(linear: Any) -> int:
    """Inputs can be cut only at multiples of this: the quantisation group."""
    return int(linear.group_size) if isinstance(linear, nn.QuantizedLinear) else 1


def _linears(module: Any) -> dict[str, Any]:
    return {name: child for name, child in module.children().items() if is_linear(child)}


def _one_of(names: Sequence[str], linears: dict[str, Any]) -> str | None:
    found = [name for name in names if name in linears]
    return found[0] if len(found) == 1 else None


def _attribute(module: Any, names: Sequence[str]) -> int | None:
    for name in names:
        value = vars(module).get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _attention(layer: int, path: str, module: Any) -> Unit | str:
    """The unit, why it cannot be divided, or '' when it is no attention."""
    linears = _linears(module)
    query, key = _one_of(_QUERY, linears), _one_of(_KEY, linears)
    value, out = _one_of(_VALUE, linears), _one_of(_OUT, linears)
    heads = _attribute(module, _HEADS)
    if heads is None or query is None or key is None or value is None or out is None:
        return "it has heads, but no linears that the rules know" if heads and len(linears) > 1 else ""
    kv_heads = _attribute(module, _KV_HEADS) or heads
    if heads % kv_heads:
        return f"{heads} heads are no multiple of {kv_heads} KV heads"
    per_group = heads // kv_heads
    cuts = []
    for name, count in ((query, heads), (key, kv_heads), (value, kv_heads)):
        outputs = dims_of(linears[name])[0]
        if outputs % count:
            return f"{name} has {outputs} outputs for {count} heads"
        cuts.append(Cut(name, rows=True, per_group=outputs // kv_heads))
    inputs = dims_of(linears[out])[1]
    value_dim = dims_of(linears[value])[0] // kv_heads
    if inputs != heads * value_dim:
        return f"{out} has {inputs} inputs for {heads} heads of {value_dim}"
    cuts.append(Cut(out, rows=False, per_group=inputs // kv_heads))
    rest = [name for name in linears if name not in {cut.name for cut in cuts}]
    if rest:
        return f"the rules do not know its {', '.join(rest)}"
    vectors, reason = _head_vectors(module, heads, per_group, {dims_of(linears[c.name])[0] for c in cuts[:3]})
    if reason:
        return reason
    counts = tuple(
        (name, per_group if value == heads and name in _HEADS else 1)
        for name, value in vars(module).items()
        if (name in _HEADS and value == heads) or (name in _KV_HEADS and value == kv_heads)
    )
    grain = input_grain(linears[out])
    step = grain // math.gcd(grain, inputs // kv_heads)
    return Unit(layer, path, "attention", _edges(kv_heads, step), tuple(cuts), counts, vectors)


def _head_vectors(
    module: Any, heads: int, per_group: int, widths: set[int]
) -> tuple[tuple[tuple[str, int], ...], str]:
    """Parameters besides the linears: one entry per head is sliced, one over all heads forbids the cut."""
    vectors = []
    for name, value in module.items():
        if isinstance(value, mx.array):
            if value.shape[:1] != (heads,):
                return (), f"the rules do not know its parameter {name}"
            vectors.append((name, per_group))
        elif isinstance(value, nn.Module) and not is_linear(value) and name not in _LEAVES_WITHOUT_HEADS:
            for _, inner in value.named_modules():
                for inner_name, array in inner.items():
                    if isinstance(array, mx.array) and array.shape and array.shape[-1] in widths:
                        return (), f"{name}.{inner_name} spans all heads"
    return tuple(vectors), ""


def _mlp(layer: int, path: str, module: Any) -> Unit | str:
    """The unit, why it cannot be divided, or '' when it is no MLP."""
    linears = _linears(module)
    if len(linears) < 2 or len(linears) > 3 or _attribute(module, _HEADS) is not None:
        return ""
    sizes = {name: dims_of(linear) for name, linear in linears.items()}
    downs = [
        name
        for name, (outputs, inputs) in sizes.items()
        if all(sizes[other] == (inputs, outputs) for other in sizes if other != name)
    ]
    if len(downs) != 1:
        return ""
    if any(isinstance(value, mx.array) for value in module.values()):
        return "the rules do not know its own parameters"
    if any(
        isinstance(value, nn.Module) and not is_linear(value) and list(_arrays(value))
        for value in module.values()
    ):
        return "it has a module with parameters between its linears"
    down = downs[0]
    inner = sizes[down][1]
    grain = math.lcm(input_grain(linears[down]), math.gcd(inner, _MLP_ALIGNMENT))
    cuts = tuple(Cut(name, rows=name != down, per_group=1) for name in linears)
    return Unit(layer, path, "mlp", _edges(inner, grain), cuts)


def _arrays(module: Any) -> Iterator[Any]:
    for _, inner in module.named_modules():
        for value in inner.values():
            if isinstance(value, mx.array):
                yield value


def _edges(count: int, step: int) -> tuple[int, ...]:
    """0, step, 2*step, ... count; a remainder smaller than a step joins the last unit."""
    edges = list(range(0, count - step + 1, step)) or [0]
    edges.append(count)
    if len(edges) > 2 and edges[-1] - edges[-2] < step:
        del edges[-2]
    return tuple(edges)
