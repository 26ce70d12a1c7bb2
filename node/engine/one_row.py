"""Caches of models that are right for one sequence at a time only, as the generator wants caches to be.

The generator joins and splits batches even when they have one row. Some caches cannot be joined, and with
others a joined batch computes something else; of one row all that is nothing to do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        return alone

    def filter(self, keep: Any) -> None:
        """It stays: a batch without rows drops its caches as a whole."""

    def extract(self, row: int) -> Any:
        assert row == 0, f"row {row} of a cache for one row"
        return self

    def extend(self, other: Any) -> None:
        raise ValueError("this model serves one sequence at a time; the scheduler must not add another")

    def prepare(self, **_: Any) -> None:
        """One row is never padded."""

    def finalize(self) -> None:
        """See prepare."""
