"""One rank's part of kept prefixes: caches by number, and what can be done with any cache that mlx-lm has.

Arrays of a kept cache are never changed: a row that begins with one merges it into its batch, which copies.
So handing one out is only new cache objects around the same arrays.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from mlx_mesh.node.engine.caches import cache_parts
from mlx_mesh.node.engine.row_media import RowMedia

Cache = list[Any]
"""One cache object for each layer, of one sequence."""


class PrefixStore:
    """The entries that the leader's plans name."""

    def __init__(self) -> None:
        self._caches: dict[int, Cache] = {}
        self._sizes: dict[int, int] = {}
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._caches)

    def put(self, entry: int, cache: Cache) -> int:
        """Keep a row's cache, which nobody else changes; returns its bytes. Computing its arrays is begun and
        not waited for, so that they do not hold on to the batch that they come from."""
        self.evict(entry)
        for _, part in leaves(cache):
            cut_window(part)
        mx.async_eval(
            [
                array
                for _, array in tree_flatten([part.state for _, part in leaves(cache)])
                if isinstance(array, mx.array)
            ]
        )
        size = int(sum(part.nbytes for part in cache))
        self._caches[entry] = cache
        self._sizes[entry] = size
        self.num_bytes += size
        return size

    def get(self, entry: int) -> Cache | None:
        return self._caches.get(entry)

    def evict(self, entry: int) -> None:
        """Nothing if it is not here: its row ended before it had anything to keep."""
        if self._caches.pop(entry, None) is not None:
            self.num_bytes -= self._sizes.pop(entry)


def begin_with(cache: Cache, num_kept: int, num_tokens: int) -> Cache:
    """The first `num_tokens` of a cache of `num_kept` tokens, for a new row."""
    cache = [referring(part) for part in cache]
    if num_tokens < num_kept:
        assert can_cut(cache), f"a cache of {num_kept} tokens that cannot be cut back to {num_tokens}"
        for part in cache:
            part.trim(num_kept - num_tokens)
    if isinstance(cache[-1], RowMedia):
        assert cache[-1].num_tokens == [num_tokens], "a kept row that does not know its length"
    return cache


def referring(cache: Any) -> Any:
    """A cache object of its own around the same arrays."""
    cache = copy.copy(cache)
    if isinstance(getattr(cache, "caches", None), (list, tuple)):
        cache.caches = type(cache.caches)(referring(part) for part in cache.caches)
    if isinstance(getattr(cache, "cache", None), list):
        cache.cache = list(cache.cache)
    return cache


def can_cut(cache: Cache) -> bool:
    """Whether this cache, as it is, can be cut back to any shorter prefix."""
    return all(
        part.is_trimmable() and not getattr(part, "start_position", 0)  # > 0: a chunk's beginning is gone
        for _, part in leaves(cache)
    )


def can_always_cut(model: Any) -> bool:
    """Whether all caches of the model can be cut back at any length."""
    return all(
        part.is_trimmable() and not getattr(part, "max_size", None) and not getattr(part, "chunk_size", None)
        for _, part in leaves(make_prompt_cache(model))
    )


def leaves(cache: Sequence[Any]) -> list[tuple[tuple[int, ...], Any]]:
    return [leaf for part in cache for leaf in cache_parts(part)]


def cut_window(cache: Any) -> None:
    """After a long chunk a window's cache holds the whole chunk: drop what is out of the window."""
    size, keys = getattr(cache, "max_size", None), getattr(cache, "keys", None)
    if not size or getattr(cache, "keep", None) or not isinstance(keys, mx.array):
        return
    length = cache.keys.shape[2]
    if length > size and cache._idx == length:
        cache.keys = mx.contiguous(cache.keys[..., -size:, :])
        cache.values = mx.contiguous(cache.values[..., -size:, :])
        cache._idx = size
