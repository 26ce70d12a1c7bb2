"""What a model wrote between its call tags, as calls; None when it is none that a client could use."""

from __future__ import annotations

import json
import logging
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.markup import ParseCalls

MAX_CALL_CHARS = 4 * 1024 * 1024
"""A call that is longer is given back as text."""

_NAME = re.compile(r"[\w.:/-]{1,256}")

_log = logging.getLogger("mlx_mesh.proxy")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call. `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


def read_calls(parse: ParseCalls, text: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...] | None:
    """Never raises: parsers are written for complete calls, and models write others."""
    try:
        parsed = parse(text, list(tools))
        calls = tuple(_call(one, tools) for one in (parsed if isinstance(parsed, list) else [parsed]))
    except Exception as error:  # of any kind: KeyError, AttributeError, RecursionError ...
        _log.info("a tool call could not be read (%s); it is given out as text", type(error).__name__)
        return None
    return calls or None


def new_call_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


def tool_names(tools: Sequence[dict[str, Any]]) -> frozenset[str]:
    return frozenset(str(tool["function"]["name"]) for tool in tools)


def _call(parsed: dict[str, Any], tools: Sequence[dict[str, Any]]) -> ToolCall:
    """Raises ValueError and TypeError."""
    function = parsed.get("function")
    if isinstance(function, dict):
        parsed = {**parsed, **function}
    name = parsed.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("a call without the name of a function")
    arguments = parsed.get("arguments", parsed.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise ValueError("a call whose arguments are no object")
    if set(arguments) == {"raw"} and name not in tool_names(tools):
        raise ValueError("text that a lenient parser took for a call")
    call_id = parsed.get("id")
    return ToolCall(
        id=call_id if isinstance(call_id, str) and call_id else new_call_id(),
        name=name,
        arguments=json.dumps(arguments, ensure_ascii=False),
    )
