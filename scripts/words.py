"""What prompts of the benchmark and of the chaos run are made of."""

from __future__ import annotations

WORDS = (
    "river",
    "stone",
    "window",
    "garden",
    "letter",
    "engine",
    "morning",
    "paper",
    "silver",
    "market",
    "bridge",
)
