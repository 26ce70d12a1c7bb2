"""Prompt caches as a trace and its ghosts see them: their parts, what they keep, how they advance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_mesh.node.engine import tree
from mlx_mesh.node.engine.tree import Path


@dataclass(frozen=True, slots=True)
class CachePart:
    """A cache object that a call got: where it is in the arguments, and which part of a list of caches."""

    path: Path
    parts: tuple[int, ...]


def find_cache(args: tuple[Any, ...], kwargs: dict[str, Any], part: CachePart) -> Any:
    """The cache object of this call; None in a forward without caches."""
    cache = tree.get(args, kwargs, part.path)
    if cache is None:
        return None
    for number in part.parts:
        cache = cache.caches[number]
    return cache


def cache_parts(cache: Any) -> Iterator[tuple[tuple[int, ...], Any]]:
    """(part numbers, cache) of a cache, or of each member when it is a list of caches."""
    members = getattr(cache, "caches", None)
    if isinstance(members, (list, tuple)):
        for i, member in enumerate(members):
            for parts, leaf in cache_parts(member):
                yield (i, *parts), leaf
    else:
        yield (), cache


def cache_ids(caches: Iterable[Any]) -> set[int]:
    """Ids of the caches and of the members of lists of caches."""
    ids: set[int] = set()
    for cache in caches:
        ids.add(id(cache))
        members = getattr(cache, "caches", None)
        if isinstance(members, (list, tuple)):
            ids |= cache_ids(members)
    return ids


def cache_contents(cache: Any) -> list[Any]:
    states = (cache.keys, cache.values) if hasattr(cache, "update_and_fetch") else cache.cache
    return [state for state in states if isinstance(state, mx.array)]


def tick(cache: Any, batch: int, length: int) -> None:
    """Advance a ghost's cache by `length` tokens. It holds one number instead of keys and values, so that
    every offset, mask, rotation, trim, merge and filter stays what the real layer's cache would say. None,
    in a forward without caches, stays None."""
    if cache is None:
        return
    if hasattr(cache, "update_and_fetch"):
        token = mx.zeros((batch, 1, length, 1), dtype=mx.float16)
        cache.update_and_fetch(token, token)
        # All zero whatever was written: forget how they came about, or the graph would grow each step.
        cache.keys = mx.zeros(cache.keys.shape, dtype=mx.float16)
        cache.values = mx.zeros(cache.values.shape, dtype=mx.float16)
    else:
        for i, state in enumerate(cache.cache):
            if state is None:
                cache[i] = mx.zeros((batch, 1), dtype=mx.float16)
        cache.advance(length)


def can_tick(cache: Any) -> bool:
    if hasattr(cache, "update_and_fetch"):
        return hasattr(cache, "keys") and hasattr(cache, "values")
    return isinstance(getattr(cache, "cache", None), list) and hasattr(cache, "advance")
