"""How what ranks compute in parts comes together: classes mixed into modules of the model in place.

Each keeps the module's own call inside, so it works for plain, quantised and adapted linears and for any
norm. Everything goes through `Exchange.all_sum`, which every backend has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_mesh.mesh.tensor_units import Range
from mlx_mesh.node.engine.exchange import Exchange
from mlx_mesh.node.engine.rules import base_of, is_linear


class _Summing:
    """The output is a partial sum."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        partial = super().__call__(*args, **kwargs)  # type: ignore[misc]
        module: Any = self
        y = module._mesh_exchange.all_sum(partial)
        return y + module["summed_bias"] if "summed_bias" in module else y


@dataclass(slots=True, eq=False)
class _Span:
    start: int
    total: int


class _Gathering:
    """The output is a run of the whole one's last axis."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        part = super().__call__(*args, **kwargs)  # type: ignore[misc]
        span: _Span = module._mesh_span
        after = span.total - span.start - part.shape[-1]
        padding = [(0, 0)] * (part.ndim - 1) + [(span.start, after)]
        return module._mesh_exchange.all_sum(mx.pad(part, padding))


@dataclass(slots=True, eq=False)
class _Held:
    """Which elements of the whole axis a rank's are, and which of them it speaks for: of an element that
    several ranks hold, the first one. Both are arrays as long as the rank's part."""

    indices: Any
    speaks: Any  # None: for all
    total: int


class _SquareSumming:
    """An RMS norm over elements of all ranks."""

    def __call__(self, x: Any) -> Any:
        module: Any = self
        held: _Held = module._mesh_held
        wide = x.astype(mx.float32)
        squares = wide * wide
        if held.speaks is not None:
            squares = squares * held.speaks
        total = module._mesh_exchange.all_sum(squares.sum(axis=-1, keepdims=True))
        normed = wide * mx.rsqrt(total / held.total + module.eps)
        return normed.astype(x.dtype) * module["weight"]


class _Widening:
    """Any norm over elements of all ranks: gets its whole input, gives the rank's part of its output."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self
        held: _Held = module._mesh_held

        def widen(x: Any) -> Any:
            if not isinstance(x, mx.array) or x.shape[-1] != held.indices.size:
                return x
            own = x if held.speaks is None else x * held.speaks.astype(x.dtype)
            whole = mx.zeros((*x.shape[:-1], held.total), x.dtype)
            return module._mesh_exchange.all_sum(whole.at[..., held.indices].add(own))

        whole_args = [widen(x) for x in args]
        whole = super().__call__(*whole_args, **{k: widen(x) for k, x in kwargs.items()})  # type: ignore[misc]
        return whole[..., held.indices]


_mixed_classes: dict[tuple[type, type], type] = {}


def mix(module: Any, mixin: type, exchange: Exchange) -> None:
    """Put `mixin` before the module's own class."""
    cls = type(module)
    if (cls, mixin) not in _mixed_classes:
        _mixed_classes[cls, mixin] = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    module.__class__ = _mixed_classes[cls, mixin]
    module._mesh_exchange = exchange


def sum_outputs(module: Any, exchange: Exchange) -> None:
    """The module's output is a partial sum from now on; a linear's bias is added after it is complete."""
    if is_linear(module):
        base = base_of(module)
        if "bias" in base and base["bias"].ndim == 1:
            module["summed_bias"] = base.pop("bias")
        elif "bias" in base and exchange.rank > 0:
            base.pop("bias")  # one row per expert, chosen inside the call: rank 0 adds it
    mix(module, _Summing, exchange)


def gather_outputs(linear: Any, total: int, start: int, exchange: Exchange) -> None:
    """The linear has the outputs from `start` on of `total`, and gives all of them from now on."""
    linear._mesh_span = _Span(start, total)
    mix(linear, _Gathering, exchange)


def widen_norm(norm: Any, held: Sequence[Sequence[Range]], sums_squares: bool, exchange: Exchange) -> None:
    """The norm sees only `held[rank]` of its axis on each rank, and takes account of the rest from now on."""
    indices = [[i for a, b in ranges for i in range(a, b)] for ranges in held]
    total = max(max(part) for part in indices) + 1
    spoken: set[int] = set()
    for rank in range(exchange.rank):
        spoken.update(indices[rank])
    speaks = []
    for i in indices[exchange.rank]:
        speaks.append(i not in spoken)
        spoken.add(i)
    norm._mesh_held = _Held(
        mx.array(indices[exchange.rank]),
        None if all(speaks) else mx.array(speaks).astype(mx.float32),
        total,
    )
    mix(norm, _SquareSumming if sums_squares else _Widening, exchange)
