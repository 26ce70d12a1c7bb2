"""Caches of models that are right for one sequence at a time only, as the generator wants caches to be.

The generator joins and splits batches even when they have one row. Some caches cannot be joined, and with
others a joined batch computes something else; of one row all that is nothing to do. But who joins or takes
a row gets arrays of his own, as from a real batch: caches write into theirs in place, and a prefix that is
kept must stay as it is.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

_made: dict[type, type] = {}


def for_one_row(cache: Any) -> Any:
    """The same object, as a member of a class that can be "joined" and "split" while it is alone."""
    cls = type(cache)
    made = _made.get(cls)
    if made is None:
        made = _made[cls] = type(f"OneRow{cls.__name__}", (_OneRow, cls), {"__module__": cls.__module__})
    cache.__class__ = made
    return cache


class _OneRow:
    """In front of a cache class."""

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> Any:
        (alone,) = caches
        return _apart(alone)

    def filter(self, keep: Any) -> None:
        """It stays: a batch without rows drops its caches as a whole."""

    def extract(self, row: int) -> Any:
        assert row == 0, f"row {row} of a cache for one row"
        return _apart(self)

    def extend(self, other: Any) -> None:
        raise ValueError("this model serves one sequence at a time; the scheduler must not add another")

    def prepare(self, **_: Any) -> None:
        """One row is never padded."""

    def finalize(self) -> None:
        """See prepare."""


def _apart(cache: Any) -> Any:
    """The same cache in objects of its own. Their buffers are shared for as long as nobody writes."""
    apart = copy.copy(cache)
    for name, value in vars(cache).items():
        setattr(apart, name, _own(value))
    return apart


def _own(value: Any) -> Any:
    if isinstance(value, mx.array):
        return mx.stop_gradient(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_own(item) for item in value])
    return _apart(value) if hasattr(value, "is_trimmable") else value
