"""Try every proposed unit with numbers before it is divided, and leave out those for which the rule is wrong.

A unit's module is copied with random weights and a narrow hidden size, so that the model's own weights are
never read, and called as the model calls it: once whole, and once as shares of uneven ranks. The rule is
right when the shares add up to the whole. Equal modules are tried once.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.models.mla import MultiLinear
from mlx_lm.models.switch_layers import SwitchLinear
from mlx_lm.tuner.dora import DoRALinear

from mlx_mesh.mesh.tensor_units import Range
from mlx_mesh.node.engine import tree
from mlx_mesh.node.engine.caches import cache_ids
from mlx_mesh.node.engine.hooks import Original, hook_model, unhook_model
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.rules import (
    Proposal,
    Unit,
    base_of,
    dims_of,
    gathered,
    is_expert_linear,
    is_head_linear,
    is_linear,
    module_at,
    modules_below,
)
from mlx_mesh.node.engine.rules_mixers import mixer_units
from mlx_mesh.node.engine.rules_mlp import block_units, mlp_units
from mlx_mesh.node.engine.tensor import divide_layer
from mlx_mesh.node.engine.trace import ModelTrace
from mlx_mesh.node.engine.vocabulary import vocabulary_units

_NARROW = 20  # hidden size of the copies of wide models, which no other size of a model is
_WIDE = 512  # narrower ones keep their size
_TOLERANCE = 1e-3  # relative; a wrong rule is off by far more, float32 rounding by far less
_MOST_SUMS = 8


def divisible_units(lazy: LazyModel, trace: ModelTrace | None) -> Proposal:
    """The units of a model that may be divided, each proven on copies, and the reasons for the others.
    `trace` is None for a model that cannot be traced; its mixers are then cut linear by linear."""
    sharing = "the model cannot be traced" if trace is None else trace.why_attention_is_shared()
    layers = lazy.layers
    modules = {
        (index, path): module
        for index, layer in enumerate(layers)
        for path, module in modules_below(layer)
        if path and not is_linear(module)
    }
    recorded = _record(lazy, modules)
    by_form = {_form(modules[key]): call for key, call in recorded.items()}
    verdicts: dict[Any, tuple[Unit | None, str]] = {}
    kept = Proposal()
    for index, layer in enumerate(layers):
        if any(layer is earlier for earlier in layers[:index]):
            continue  # one object in several places
        own: list[Unit] = []
        for path, module in modules_below(layer):
            if not path or is_linear(module) or any(_is_below(path, unit.path) for unit in own):
                continue
            for propose in (_mixers, _blocks, _mlps):
                candidates, reason = propose(index, path, module)
                if not candidates and not reason:
                    continue
                if candidates and candidates[0].kind == "attention" and sharing:
                    candidates, reason = [], sharing
                if candidates:
                    unit, reason = _choose(
                        # An expert that no token chose is called like the others.
                        module,
                        candidates,
                        recorded.get((index, path)) or by_form.get(_form(module)),
                        verdicts,
                    )
                    if unit is not None:
                        own.append(dataclasses.replace(unit, layer=index, path=path))
                        break
                if propose is not _blocks:  # the MLPs inside a block are tried by themselves
                    kept.refusals.append(f"layers.{index}.{path}: {reason}")
        own += gathered(index, layer, own)
        kept.units += own
    kept.vocabulary = vocabulary_units(lazy, trace)  # right by construction; only a whole model can tell more
    return kept


def _mixers(layer: int, path: str, module: Any) -> tuple[list[Unit], str]:
    return mixer_units(layer, path, module)


def _blocks(layer: int, path: str, module: Any) -> tuple[list[Unit], str]:
    return block_units(layer, path, module), ""


def _mlps(layer: int, path: str, module: Any) -> tuple[list[Unit], str]:
    return mlp_units(layer, path, module), ""


def _is_below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def _choose(
    module: Any, candidates: list[Unit], call: _Call | None, verdicts: dict[Any, tuple[Unit | None, str]]
) -> tuple[Unit | None, str]:
    """The first candidate that is right, or None and why the first one is wrong."""
    if call is None:
        return None, "the model does not call it as a whole"
    key = _signature(module, candidates)
    if key not in verdicts:
        reasons = []
        chosen = None
        for unit in candidates:
            if not unit.division.can_serve(2):
                reasons.append("it has only one part")
            elif any(
                cut.side == "columns" and isinstance(module_at(module, cut.path), DoRALinear)
                for cut in unit.cuts
            ):
                reasons.append("its DoRA adapter needs all inputs of a linear at once")
            elif reason := _try(module, unit, call):
                reasons.append(reason)
            else:
                chosen = unit
                break
        verdicts[key] = chosen, "" if chosen else reasons[0]
    return verdicts[key]


def why_undivided(proposal: Proposal) -> str:
    """One clause for people: why so few or no units can be divided."""
    if proposal.units:
        most = max(unit.num_units for unit in proposal.units)
        return f"its layers can be divided into {most} parts at most"
    if proposal.refusals:
        return f"no part of its layers can be divided, for example {proposal.refusals[0]}"
    return "no part of its layers has a form that the tensor rules know"


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


def _record(lazy: LazyModel, modules: dict[tuple[int, str], Any]) -> dict[tuple[int, str], _Call]:
    """The first call of each module in one lazy forward."""
    caches = make_prompt_cache(lazy.model)
    recorder = _Recorder(cache_ids(caches))
    with_parameters = {key: module for key, module in modules.items() if module.children()}
    hook_model(lazy.model, list(with_parameters.values()), recorder)
    try:
        lazy.model(mx.zeros((1, 3), dtype=mx.uint32), cache=caches)
    except Exception:
        return {}  # whoever runs the model says what is wrong with it
    finally:
        unhook_model(lazy.model, list(with_parameters.values()))
    return {key: recorder.calls[i] for i, key in enumerate(with_parameters) if i in recorder.calls}


def _signature(module: Any, candidates: list[Unit]) -> Any:
    """Equal for modules on which the rules do the same."""
    return _form(module), dataclasses.replace(candidates[0], layer=0, path="")


def _form(module: Any) -> Any:
    scalars = tuple(
        (path, name, value)
        for path, part in modules_below(module)
        for name, value in sorted(vars(part).items())
        if isinstance(value, (bool, int, float, str)) and "layer" not in name and "idx" not in name
    )
    parts = tuple((path, type(part), _shapes(part)) for path, part in module.named_modules())
    return type(module), scalars, parts


def _shapes(module: Any) -> tuple[Any, ...]:
    return tuple((name, x.shape, x.dtype) for name, x in module.items() if isinstance(x, mx.array))


# ------------------------------------------------------------ whole against shares


class _Reached(Exception):
    """Carries a rank's part of a sum out of its forward."""

    def __init__(self, partial: Any) -> None:
        self.partial = partial


@dataclass(slots=True, eq=False)
class _KnownSums:
    """An exchange that knows the totals of the first sums; the next one ends the forward."""

    rank: int
    world_size: int
    totals: list[Any]
    num_sums: int = 0

    def all_sum(self, x: Any) -> Any:
        self.num_sums += 1
        if self.num_sums > len(self.totals):
            raise _Reached(x)
        return self.totals[self.num_sums - 1]

    def all_gather(self, x: Any) -> Any:
        raise NotImplementedError

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
        text = (str(failure).splitlines() or [""])[0][:120]
        return f"divided, it raises {type(failure).__name__}: {text}"
    return "" if error < _TOLERANCE else f"its shares do not add up to the whole (off by {error:.2g})"


def _compare(module: Any, unit: Unit, call: _Call) -> float:
    hidden = _hidden_of(module, unit)
    model = _narrow(module, unit, hidden)
    args, kwargs = _random_inputs(call, hidden)
    whole = _run(model, args, kwargs)
    return max(
        _gap(model, unit, weights, whole, args, kwargs)
        for weights in ([2, 1], [1, 1, 1])
        if unit.division.can_serve(len(weights))
    )


def _gap(
    model: Any,
    unit: Unit,
    weights: list[int],
    whole: list[Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> float:
    totals: list[Any] = []
    while len(totals) <= _MOST_SUMS:
        partials, answers = [], []
        for rank in range(len(weights)):
            exchange = _KnownSums(rank, len(weights), totals)
            try:
                answers.append(_run(_share(model, unit, weights, exchange), args, kwargs))
            except _Reached as reached:
                partials.append(reached.partial)
        if not partials:
            return max(_difference(answer, whole) for answer in answers)
        if len(partials) != len(weights) or len({x.shape for x in partials}) > 1:
            return float("inf")
        totals.append(sum(partials[1:], partials[0]))
        mx.eval(totals)
    return float("inf")


def _difference(answer: list[Any], whole: list[Any]) -> float:
    if len(answer) != len(whole):
        return float("inf")
    worst = 0.0
    for a, b in zip(answer, whole, strict=True):
        if a.shape != b.shape:
            return float("inf")
        scale = float(mx.abs(b).max().item()) or 1.0
        gap = float(mx.abs(a - b).max().item()) / scale
        worst = max(worst, gap if gap == gap else float("inf"))
    return worst


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arrays in the module's answers to two calls in a row; every run gets caches of its own."""
    args, kwargs = copy.deepcopy(args), copy.deepcopy(kwargs)
    out = model(*args, **kwargs)
    arrays = [leaf.astype(mx.float32) for _, leaf in tree.walk(out, set()) if isinstance(leaf, mx.array)]
    mx.eval(arrays)
    return arrays


def _hidden_of(module: Any, unit: Unit) -> int:
    """The width of what comes in and goes out."""
    for cut in unit.cuts:
        target = module_at(module, cut.path)
        if is_linear(target) and cut.side == "columns":
            return dims_of(target)[0]
    raise ValueError("it has no output linear")


def _random_inputs(call: _Call, hidden: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The recorded arguments with random numbers for every array of numbers; hidden states become narrow."""
    key = [mx.random.key(11)]
    narrow = _narrowed(hidden)

    def fresh(value: Any) -> Any:
        if isinstance(value, mx.array):
            if not mx.issubdtype(value.dtype, mx.floating) or value.ndim == 0:
                return value
            key[0], mine = mx.random.split(key[0])
            width = narrow if value.shape[-1] == hidden else value.shape[-1]
            return mx.random.normal((*value.shape[:-1], width), key=mine)
        if isinstance(value, (list, tuple)):
            return type(value)([fresh(item) for item in value])
        return value

    args = tuple(fresh(arg) for arg in call.args)
    kwargs = {name: fresh(arg) for name, arg in call.kwargs.items()}
    mx.eval([leaf for _, leaf in tree.walk_call(args, kwargs, set()) if isinstance(leaf, mx.array)])
    return args, kwargs


def _narrowed(hidden: int) -> int:
    return _NARROW if hidden > _WIDE else hidden


def _narrow(module: Any, unit: Unit, hidden: int) -> Any:
    """A copy with random weights, plain linears and a narrow hidden size."""
    narrow = _narrowed(hidden)
    sides = {cut.path: cut.side for cut in unit.cuts}
    kept = {*sides, *(norm.path for norm in unit.norms)}
    key = [mx.random.key(5)]

    def random(shape: Sequence[int], scale: float = 0.3) -> Any:
        key[0], mine = mx.random.split(key[0])
        return mx.random.normal(shape, key=mine) * scale

    def linear(old: Any, path: str) -> Any:
        outputs, inputs = dims_of(old)
        side = sides.get(path)
        if outputs == hidden and side != "rows":
            outputs = narrow
        if inputs == hidden and side != "columns":
            inputs = narrow
        base = base_of(old)
        lead = base.weight.shape[:-2]
        cls: Any = SwitchLinear if is_expert_linear(old) else nn.Linear
        new = cls(inputs, outputs, *lead, bias=False)
        new.weight = random((*lead, outputs, inputs))
        if "bias" in base:
            new.bias = random((*lead, outputs))
        return new

    def heads(old: Any) -> Any:
        outputs, inputs = dims_of(old)
        new = MultiLinear(inputs, outputs, old.weight.shape[0])
        new.weight = random((old.weight.shape[0], outputs, inputs))
        return new

    def array(old: Any, path: str) -> Any:
        if not mx.issubdtype(old.dtype, mx.floating) or path.rpartition(".")[2].startswith("_"):
            return old  # fixed tables
        divided = any(_is_below(path, cut) for cut in kept)
        return random([narrow if size == hidden and not divided else size for size in old.shape])

    def copied(old: Any, path: str) -> Any:
        if isinstance(old, nn.Module):
            if is_linear(old):
                return linear(old, path)
            if is_head_linear(old):
                return heads(old)
            new = copy.copy(old)
            for name, value in list(old.items()):
                new[name] = copied(value, f"{path}.{name}" if path else name)
            return new
        if isinstance(old, dict):
            return {name: copied(value, f"{path}.{name}") for name, value in old.items()}
        if isinstance(old, (list, tuple)):
            return type(old)([copied(value, f"{path}.{i}") for i, value in enumerate(old)])
        return array(old, path) if isinstance(old, mx.array) else old

    return copied(module, "")


def _share(model: Any, unit: Unit, weights: list[int], exchange: _KnownSums) -> Any:
    """One rank's share of a narrow copy."""
    mine = _shallow(model)

    def part(path: str, array: Any, axis: int, ranges: Sequence[Range]) -> Any:
        return take_ranges(array, axis, ranges)

    divide_layer(mine, "", [dataclasses.replace(unit, path="")], weights, exchange, part)
    return mine


def _shallow(value: Any) -> Any:
    """Modules and containers are copied, arrays are shared."""
    if isinstance(value, nn.Module):
        new = copy.copy(value)
        for name, item in list(value.items()):
            new[name] = _shallow(item)
        return new
    if isinstance(value, dict):
        return {name: _shallow(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_shallow(item) for item in value])
    return value


def take_ranges(array: Any, axis: int, ranges: Sequence[Range]) -> Any:
    """The given ranges along an axis, joined."""
    parts = []
    for start, stop in ranges:
        index = [slice(None)] * array.ndim
        index[axis] = slice(start, stop)
        parts.append(array[tuple(index)])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)
