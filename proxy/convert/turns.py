"""Turns of OpenAI's chat completions as chat templates read them."""

from __future__ import annotations

import json
from typing import Any

from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.parts import PartReader
from mlx_mesh.proxy.schemas.chat import ChatMessage
from mlx_mesh.proxy.tokenizer import ModelTokenizer

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


_MAY_SHOW = ("user", "tool")
"""Roles whose turns may have media."""


def template_message(
    message: ChatMessage, param: str, tokenizer: ModelTokenizer, parts: PartReader
) -> dict[str, Any]:
    """One turn as chat templates read it. Raises ApiError 400 naming the part."""
    role = _ROLES.get(message.role)
    if role is None:
        raise invalid(
            f"Invalid '{param}.role': '{message.role}'; roles are {', '.join(_ROLES)}.", param=f"{param}.role"
        )
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise invalid(
                f"'{param}.{name}' is not supported here.",
                param=f"{param}.{name}",
                code="unsupported_parameter",
            )
    content = parts.openai(message.content, f"{param}.content", may_show=role in _MAY_SHOW)
    turn: dict[str, Any] = {"role": role, "content": content}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [with_arguments_read(call) for call in message.tool_calls]
    reasoning = message.reasoning_content or message.reasoning
    return turn | earlier_reasoning(reasoning or "", tokenizer)


def earlier_reasoning(text: str, tokenizer: ModelTokenizer) -> dict[str, Any]:
    """Reasoning of an earlier turn under the name that the template reads; most show none."""
    name = next((name for name in _REASONING_NAMES if tokenizer.template_reads.field(name)), None)
    return {name: text} if text and name else {}


def with_arguments_read(call: dict[str, Any]) -> dict[str, Any]:
    """Templates want a call's arguments as an object; OpenAI sends them as JSON text, which models
    sometimes get wrong: then the text stays."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}
