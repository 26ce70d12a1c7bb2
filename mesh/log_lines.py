"""One log line as JSON, with the same keys for every process of a mesh. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Literal, get_args

LogFormat = Literal["text", "json"]
LOG_FORMATS: tuple[str, ...] = get_args(LogFormat)

_CHILDREN = ("proxy", "embedder")
"""Children of the leader's agent whose lines are among its own rank's, behind their name."""


def json_line(
    message: str,
    *,
    component: str,
    at: datetime | None = None,
    level: str = "info",
    rank: int | None = None,
    host: str = "",
) -> str:
    """`at`: now, if not given. `rank` and `host` are null where a line is no rank's."""
    for child in _CHILDREN:
        if message.startswith(f"{child}: "):
            component, message = child, message.removeprefix(f"{child}: ")
    return json.dumps(
        {
            "timestamp": (at or datetime.now(UTC)).isoformat(timespec="milliseconds"),
            "level": level,
            "component": component,
            "rank": rank,
            "host": host or None,
            "message": message,
        },
        ensure_ascii=False,
    )
