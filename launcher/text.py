"""Plain text for terminals: tables, and what others wrote made harmless. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# A log line of another machine must not move our cursor or set our title.
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def harmless(text: str) -> str:
    """Without escape sequences and control characters; of a line redrawn with carriage returns, the last."""
    last = _ESCAPES.sub("", text).rstrip("\r").rpartition("\r")[2]
    return _CONTROLS.sub("", last)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns; those that hold numbers stand to the right."""
    widths = [max(len(line[column]) for line in (headers, *rows)) for column in range(len(headers))]
    right = [
        all(row[column][:1].isdigit() or row[column] in ("", "-") for row in rows)
        for column in range(len(headers))
    ]

    def line(cells: Sequence[str]) -> str:
        aligned = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(cells, widths, right, strict=True)
        ]
        return "  ".join(aligned).rstrip()

    return [line(headers), *(line(row) for row in rows)]
