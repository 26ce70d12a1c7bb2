"""Walk through the values that models hand to their layers: tuples, lists, dicts and plain objects.

A path is a tuple of steps from the arguments of a call to one leaf: ("arg", 0), ("kw", "cache"), then
("item", key) for tuples, lists and dicts and ("attr", name) for plain objects.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import mlx.nn as nn

Path = tuple[tuple[str, Any], ...]

_SCALARS = (str, bytes, int, float, bool, type(None), mx.array, mx.Dtype)


def is_plain_object(value: Any) -> bool:
    """Whether `value` only carries data: an instance with attributes that is neither module nor callable."""
    return hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value)


def walk(value: Any, opaque: set[int], path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) below `value`, depth first. Objects whose id is in `opaque` (caches) are leaves."""
    yield from _walk(value, opaque, path, set())


def _walk(value: Any, opaque: set[int], path: Path, above: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, _SCALARS) or id(value) in opaque or id(value) in above:
        yield path, value
        return
    above = above | {id(value)}
    if isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _walk(item, opaque, (*path, ("item", i)), above)
    elif isinstance(value, dict) and not isinstance(value, nn.Module):
        for key, item in value.items():
            yield from _walk(item, opaque, (*path, ("item", key)), above)
    elif is_plain_object(value):
        for name, item in vars(value).items():
            yield from _walk(item, opaque, (*path, ("attr", name)), above)
    else:
        yield path, value


def walk_call(args: tuple[Any, ...], kwargs: dict[str, Any], opaque: set[int]) -> Iterator[tuple[Path, Any]]:
    """Yield (path, leaf) of a call's arguments."""
    for i, arg in enumerate(args):
        yield from walk(arg, opaque, (("arg", i),))
    for name, arg in kwargs.items():
        yield from walk(arg, opaque, (("kw", name),))


def get(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    """The value at `path` of a call's arguments."""
    value: Any = None
    for kind, key in path:
        if kind == "arg":
            value = args[key]
        elif kind == "kw":
            value = kwargs[key]
        elif kind == "item":
            value = value[key]
        else:
            value = getattr(value, key)
    return value


def assign(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, value: Any) -> None:
    """Store `value` at `path`, which must lie inside a list, dict or plain object of the arguments."""
    parent = get(args, kwargs, path[:-1])
    kind, key = path[-1]
    if kind == "attr":
        setattr(parent, key, value)
    else:
        parent[key] = value
