"""Units of attention and recurrent mixers: heads, KV heads and channels explain every parameter's axes.

A mixer has a number of heads, its output linear takes so many inputs per head, and every other parameter's
size is some number per head or per KV head. Names decide where sizes do not: what is a key or a value, what
is fused, what is latent. Fused outputs may be laid out in several ways, and some attributes may or may not
be widths that follow the heads: each combination is a candidate, and the probe finds the one that is right.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mesh.mesh.tensor_units import Division, Layout, Segment, size_of
from mlx_mesh.node.engine.rules import (
    Count,
    Cut,
    Unit,
    WideNorm,
    dims_of,
    edges_of,
    input_grain,
    is_head_linear,
    is_linear,
    modules_below,
    own_arrays,
)

_HEADS = re.compile(r"^(num_v_heads|n_heads?|num_heads|num_attention_heads|(num_)?q_(num_)?heads|n_q_heads)$")
_KV_HEADS = re.compile(
    r"^(num_k_heads|n_kv_heads|num_kv_heads|num_key_value_heads|n_head_kv|[kv]_num_heads|n_groups)$"
)
_REPEATS = re.compile(r"^(n_)?(num_)?(repeats|kv_groups|key_value_groups|group|q_per_kv|heads_per_group)$")
_OUT = re.compile(r"^(o_proj|out_proj|wo|dense|c_proj|o|linear_out|attn_resid|o_b_proj|out)$")
_KV_LINEAR = re.compile(r"(^|_)(k|v|key|value|wk|wv)(_proj|_conv1d|_conv)?$")
_FUSED = re.compile(
    r"qkv|query_key_value|W_pack|c_attn|q_k_v|^in_proj(_qkvz|_ba|_qkv)?$|^conv1?_?1?d?$|conv$"
)
_LATENT = re.compile(r"._a_proj|^wk$|^kv_proj$|router")
_INNER_LINEAR = re.compile(r"^(x_proj|bcdt_proj)$")  # takes the channels, gives something small
_SEPARATE = re.compile(r"indexer|compressor|rope|rotary")
_WIDTH = re.compile(
    r"^(key|value|conv|[qkv]|kv|qkv|projection|intermediate|lru|groups_time_state|inner)_?(proj_)?(dim|size|width)$"
    r"|^(kv|v|q|k)_(size|dim|proj_dim)$|^groups$|^width$"
)
_HIDDEN_WIDTH = re.compile(r"^(hidden_size|hidden_dim|dim|n_embd|embed_dim|model_dim|d_model|width)$")

_CHANNEL_STEP = 32


@dataclass(frozen=True, slots=True)
class _Shape:
    """The numbers by which a mixer's parameters are explained."""

    heads: int
    kv_heads: int
    inner: int  # inputs of the output linear
    hidden: int

    @property
    def ratio(self) -> int:
        return self.heads // self.kv_heads

    def by_head(self, size: int) -> Layout:
        return (Segment(size, size // self.heads),)

    def by_kv_head(self, size: int) -> Layout:
        return (Segment(size, size // self.kv_heads, self.ratio),)


@dataclass(slots=True)
class _Draft:
    """A unit in the making."""

    cuts: list[Cut] = field(default_factory=list)
    counts: list[Count] = field(default_factory=list)
    sums: list[str] = field(default_factory=list)
    norms: list[WideNorm] = field(default_factory=list)


def mixer_units(layer: int, path: str, module: Any) -> tuple[list[Unit], str]:
    """Candidates in order of preference, and when there are none why; ([], '') when it is no mixer."""
    linears = {name: child for name, child in module.items() if is_linear(child)}
    out = [name for name in linears if _OUT.match(name)]
    if len(linears) < 2 or not out:
        return [], ""
    if len(out) > 1:
        return [], f"it has several output linears: {', '.join(out)}"
    inner = dims_of(linears[out[0]])[1]
    hidden = dims_of(linears[out[0]])[0]
    heads = _attribute(module, _HEADS, inner)
    if heads is None:
        heads = _channels(module, inner)
        if heads is None:
            return [], ""
    kv_heads = _kv_heads(module, heads, linears)
    if inner % heads or heads % kv_heads:
        return [], f"{heads} heads, {kv_heads} KV heads and {inner} inner columns do not divide"
    shape = _Shape(heads, kv_heads, inner, hidden)
    division = _division(shape, input_grain(linears[out[0]]))
    units = []
    for family, rewrites_hidden, widens in itertools.product(_FAMILIES, (False, True), (True, False)):
        draft = _draft(module, shape, out[0], family, rewrites_hidden, widens)
        unit = Unit(
            layer,
            path,
            "attention",
            division,
            tuple(draft.cuts),
            tuple(draft.counts),
            tuple(draft.sums),
            tuple(draft.norms),
            num_heads=shape.heads,
            kv_heads=shape.by_kv_head(shape.kv_heads),
        )
        if unit not in units:
            units.append(unit)
    return units, ""


def _attribute(module: Any, names: re.Pattern[str], inner: int) -> int | None:
    found = {
        name: value
        for name, value in vars(module).items()
        if names.match(name) and isinstance(value, int) and not isinstance(value, bool) and value > 0
    }
    if not found:
        return None
    # Of value and key heads the first decides: `num_v_heads` stands first in the pattern.
    return found.get("num_v_heads", next(iter(found.values())))


def _channels(module: Any, inner: int) -> int | None:
    """The channels of a mixer without heads, each of which stands alone."""
    for _, child in modules_below(module):
        weight = child.get("weight") if isinstance(child, nn.Module) else None
        if isinstance(weight, mx.array) and weight.ndim == 3 and weight.shape[-1] == 1:
            return inner if weight.shape[0] == inner else None
    return None


def _kv_heads(module: Any, heads: int, linears: dict[str, Any]) -> int:
    found = _attribute(module, _KV_HEADS, heads)
    if found is not None:
        return found
    keys = [dims_of(linear)[0] for name, linear in linears.items() if _KV_LINEAR.search(name)]
    queries = [
        dims_of(linear)[0] for name, linear in linears.items() if re.match(r"(w?q|query)(_proj)?$", name)
    ]
    if (
        keys
        and queries
        and keys[0] < queries[0]
        and queries[0] % keys[0] == 0
        and heads % (queries[0] // keys[0]) == 0
    ):
        return heads // (queries[0] // keys[0])
    return heads


def _division(shape: _Shape, grain: int) -> Division:
    per_head = shape.inner // shape.heads
    per_group = per_head * shape.ratio
    if shape.heads == shape.inner:  # channels
        step = math.lcm(grain, math.gcd(shape.inner, _CHANNEL_STEP))
        while shape.inner // step < 8 and step % 2 == 0 and (step // 2) % grain == 0:
            step //= 2
        return Division(edges_of(shape.inner, step))
    coarse = grain // math.gcd(grain, per_group) * shape.ratio
    fine = grain // math.gcd(grain, per_head)
    fine_edges = edges_of(shape.heads, fine) if shape.ratio > 1 else ()
    return Division(edges_of(shape.heads, coarse), fine_edges)


# ------------------------------------------------------------ fused outputs


def _attention(shape: _Shape, size: int, is_conv: bool) -> Layout | None:
    """[queries | keys | values]"""
    if size % (shape.heads + 2 * shape.kv_heads):
        return None
    dim = size // (shape.heads + 2 * shape.kv_heads)
    kv = shape.by_kv_head(shape.kv_heads * dim)
    return shape.by_head(shape.heads * dim) + kv + kv


def _grouped(shape: _Shape, size: int, is_conv: bool) -> Layout | None:
    """Everything of a KV head together; taken apart before a convolution."""
    if is_conv and (apart := _delta(shape, size, is_conv)) is not None:
        return apart
    return shape.by_kv_head(size) if size % shape.kv_heads == 0 else None


def _headwise(shape: _Shape, size: int, is_conv: bool) -> Layout | None:
    """Everything of a head together."""
    return shape.by_head(size) if size % shape.heads == 0 else None


def _delta(shape: _Shape, size: int, is_conv: bool) -> Layout | None:
    """[queries | keys | values], of which queries and keys are the fewer ones"""
    rest = size - shape.inner
    if rest <= 0 or rest % (2 * shape.kv_heads):
        return None
    keys = shape.by_kv_head(rest // 2)
    return keys + keys + shape.by_head(shape.inner)


def _state_space(shape: _Shape, size: int, is_conv: bool) -> Layout | None:
    """[gate | x | B | C | dt] of the input linear, [x | B | C] of the convolution after it"""
    x = shape.by_head(shape.inner)
    head = x if is_conv else x + x
    tail = () if is_conv else shape.by_head(shape.heads)
    rest = size - size_of(head) - size_of(tail)
    if rest <= 0 or rest % (2 * shape.kv_heads):
        return None
    state = shape.by_kv_head(rest // 2)
    return head + state + state + tail


def _halves(shape: _Shape, size: int, is_conv: bool) -> Layout | None:
    return shape.by_head(size // 2) * 2 if size % (2 * shape.heads) == 0 else None


def _thirds(shape: _Shape, size: int, is_conv: bool) -> Layout | None:
    return shape.by_head(size // 3) * 3 if size % (3 * shape.heads) == 0 else None


_FAMILIES = (_attention, _grouped, _headwise, _delta, _state_space, _halves, _thirds)


# ------------------------------------------------------------ one candidate


def _draft(module: Any, shape: _Shape, out: str, family: Any, rewrites_hidden: bool, widens: bool) -> _Draft:
    draft = _Draft()
    layouts: list[Layout] = []  # of rows and channels so far, for attributes and norms that follow them
    queries: Layout = shape.by_head(shape.inner)
    for path, child in modules_below(module):
        name = path.rpartition(".")[2]
        if path and _SEPARATE.search(path):
            continue
        if path == out:
            draft.cuts.append(Cut(path, "columns", shape.by_head(shape.inner)))
            draft.sums.append(path)
        elif is_head_linear(child):
            if child.weight.shape[0] == shape.heads:
                draft.cuts.append(Cut(path, "axis", shape.by_head(shape.heads)))
        elif is_linear(child):
            outputs, inputs = dims_of(child)
            if _INNER_LINEAR.match(name) and inputs == shape.inner:
                draft.cuts.append(Cut(path, "columns", shape.by_head(shape.inner)))
                draft.sums.append(path)
                continue
            layout = _rows(shape, path, outputs, family)
            if layout:
                draft.cuts.append(Cut(path, "rows", layout))
                layouts.append(layout)
        else:
            _cut_arrays(draft, shape, path, child, family, widens, layouts, queries)
    for path, child in modules_below(module):
        if not (path and _SEPARATE.search(path)) and not is_linear(child):
            _count_attributes(draft, shape, path, child, layouts, rewrites_hidden)
    return draft


def _rows(shape: _Shape, path: str, outputs: int, family: Any, is_conv: bool = False) -> Layout | None:
    """How the outputs of a linear, or the channels of a convolution, fall to heads; None: all whole."""
    names = path.split(".")
    if any(_LATENT.search(name) for name in names):
        return None
    if any(_FUSED.search(name) for name in names):
        fused: Layout | None = family(shape, outputs, is_conv)
        if fused is not None:
            return fused
    elif shape.kv_heads != shape.heads and any(_KV_LINEAR.search(name) for name in names):
        return shape.by_kv_head(outputs) if outputs % shape.kv_heads == 0 else None
    if outputs % shape.heads == 0:
        return shape.by_head(outputs)
    if outputs % shape.kv_heads == 0 and shape.kv_heads > 1:
        return shape.by_kv_head(outputs)
    return None


def _cut_arrays(
    draft: _Draft,
    shape: _Shape,
    path: str,
    module: Any,
    family: Any,
    widens: bool,
    layouts: list[Layout],
    queries: Layout,
) -> None:
    arrays = dict(own_arrays(module))
    weight = arrays.get("weight")
    if weight is not None and weight.ndim == 3 and weight.shape[-1] == 1 and path:  # depthwise convolution
        layout = _rows(shape, path, weight.shape[0], family, is_conv=True)
        if layout:
            draft.cuts.append(Cut(path, "axis", layout))
            layouts.append(layout)
        return
    per_head = shape.inner // shape.heads
    if weight is not None and weight.ndim == 1 and path:  # a norm
        size = weight.shape[0]
        if size <= per_head or size % shape.kv_heads:
            return
        is_kv = bool(re.search(r"(^|\.|_)(k|key)_", path)) and size % shape.kv_heads == 0
        if is_kv and shape.ratio > 1:
            layout = shape.by_kv_head(size)
        elif size % shape.heads == 0 and (size == shape.inner or size in {size_of(x) for x in layouts}):
            layout = shape.by_head(size)
        else:
            return
        if widens or size != shape.hidden:
            sums_squares = type(module).__call__ is nn.RMSNorm.__call__
            draft.norms.append(WideNorm(path, layout, sums_squares))
            if sums_squares:
                draft.cuts.append(Cut(path, "axis", layout))
        return
    for name, array in arrays.items():
        axis, layout_or_none = _head_axis(shape, name, array)
        if layout_or_none:
            draft.cuts.append(Cut(f"{path}.{name}" if path else name, "axis", layout_or_none, axis))


def _head_axis(shape: _Shape, name: str, array: Any) -> tuple[int, Layout | None]:
    if "norm" in name:
        return 0, None  # of something latent, or of one head
    is_kv = bool(re.search(r"(^|_)[kv]($|_)", name)) and shape.kv_heads != shape.heads
    for axis, size in enumerate(array.shape):
        if is_kv and size == shape.kv_heads:
            return axis, shape.by_kv_head(size)
        if size == shape.heads:
            return axis, shape.by_head(size)
        if size == shape.inner and shape.inner != shape.hidden:
            return axis, shape.by_head(size)
        if size == shape.inner and array.ndim <= 2 and not name.startswith("x_"):
            return axis, shape.by_head(size)
    return 0, None


def _count_attributes(
    draft: _Draft,
    shape: _Shape,
    path: str,
    module: Any,
    layouts: list[Layout],
    rewrites_hidden: bool,
) -> None:
    heads, kv_heads = shape.by_head(shape.heads), shape.by_kv_head(shape.kv_heads)
    widths = {size_of(layout): layout for layout in layouts}
    widths |= {segment.size: (segment,) for layout in layouts for segment in layout if segment.per_group}
    widths[shape.inner] = shape.by_head(shape.inner)
    if rewrites_hidden:
        # Some make their first state as wide as their config says.
        for holder in ("args", "config"):
            values = getattr(module, holder, None)
            for name, value in vars(values).items() if hasattr(values, "__dict__") else ():
                if _HIDDEN_WIDTH.match(name) and value == shape.inner:
                    draft.counts.append(Count(path, f"{holder}.{name}", widths[value]))
    for name, value in vars(module).items():
        if not isinstance(value, int) or isinstance(value, bool):
            continue
        if name == "groups" and path and "weight" in module:
            if value in widths and module["weight"].shape[0] == value:
                draft.counts.append(Count(path, name, widths[value]))
        elif name.startswith("num_k_heads") or (_KV_HEADS.match(name) and value == shape.kv_heads):
            draft.counts.append(Count(path, name, kv_heads))
        elif _HEADS.match(name) and value == shape.heads:
            draft.counts.append(Count(path, name, heads))
        elif _REPEATS.match(name) and value == shape.ratio:
            draft.counts.append(Count(path, name, heads, over=kv_heads))
        elif _HIDDEN_WIDTH.match(name):
            if value == shape.inner and rewrites_hidden:
                draft.counts.append(Count(path, name, widths[value]))
        elif _WIDTH.match(name) and value in widths:
            draft.counts.append(Count(path, name, widths[value]))
