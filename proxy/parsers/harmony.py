"""OpenAI's harmony format (gpt-oss): channels of one turn, calls addressed to functions.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>final<|message|>...
    <|channel|>commentary to=functions.f <|constrain|>json<|message|>{"x": 1}<|call|>

`<|call|>` and `<|return|>` are ends of text, so they are usually not seen here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

CALL_START = "to=functions."

TRANSITIONS = {
    "header": [
        ("<|channel|>analysis<|message|>", "reasoning"),
        ("<|channel|>final<|message|>", "normal"),
        ("<|channel|>commentary<|message|>", "normal"),
        (CALL_START, "tool"),
    ],
    "reasoning": [("<|end|>", "header")],
    "normal": [("<|end|>", "header"), ("<|return|>", "header")],
    "tool": [("<|call|>", "header"), ("<|end|>", "header")],
}

_CALL = re.compile(
    r"^([\w.-]+)(?:\s|<\|channel\|>|<\|constrain\|>|commentary|json)*<\|message\|>(.*)$", re.DOTALL
)


def parse_tool_call(text: str, tools: Sequence[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The text after `to=functions.`. Raises ValueError."""
    match = _CALL.match(text)
    if match is None:
        raise ValueError("no call in harmony format")
    return {"name": match.group(1), "arguments": json.loads(match.group(2))}
