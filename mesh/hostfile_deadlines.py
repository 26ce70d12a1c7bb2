"""`deadlines:` of a hostfile: any of `messages.Deadlines`, in seconds. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping

import msgspec

from mlx_mesh.mesh.messages import Deadlines

MIN_S, MAX_S = 0.1, 86400.0
NAMES = tuple(field.name for field in msgspec.structs.fields(Deadlines))

_ORDER = (
    ("heartbeat_interval_s", "engine_silence_s", 2.0),
    ("heartbeat_interval_s", "heartbeat_timeout_s", 2.0),
    ("heartbeat_timeout_s", "rejoin_timeout_s", 1.0),
)
"""The second is at least so many times the first, or healthy hosts would be lost."""


def read_deadlines(given: Mapping[str, float]) -> tuple[Deadlines, list[tuple[str, str]]]:
    """The deadlines with those that are given, and faults: the key, what was seen and the fix."""
    faults = []
    for name, value in given.items():
        if name not in NAMES:
            near = difflib.get_close_matches(name, NAMES, 1)
            fix = f"did you mean `{near[0]}`?" if near else f"use one of {', '.join(NAMES)}"
            faults.append((name, f"unknown key `{name}`; {fix}"))
        elif not MIN_S <= value <= MAX_S:
            faults.append((name, f"`{name}: {value:g}` is out of range; it must be {MIN_S:g} to {MAX_S:g} s"))
    if faults:
        return Deadlines(), faults
    found = Deadlines(**{name: float(value) for name, value in given.items()})
    for shorter, longer, factor in _ORDER:
        low, high = getattr(found, shorter), getattr(found, longer)
        if high < factor * low:
            times = f"{factor:g} times " if factor != 1.0 else ""
            key = longer if longer in given else shorter
            faults.append(
                (key, f"{longer} is {high:g} s; it must be at least {times}{shorter}, which is {low:g} s")
            )
    return found, faults
