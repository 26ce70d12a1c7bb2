"""Quantised caches that can be batched: mlx-lm's QuantizedKVCache in rows, with the protocol of BatchKVCache.

A token attends to the quantised keys and values of all tokens up to itself, also within one prefill chunk.
So what a cache holds depends neither on how a prompt was cut into chunks nor on what runs beside it, nor on
whether a token was read or generated, but for the noise of floats, which rounding can make large.
(mlx-lm's own `--kv-bits` attends to the first chunk before it is quantised.)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask
from mlx_lm.models.cache import QuantizedKVCache, _BaseCache, dynamic_roll, make_prompt_cache

from mlx_mesh.mesh.kv_options import KV_BITS, KV_GROUP_SIZES, KvOptions
from mlx_mesh.node.engine.exchange import Array
from mlx_mesh.node.engine.trace import ModelTrace

Packed = tuple[Array, Array, Array]
"""Whole numbers of a few bits in uint32, scales and biases: (rows, heads, tokens, *) each."""

STEP = 256
"""Caches grow by so many tokens, like mlx-lm's."""


class QuantisedRow(QuantizedKVCache):  # type: ignore[misc]
    """The cache of one sequence. State, trim and masks are mlx-lm's; here come growth for all bits (its own
    is wrong where 32 bits are no multiple of them and heads are wide), and the way into a batch."""

    step = STEP

    def __init__(self, group_size: int, bits: int) -> None:
        super().__init__(group_size, bits)
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.offset = 0

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Packed, Packed]:
        """keys and values (1, heads, tokens, *) as computed; all so far, quantised."""
        start, self.offset = self.offset, self.offset + keys.shape[2]
        self.keys = _written(self.keys, start, keys, self.group_size, self.bits)
        self.values = _written(self.values, start, values, self.group_size, self.bits)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Packed, Packed]:
        assert self.keys is not None and self.values is not None
        return _part(self.keys, self.offset), _part(self.values, self.offset)

    def size(self) -> int:
        return self.offset

    @property
    def nbytes(self) -> int:
        return _nbytes(self.keys) + _nbytes(self.values)

    @classmethod
    def merge(cls, rows: Sequence[QuantisedRow]) -> BatchQuantisedKVCache:
        return BatchQuantisedKVCache.merge(rows)


class BatchQuantisedKVCache(_BaseCache):  # type: ignore[misc]
    """Rows of different lengths, padded on the left to the longest one. `_idx`: columns in use; `offset` and
    `left_padding`: (rows,)."""

    step = STEP

    def __init__(self, left_padding: Sequence[int], group_size: int, bits: int) -> None:
        self.keys: Packed | None = None
        self.values: Packed | None = None
        self.left_padding = mx.array(list(left_padding))
        self.offset = mx.array([-padding for padding in left_padding])
        self.group_size = group_size
        self.bits = bits
        self._idx = 0
        self._right_padding: Array | None = None

    def update_and_fetch(self, keys: Array, values: Array) -> tuple[Packed, Packed]:
        """keys and values (rows, heads, tokens, *) as computed; all so far, quantised."""
        start, self._idx = self._idx, self._idx + keys.shape[2]
        self.offset = self.offset + keys.shape[2]
        self.keys = _written(self.keys, start, keys, self.group_size, self.bits)
        self.values = _written(self.values, start, values, self.group_size, self.bits)
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[Packed, Packed]:
        assert self.keys is not None and self.values is not None
        return _part(self.keys, self._idx), _part(self.values, self._idx)

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Before a prefill of rows of different lengths. `lengths` is for caches that need them."""
        if left_padding is not None:
            if self.keys is not None:
                raise ValueError("left padding can only be added to an empty cache")
            more = mx.array(list(left_padding))
            self.left_padding = self.left_padding + more
            self.offset = self.offset - more
        if right_padding is not None and max(right_padding) > 0:
            self._right_padding = mx.array(list(right_padding))

    def finalize(self) -> None:
        """After it: what was padded on the right goes to the left."""
        padding = self._right_padding
        if padding is None:
            return
        assert self.keys is not None and self.values is not None
        self.keys, self.values = (
            _three(dynamic_roll(x, padding[:, None], axis=2) for x in packed)
            for packed in (self.keys, self.values)
        )
        self.offset = self.offset - padding
        self.left_padding = self.left_padding + padding
        self._right_padding = None

    @property
    def state(self) -> tuple[Any, ...]:
        return (
            *(self.keys, self.values, self.offset, self.left_padding),
            *(self._idx, self.group_size, self.bits),
        )

    @state.setter
    def state(self, state: tuple[Any, ...]) -> None:
        self.keys, self.values, self.offset, self.left_padding, self._idx, self.group_size, self.bits = state
        self._right_padding = None

    def is_trimmable(self) -> bool:
        return True

    def trim(self, num_tokens: int) -> int:
        """Forget the newest tokens of every row; how many these were."""
        num_tokens = min(self._idx, num_tokens)
        self._idx -= num_tokens
        self.offset = self.offset - num_tokens
        return num_tokens

    def make_mask(self, N: int, return_array: bool = False, **kwargs: Any) -> Array:
        """Whom `N` new tokens of each row attend to: (rows, 1, N, columns)."""
        return create_causal_mask(N, offset=self._idx, left_padding=self.left_padding, **kwargs)

    def filter(self, rows: Sequence[int]) -> None:
        """Keep just these rows, and no column that pads all of them."""
        rows = list(rows)
        self.offset = self.offset[rows]
        self.left_padding = self.left_padding[rows]
        spare = min(self.left_padding.tolist())
        if self.keys is not None and self.values is not None:
            self.keys, self.values = (
                _three(x[rows][..., spare:, :] if spare > 0 else x[rows] for x in packed)
                for packed in (self.keys, self.values)
            )
        if spare > 0:
            self._idx -= spare
            self.left_padding = self.left_padding - spare

    def extend(self, other: BatchQuantisedKVCache) -> None:
        """Add the rows of `other`."""
        filled = self.keys if self.keys is not None else other.keys
        if filled is not None:
            columns = max(self._idx, other._idx)
            size = max(cache.keys[0].shape[2] for cache in (self, other) if cache.keys is not None)
            forms = (filled, self.values if self.values is not None else other.values)
            both = [cache._justified(columns, size, forms) for cache in (self, other)]
            self.keys, self.values = (
                _three(map(mx.concatenate, zip(*packed, strict=True))) for packed in zip(*both, strict=True)
            )
            self.left_padding = mx.concatenate(
                [cache.left_padding + (columns - cache._idx) for cache in (self, other)]
            )
            self._idx = columns
        else:
            self.left_padding = mx.concatenate([self.left_padding, other.left_padding])
        self.offset = mx.concatenate([self.offset, other.offset])

    def _justified(self, columns: int, size: int, forms: tuple[Any, Any]) -> list[Packed]:
        """Keys and values with the newest token in column `columns` - 1 of `size`; zeros in the form of
        `forms` when there are none."""
        out = []
        for packed, form in zip((self.keys, self.values), forms, strict=True):
            rows = self.offset.shape[0]
            packed = packed or _three(mx.zeros((rows, x.shape[1], 0, x.shape[3]), x.dtype) for x in form)
            left = columns - self._idx
            kept = min(packed[0].shape[2], size - left)
            padding = [(0, 0), (0, 0), (left, size - left - kept), (0, 0)]
            out.append(_three(mx.pad(x[..., :kept, :], padding) for x in packed))
        return out

    def extract(self, row: int) -> QuantisedRow:
        """One row as a cache of its own, without padding."""
        one = QuantisedRow(group_size=self.group_size, bits=self.bits)
        if self.keys is not None and self.values is not None:
            start = self.left_padding.tolist()[row]
            one.keys, one.values = (
                _three(mx.contiguous(x[row : row + 1, :, start : self._idx]) for x in packed)
                for packed in (self.keys, self.values)
            )
            one.offset = self._idx - start
        return one

    @classmethod
    def merge(cls, rows: Sequence[QuantisedRow]) -> BatchQuantisedKVCache:
        """Rows of one form in a batch."""
        longest = max(row.offset for row in rows)
        padding = [longest - row.offset for row in rows]
        batch = cls(padding, rows[0].group_size, rows[0].bits)
        if longest == 0:
            return batch
        filled = next(row for row in rows if row.offset)

        def merged(name: str) -> Packed:
            columns = []
            for number, form in enumerate(getattr(filled, name)):
                whole = mx.zeros((len(rows), form.shape[1], longest, form.shape[3]), form.dtype)
                for i, row in enumerate(rows):
                    if row.offset:
                        whole[i : i + 1, :, padding[i] :] = getattr(row, name)[number][..., : row.offset, :]
                columns.append(whole)
            return _three(columns)

        batch.keys, batch.values = merged("keys"), merged("values")
        batch.offset = batch.offset + longest
        batch._idx = longest
        return batch

    def size(self) -> int:
        return self._idx

    def empty(self) -> bool:
        return self.keys is None

    @property
    def nbytes(self) -> int:
        return _nbytes(self.keys) + _nbytes(self.values)


def _written(packed: Packed | None, start: int, new: Array, group_size: int, bits: int) -> Packed:
    """`packed` with `new` (rows, heads, tokens, *) quantised into its columns from `start` on, grown by whole
    steps when it is too short."""
    columns = mx.quantize(new, group_size=group_size, bits=bits)
    stop = start + new.shape[2]
    if packed is None or stop > packed[0].shape[2]:
        size = -(-new.shape[2] // STEP) * STEP
        grown = []
        for number, x in enumerate(columns):
            room = mx.zeros((*x.shape[:2], size, x.shape[3]), x.dtype)
            grown.append(
                room if packed is None else mx.concatenate([packed[number][..., :start, :], room], axis=2)
            )
        packed = _three(grown)
    for old, x in zip(packed, columns, strict=True):
        old[..., start:stop, :] = x
    return packed


def _three(arrays: Iterable[Array]) -> Packed:
    weights, scales, biases = arrays
    return weights, scales, biases


def _part(packed: Packed, stop: int) -> Packed:
    a, b, c = packed
    return a[..., :stop, :], b[..., :stop, :], c[..., :stop, :]


def _nbytes(packed: Packed | None) -> int:
    return sum(int(x.nbytes) for x in packed or ())


# ---------------------------------------------------------------- which caches of a model


def quantised_caches(model: Any, trace: ModelTrace, options: KvOptions, layers: range) -> list[Any]:
    """The caches of one sequence, of which those that `layers` fill are quantised where they can be. What
    other ranks fill are ghosts, which hold nothing to quantise."""
    caches: list[Any] = make_prompt_cache(model)
    for number, layer in enumerate(trace.cache_layers):
        if layer in layers and trace.caches[layer].group_size:
            caches[number] = QuantisedRow(group_size=options.group_size, bits=options.bits)
    return caches


def why_not_quantised(model: Any, trace: ModelTrace) -> str:
    """Why a model's attention cannot be over quantised keys and values, seen in a lazy forward of two rows;
    '' when it can, or when it has no layer to try."""
    groups = [cache.group_size for cache in trace.caches if cache.itemsize]
    if not groups:
        return ""
    if min(groups) == 0:
        sizes = ", ".join(map(str, KV_GROUP_SIZES))
        return f"the size of its heads is no multiple of any group size ({sizes})"
    options = KvOptions(bits=max(KV_BITS), group_size=min(groups))
    try:
        rows = [quantised_caches(model, trace, options, range(trace.num_layers)) for _ in range(2)]
        caches = [pair[0].merge(pair) for pair in zip(*rows, strict=True)]
        for length in (3, 1):
            model(mx.zeros((2, length), dtype=mx.uint32), cache=caches)
    except Exception as error:  # whatever a model's own code raises
        told = " ".join(str(error).split())
        return f"its attention does not take them ({type(error).__name__}: {told[:200]})"
    return ""
