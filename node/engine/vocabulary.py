"""Embeddings and output heads divided by vocabulary: each rank has the rows of some of the tokens.

A lookup answers with zeros for the other ranks' tokens, and the answers add up. An output head gives the
logits of its rows, and the ranks put them together: the leader samples from all of them. Only what weighs
enough is divided; a certificate proves it together with everything else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.tuner.dora import DoRAEmbedding

from mlx_mesh.mesh.footprint import WORTH_DIVIDING
from mlx_mesh.mesh.tensor_units import Division, Range, Segment
from mlx_mesh.node.engine.dependencies import TAIL
from mlx_mesh.node.engine.exchange import Exchange
from mlx_mesh.node.engine.loader import LazyModel
from mlx_mesh.node.engine.row_media import reads_alone
from mlx_mesh.node.engine.rules import (
    Cut,
    Unit,
    dims_of,
    edges_of,
    is_expert_linear,
    is_linear,
    modules_below,
)
from mlx_mesh.node.engine.sums import mix
from mlx_mesh.node.engine.trace import ModelTrace

_ROW_STEP = 64  # rows per part of a real vocabulary
_NUM_PARTS = 256
_LOOKUPS = (nn.Embedding.__call__, nn.QuantizedEmbedding.__call__)


def vocabulary_units(
    lazy: LazyModel, trace: ModelTrace | None, among: Collection[str] | None = None
) -> list[Unit]:
    """The embeddings and output heads that are worth dividing: one part in `WORTH_DIVIDING` of the model's
    bytes or more, or those whose paths are `among` the given ones."""
    if trace is None:
        return []
    total = sum(array.nbytes for _, array in tree_flatten(lazy.model.parameters()))
    units = []
    for path, module in _outside_layers(lazy):
        rows = _rows_of(path, module, trace)
        size = sum(array.nbytes for _, array in tree_flatten(module.parameters())) if rows > 1 else 0
        if reads_alone(lazy.model) and _is_looked_up(path, trace):
            continue  # the leader looks tokens up by itself, among pictures
        if not (size * WORTH_DIVIDING >= total if among is None else path in among) or rows < 2:
            continue
        side: Any = "rows" if is_linear(module) else "axis"
        division = Division(edges_of(rows, _step(rows)))
        cut = Cut("", side, (Segment(rows, 1),))
        units.append(Unit(-1, path, "vocabulary", division, (cut,), gathers=("",)))
    return units


def gives_logits(unit: Unit, trace: ModelTrace) -> bool:
    """Whether a vocabulary unit makes logits, so that every rank runs the model's end."""
    return _is_used(unit.path, trace, TAIL)


def is_looked_up(unit: Unit, trace: ModelTrace) -> bool:
    """Whether tokens are looked up in a vocabulary unit."""
    return _is_looked_up(unit.path, trace)


def _is_looked_up(path: str, trace: ModelTrace) -> bool:
    return any(_is_used(path, trace, call) for call in range(len(trace.calls)))


def _is_used(path: str, trace: ModelTrace, call: int) -> bool:
    return any(used.startswith(f"{path}.") for used in trace.parameters[call])


def _outside_layers(lazy: LazyModel) -> Iterator[tuple[str, Any]]:
    seen = {id(module) for layer in lazy.layers for _, module in modules_below(layer)}
    # A DoRA reads the rows of its embedding past the embedding's own call.
    seen |= {
        id(module.embedding) for _, module in modules_below(lazy.model) if isinstance(module, DoRAEmbedding)
    }
    for path, module in modules_below(lazy.model):
        if path and id(module) not in seen:
            seen.add(id(module))
            yield path, module


def _rows_of(path: str, module: Any, trace: ModelTrace) -> int:
    """How many rows there are to divide; 0 for what is neither a lookup nor an output head."""
    is_lookup = (
        isinstance(module, (nn.Embedding, nn.QuantizedEmbedding)) and type(module).__call__ in _LOOKUPS
    )
    if is_lookup:
        is_used = any(_is_used(path, trace, call) for call in trace.parameters)
        return int(module.weight.shape[0]) if is_used else 0
    if is_linear(module) and not is_expert_linear(module) and _is_used(path, trace, TAIL):
        outputs = dims_of(module)[0]
        return outputs if trace.logits_shape and outputs == trace.logits_shape[-1] else 0
    return 0


def _step(rows: int) -> int:
    if rows < _ROW_STEP * _NUM_PARTS:
        return max(1, rows // _NUM_PARTS)
    return rows // (_ROW_STEP * _NUM_PARTS) * _ROW_STEP


# ------------------------------------------------------------ in the forward


@dataclass(slots=True, eq=False)
class _Rows:
    """[start, stop) of the vocabulary on each rank."""

    shares: tuple[Range, ...]

    @property
    def most(self) -> int:
        return max(stop - start for start, stop in self.shares)


def _put_together(module: Any, part: Any) -> Any:
    """(..., rows here) -> (..., all rows). A gather takes parts of one length."""
    rows: _Rows = module._mesh_rows
    missing = rows.most - part.shape[-1]
    if missing:
        part = mx.pad(part, [(0, 0)] * (part.ndim - 1) + [(0, missing)])
    parts = module._mesh_exchange.all_gather(part)
    lengths = [stop - start for start, stop in rows.shares]
    return mx.concatenate([parts[rank][..., :length] for rank, length in enumerate(lengths)], axis=-1)


class _Lookup:
    """An embedding with the rows of some tokens; as an output head it gives the logits of all."""

    def __call__(self, tokens: Any) -> Any:
        module: Any = self
        start, stop = module._mesh_rows.shares[module._mesh_exchange.rank]
        row = tokens.astype(mx.int32) - start
        is_here = (row >= 0) & (row < stop - start)
        found = super().__call__(mx.where(is_here, row, 0))  # type: ignore[misc]
        return module._mesh_exchange.all_sum(mx.where(is_here[..., None], found, mx.zeros((), found.dtype)))

    def as_linear(self, x: Any) -> Any:
        return _put_together(self, super().as_linear(x))  # type: ignore[misc]


class _Head:
    """A linear with the rows of some tokens, which gives the logits of all."""

    def __call__(self, x: Any) -> Any:
        return _put_together(self, super().__call__(x))  # type: ignore[misc]


def spread_vocabulary(module: Any, shares: Sequence[Range], exchange: Exchange) -> None:
    """The module has this rank's rows, and answers as if it had all of them from now on."""
    module._mesh_rows = _Rows(tuple(shares))
    mix(module, _Head if is_linear(module) else _Lookup, exchange)
