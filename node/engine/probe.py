"""Try every proposed unit with numbers before it is divided, and drop those for which the rule is wrong.

A unit's module is copied with random weights and a narrow hidden size, so that the model's own weights are
never read, and called as the model calls it: once whole, and once as shares of two uneven ranks. The rule
is right when the shares add up to the whole. Equal modules are tried once.
"""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.node.engine import tree
from mlx_mesh.node.engine.caches import cache_ids
from mlx_mesh.node.engine.hooks import Original, hook_model, unhook_model
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.rules import Proposal, Unit, dims_of, is_linear, propose
from mlx_mesh.node.engine.tensor import divide_layer
from mlx_mesh.node.engine.trace import ModelTrace

_NARROW = 32  # hidden size of the copies
_TOLERANCE = 1e-3  # relative; a wrong rule is off by far more, float32 rounding by far less


def divisible_units(lazy: LazyModel, trace: ModelTrace | None) -> Proposal:
    """The units of a model that may be divided, each proven on copies, and the reasons for the others.
    `trace` is None for a model that cannot be traced; its attention then stays whole."""
    proposal = propose(lazy.layers)
    sharing = "the model cannot be traced" if trace is None else trace.why_attention_is_shared()
    kept = Proposal(refusals=list(proposal.refusals))
    candidates = []
    for unit in proposal.units:
        if unit.kind == "attention" and sharing:
            kept.refusals.append(f"layers.{unit.layer}.{unit.path}: {sharing}")
        elif unit.num_units > 1:
            candidates.append(unit)
        else:
            kept.refusals.append(f"layers.{unit.layer}.{unit.path}: it has only one part")
    calls = _record(lazy, candidates)
    verdicts: dict[Any, str] = {}
    for number, unit in enumerate(candidates):
        module = _module(lazy, unit)
        key = _signature(module, unit)
        if number not in calls:
            verdict = "the model does not call it as a whole"
        else:
            if key not in verdicts:
                verdicts[key] = _try(module, unit, calls[number])
            verdict = verdicts[key]
        if verdict:
            kept.refusals.append(f"layers.{unit.layer}.{unit.path}: {verdict}")
        else:
            kept.units.append(unit)
    return kept


def why_undivided(proposal: Proposal) -> str:
    """One clause for people: why so few or no units can be divided."""
    if proposal.units:
        most = max(unit.num_units for unit in proposal.units)
        return f"its layers can be divided into {most} parts at most"
    if proposal.refusals:
        return f"no part of its layers can be divided, for example {proposal.refusals[0]}"
    return "no part of its layers has a form that the tensor rules know"


def _module(lazy: LazyModel, unit: Unit) -> Any:
    return dict(lazy.layers[unit.layer].named_modules())[unit.path]


# ------------------------------------------------------------ how the model calls its units


@dataclass(frozen=True, slots=True)
class _Call:
    """Arguments of one call; caches are copies from before it."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(slots=True, eq=False)
class _Recorder:
    caches: set[int]
    calls: dict[int, _Call] = field(default_factory=dict)

    def call_model(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return original(*args, **kwargs)

    def call_layer(
        self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if index not in self.calls:
            kept_args = tuple(self._keep(arg) for arg in args)
            self.calls[index] = _Call(kept_args, {name: self._keep(arg) for name, arg in kwargs.items()})
        return original(*args, **kwargs)

    def _keep(self, value: Any) -> Any:
        return copy.deepcopy(value) if id(value) in self.caches else value


def _record(lazy: LazyModel, units: list[Unit]) -> dict[int, _Call]:
    """The first call of each unit in one lazy forward, by the unit's number."""
    if not units:
        return {}
    caches = make_prompt_cache(lazy.model)
    recorder = _Recorder(cache_ids(caches))
    modules = [_module(lazy, unit) for unit in units]
    hook_model(lazy.model, modules, recorder)
    try:
        lazy.model(mx.zeros((1, 3), dtype=mx.uint32), cache=caches)
    except Exception:
        return {}  # whoever runs the model says what is wrong with it
    finally:
        unhook_model(lazy.model, modules)
    return recorder.calls


def _signature(module: Any, unit: Unit) -> Any:
    """Equal for modules on which the rule does the same."""
    scalars = tuple(
        (name, value)
        for name, value in sorted(vars(module).items())
        if isinstance(value, (bool, int, float, str)) and "layer" not in name and "idx" not in name
    )
    parts = tuple((path, type(part), _shapes(part)) for path, part in module.named_modules())
    return type(module), scalars, parts, dataclasses.replace(unit, layer=0)


def _shapes(module: Any) -> tuple[Any, ...]:
    return tuple((name, x.shape) for name, x in module.items() if isinstance(x, mx.array))


# ------------------------------------------------------------ whole against shares


class _Reached(Exception):
    """Carries a rank's partial result out of its forward."""

    def __init__(self, partial: Any) -> None:
        self.partial = partial


@dataclass(slots=True, eq=False)
class _OneSum:
    """An exchange for a unit, which has exactly one sum. Without a total the sum ends the forward."""

    rank: int
    world_size: int
    total: Any = None
    num_sums: int = 0

    def all_sum(self, x: Any) -> Any:
        self.num_sums += 1
        if self.total is None:
            raise _Reached(x)
        return self.total

    def send(self, x: Any, to: int) -> Any:
        raise NotImplementedError

    def recv(self, shape: tuple[int, ...], dtype: Any, source: int) -> Any:
        raise NotImplementedError

    def broadcast_ids(self, ids: Any, num_rows: int, after: list[Any]) -> Any:
        raise NotImplementedError


def _try(module: Any, unit: Unit, call: _Call) -> str:
    """'' when the unit's shares add up to the whole, else what went wrong."""
    try:
        error = _compare(module, unit, call)
    except Exception as failure:
        return f"divided, it raises {type(failure).__name__}: {str(failure).splitlines()[0][:120]}"
    return "" if error < _TOLERANCE else f"its shares do not add up to the whole (off by {error:.2g})"


def _compare(module: Any, unit: Unit, call: _Call) -> float:
    hidden = dims_of(module[unit.cuts[0].name])[1]
    weights = [2, 1] if unit.num_units > 2 else [1, 1]
    args, kwargs = _random_inputs(call, hidden)
    model = _narrow(module, unit)
    whole = _run(model, args, kwargs)
    partials = []
    for rank in range(2):
        try:
            _run(_share(model, unit, weights, _OneSum(rank, 2)), args, kwargs)
        except _Reached as reached:
            partials.append(reached.partial)
    exchange = _OneSum(1, 2, total=partials[0] + partials[1])
    shared = _run(_share(model, unit, weights, exchange), args, kwargs)
    if exchange.num_sums != 1 or len(shared) != len(whole):
        return float("inf")
    worst = 0.0
    for a, b in zip(shared, whole, strict=True):
        if a.shape != b.shape:
            return float("inf")
        scale = float(mx.abs(b).max().item()) or 1.0
        worst = max(worst, float(mx.abs(a - b).max().item()) / scale)
    return worst


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arrays in the module's answer; every run gets caches of its own."""
    out = model(*copy.deepcopy(args), **copy.deepcopy(kwargs))
    arrays = [leaf.astype(mx.float32) for _, leaf in tree.walk(out, set()) if isinstance(leaf, mx.array)]
    mx.eval(arrays)
    return arrays


def _random_inputs(call: _Call, hidden: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The recorded arguments with random numbers for every array of numbers; hidden states become narrow."""
    key = [mx.random.key(11)]

    def fresh(value: Any) -> Any:
        if isinstance(value, mx.array):
            if not mx.issubdtype(value.dtype, mx.floating) or value.ndim == 0:
                return value
            key[0], mine = mx.random.split(key[0])
            width = _NARROW if value.shape[-1] == hidden else value.shape[-1]
            return mx.random.normal((*value.shape[:-1], width), key=mine)
        if isinstance(value, (list, tuple)):
            return type(value)([fresh(item) for item in value])
        return value

    args = tuple(fresh(arg) for arg in call.args)
    kwargs = {name: fresh(arg) for name, arg in call.kwargs.items()}
    mx.eval([leaf for _, leaf in tree.walk_call(args, kwargs, set()) if isinstance(leaf, mx.array)])
    return args, kwargs


def _narrow(module: Any, unit: Unit) -> Any:
    """A copy with random weights, plain linears and a narrow hidden size."""
    rows = {cut.name: cut.rows for cut in unit.cuts}
    key = [mx.random.key(5)]

    def random(shape: tuple[int, ...]) -> Any:
        key[0], mine = mx.random.split(key[0])
        return mx.random.normal(shape, key=mine) * 0.3

    def linear(old: Any, is_rows: bool) -> Any:
        outputs, inputs = dims_of(old)
        outputs, inputs = (outputs, _NARROW) if is_rows else (_NARROW, inputs)
        new = nn.Linear(inputs, outputs, bias=False)
        new.weight = random((outputs, inputs))
        if "bias" in old:
            new.bias = random((outputs,))
        return new

    def copied(old: Any, top: bool) -> Any:
        new = copy.copy(old)
        for name, value in list(old.items()):
            if top and name in rows and is_linear(value):
                new[name] = linear(value, rows[name])
            elif isinstance(value, nn.Module):
                new[name] = copied(value, top=False)
            elif isinstance(value, mx.array) and mx.issubdtype(value.dtype, mx.floating):
                new[name] = random(value.shape)
        return new

    return copied(module, top=True)


def _share(model: Any, unit: Unit, weights: list[int], exchange: _OneSum) -> Any:
    """One rank's share of a narrow copy."""
    mine = copy.copy(model)
    for cut in unit.cuts:
        mine[cut.name] = copy.copy(model[cut.name])

    def part(path: str, array: Any, axis: int, span: tuple[int, int]) -> Any:
        index = [slice(None)] * array.ndim
        index[axis] = slice(*span)
        return array[tuple(index)]

    divide_layer(mine, "", [dataclasses.replace(unit, path="")], weights, exchange, part)
    return mine
