"""Tools of a request as chat templates read them, and what may be asked of them here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.tokenizer import ModelTokenizer

MAX_TOOLS = 512

_NAME = re.compile(r"[\w.:-]{1,256}")

_NO_GRAMMAR = (
    "a call cannot be forced, because output is not constrained in this version; use 'auto' or 'none'."
)


def read_tools(
    tokenizer: ModelTokenizer, tools: Sequence[dict[str, Any]], param: str = "tools"
) -> tuple[dict[str, Any], ...]:
    """OpenAI's tools, each `{"type": "function", "function": {...}}`. Raises ApiError 400 by name."""
    if not tools:
        return ()
    require_tools(tokenizer, param)
    if len(tools) > MAX_TOOLS:
        raise invalid(f"Invalid '{param}': at most {MAX_TOOLS} tools.", param=param)
    return tuple(_tool(tool, f"{param}[{at}]") for at, tool in enumerate(tools))


def require_tools(tokenizer: ModelTokenizer, param: str) -> None:
    """Raises ApiError 400 for a model that was not made for tools."""
    if tokenizer.takes_tools:
        return
    reason = (
        "the form of its calls is not known"
        if tokenizer.template_reads.variable("tools")
        else "its chat template shows none to it"
    )
    raise invalid(
        f"'{param}' is not supported here: this model calls no tools; {reason}.",
        param=param,
        code="unsupported_parameter",
    )


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    kind = tool.get("type", "function")
    if kind != "function":
        raise invalid(
            f"'{param}.type' is {kind!r}; only tools of type 'function' are supported here.",
            param=f"{param}.type",
            code="unsupported_parameter",
        )
    return function_tool(tool.get("function"), f"{param}.function")


def function_tool(function: Any, param: str) -> dict[str, Any]:
    """One function, checked. Raises ApiError 400."""
    if not isinstance(function, dict):
        raise invalid(f"Invalid '{param}': it must be an object.", param=param)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"Invalid '{param}.name': it must have 1 to 256 letters, digits, '_', '-', '.' or ':'.",
            param=f"{param}.name",
        )
    kept: dict[str, Any] = {"name": name, "description": _text(function.get("description"), param)}
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise invalid(f"Invalid '{param}.parameters': it must be a JSON schema.", param=f"{param}.parameters")
    return {"type": "function", "function": {**kept, "parameters": parameters}}


def _text(description: Any, param: str) -> str:
    if description is None or isinstance(description, str):
        return description or ""
    raise invalid(f"Invalid '{param}.description': it must be a string.", param=f"{param}.description")


def wants_tools(choice: Any, param: str = "tool_choice") -> bool:
    """Whether the model may call: False for `none`. Raises ApiError 400 for a forced call."""
    if choice in (None, "auto"):
        return True
    if choice == "none":
        return False
    raise forced_choice(choice, param)


def forced_choice(choice: Any, param: str = "tool_choice") -> ApiError:
    if choice != "required" and not (isinstance(choice, dict) and isinstance(choice.get("type"), str)):
        return invalid(f"Invalid '{param}': 'none', 'auto', 'required', or a tool.", param=param)
    return invalid(
        f"'{param}' is not supported here: {_NO_GRAMMAR}", param=param, code="unsupported_parameter"
    )
