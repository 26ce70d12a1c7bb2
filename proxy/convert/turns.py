"""Turns of OpenAI's chat completions as chat templates read them."""

from __future__ import annotations

import json
from typing import Any

from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.schemas.chat import ChatMessage
from mlx_mesh.proxy.tokenizer import ModelTokenizer

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")


def template_message(message: ChatMessage, param: str, tokenizer: ModelTokenizer) -> dict[str, Any]:
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
    turn: dict[str, Any] = {"role": role, "content": join_text(message.content, f"{param}.content")}
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


def join_text(content: str | list[dict[str, Any]] | None, param: str) -> str:
    """Text parts, a line each. Raises ApiError 400 naming a part that is no text."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type", "text")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "refusal", "input_text", "output_text"):
            raise invalid(
                f"'{param}[{at}]' has type {str(kind)[:40]!r}; this model takes text only.",
                param=f"{param}[{at}]",
                code="unsupported_media",
            )
        if text is not None and not isinstance(text, str):
            raise invalid(f"Invalid '{param}[{at}].text': it must be a string.", param=f"{param}[{at}].text")
        texts.append(text or "")
    return "\n".join(texts)


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
