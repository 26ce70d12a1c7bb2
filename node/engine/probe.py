"""Try every proposed unit with numbers before it is divided, and leave out those for which the rule is wrong.

A unit's module is copied with random weights and a narrow hidden size, so that the model's own weights are
never read, and called as the model calls it: once whole, and once as shares of uneven ranks. The rule is
right when the shares add up to the whole. Equal modules are tried once.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
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
from mlx_mesh.node.engine.caches import cache_contents, cache_ids, cache_parts
from mlx_mesh.node.engine.exchange import Exchange
from mlx_mesh.node.engine.hooks import Original, hook_model, unhook_model
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.rehearsal import Rehearsal
from mlx_mesh.node.engine.rules import (
    Proposal,
    State,
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
_PLANS = ((2, 1), (2, 1, 1))
_POOL = 1_048_573  # random numbers that large arrays repeat; a prime, so that no two rows or heads are alike


_Verdict = tuple[Unit | None, str]


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
    forms = {key: _form(module) for key, module in modules.items()}
    # An expert that no token chose is called like the others.
    calls = {forms[key]: call for key, call in recorded.items()}
    verdicts: dict[Any, _Verdict] = {}
    kept = Proposal()
    for index, layer in enumerate(layers):
        if any(layer is earlier for earlier in layers[:index]):
            continue  # one object in several places
        own: list[Unit] = []
        for path, module in modules_below(layer):
            if not path or is_linear(module) or any(_is_below(path, unit.path) for unit in own):
                continue
            form = forms[index, path]
            for propose in (mixer_units, _blocks, _mlps):
                key = propose, form
                if key not in verdicts:
                    verdicts[key] = _verdict(propose, module, calls.get(form), sharing)
                unit, reason = verdicts[key]
                if unit is not None:
                    own.append(dataclasses.replace(unit, layer=index, path=path))
                    break
                if reason and propose is not _blocks:  # the MLPs inside a block are tried by themselves
                    kept.refusals.append(f"layers.{index}.{path}: {reason}")
        own += gathered(index, layer, own)
        kept.units += own
    kept.vocabulary = vocabulary_units(lazy, trace)  # right by construction; only a whole model can tell more
    return kept


def _blocks(layer: int, path: str, module: Any) -> tuple[list[Unit], str]:
    return block_units(layer, path, module), ""


def _mlps(layer: int, path: str, module: Any) -> tuple[list[Unit], str]:
    return mlp_units(layer, path, module), ""


def _is_below(path: str, above: str) -> bool:
    return path == above or path.startswith(f"{above}.")


def _verdict(
    propose: Callable[[int, str, Any], tuple[list[Unit], str]], module: Any, call: _Call | None, sharing: str
) -> _Verdict:
    """The first candidate that is right, or None and why the first one is wrong; (None, '') for a module that
    the rule is not for."""
    candidates, reason = propose(0, "", module)
    if not candidates:
        return None, reason
    if candidates[0].kind == "attention" and sharing:
        return None, sharing
    if call is None:
        return None, "the model does not call it as a whole"
    reasons = []
    for unit in candidates:
        if not unit.division.can_serve(2):
            reasons.append("it has only one part")
        elif any(
            cut.side == "columns" and isinstance(module_at(module, cut.path), DoRALinear) for cut in unit.cuts
        ):
            reasons.append("its DoRA adapter needs all inputs of a linear at once")
        else:
            state, reason = _try(module, unit, call)
            if not reason:
                return dataclasses.replace(unit, state=state), ""
            reasons.append(reason)
    return None, reasons[0]


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


def _form(module: Any) -> Any:
    """Equal for modules on which the rules do the same."""
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


def _try(module: Any, unit: Unit, call: _Call) -> tuple[State, str]:
    """What the unit keeps, and '' when its shares add up to the whole, else what went wrong."""
    try:
        error, state = _compare(module, unit, call)
    except Exception as failure:
        text = (str(failure).splitlines() or [""])[0][:120]
        return State(), f"divided, it raises {type(failure).__name__}: {text}"
    wrong = f"its shares do not add up to the whole (off by {error:.2g})"
    return state, "" if error < _TOLERANCE else wrong


def _compare(module: Any, unit: Unit, call: _Call) -> tuple[float, State]:
    hidden = _hidden_of(module, unit)
    model = _narrow(module, unit, hidden)
    args, kwargs = _random_inputs(call, hidden)
    whole, kept = _run(model, args, kwargs)
    gaps, state = [], State()
    for weights in _PLANS if unit.division.can_serve(3) else _PLANS[:1]:
        if len(weights) == 2 and len(unit.division.edges) > 3:
            continue  # three ranks cut it at the same kind of edge

        def body(rank: int, exchange: Any, weights: Sequence[int] = weights) -> tuple[list[Any], _Kept]:
            return _run(_share(model, unit, weights, exchange), args, kwargs)

        results = Rehearsal(len(weights)).run(body)
        gaps += [_difference(answer, whole) for answer, _ in results]
        if len(unit.division.edges) > len(weights) or state == State():
            state = _state(kept, [by_rank for _, by_rank in results])
    return max(gaps), state


_Kept = tuple[int, int]  # bytes of keys and values, bytes of fixed states


def _state(kept: _Kept, by_rank: Sequence[_Kept]) -> State:
    """What all ranks keep more than the whole is what each of them keeps of it."""
    more = [sum(held[i] for held in by_rank) - kept[i] for i in range(2)]
    whole = [max(0, min(kept[i], more[i] // (len(by_rank) - 1))) for i in range(2)]
    return State(kept[0], whole[0], kept[1], whole[1])


def _kept(value: Any) -> _Kept:
    """The bytes in the caches among a call's arguments."""
    if isinstance(value, (list, tuple)):
        parts = [_kept(item) for item in value]
        return sum(kv for kv, _ in parts), sum(fixed for _, fixed in parts)
    held = [0, 0]
    for _, cache in cache_parts(value):
        is_kv = hasattr(cache, "update_and_fetch")
        if is_kv or isinstance(getattr(cache, "cache", None), list):
            held[not is_kv] += sum(int(array.nbytes) for array in cache_contents(cache))
    return held[0], held[1]


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


def _run(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], _Kept]:
    """The arrays in the module's answer, and what it keeps; every run gets caches of its own."""
    args, kwargs = copy.deepcopy(args), copy.deepcopy(kwargs)
    out = model(*args, **kwargs)
    arrays = [leaf.astype(mx.float32) for _, leaf in tree.walk(out, set()) if isinstance(leaf, mx.array)]
    mx.eval(arrays)
    return arrays, _kept((*args, *kwargs.values()))


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
    pool, used = mx.random.normal((_POOL,), key=mx.random.key(5)) * 0.3, [0]

    def random(shape: Sequence[int]) -> Any:
        size, start = math.prod(shape), used[0] % _POOL
        used[0] += size
        repeated = mx.tile(pool, -(-(start + size) // _POOL))
        return repeated[start : start + size].reshape(shape)

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


def _share(model: Any, unit: Unit, weights: Sequence[int], exchange: Exchange) -> Any:
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
