"""Anthropic's messages as a common request."""

from __future__ import annotations

import re
import uuid
from typing import Any

from mlx_mesh.proxy.convert.common import ChatJob
from mlx_mesh.proxy.convert.prefixes import PrefixChoice
from mlx_mesh.proxy.convert.sampling import sampling_params
from mlx_mesh.proxy.convert.structure import AnswerForm, schema_form
from mlx_mesh.proxy.convert.thinking import EFFORTS, budget, template_options
from mlx_mesh.proxy.convert.tools import Choice, call_form, function_tool, read_choice, require_tools
from mlx_mesh.proxy.convert.turns import earlier_reasoning
from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.media.frame_wish import FrameWish
from mlx_mesh.proxy.media.item import item_part, joined, text_part
from mlx_mesh.proxy.media.parts import PartReader
from mlx_mesh.proxy.media.pixels import PixelBounds
from mlx_mesh.proxy.schemas.messages import Blocks, MessagesRequest, Prompt
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import ModelTokenizer

_BILLING_LINE = re.compile(r"(?im)^x-anthropic-billing-header:[^\n]*\n?")
"""Coding agents put a value here that changes every turn: it would make every prompt new from its start."""

_MEDIA = ("image", "document", "audio", "video", "container_upload")


def messages_job(services: Services, body: Prompt) -> ChatJob:
    """Raises ApiError 400 naming the field."""
    tokenizer = services.tokenizer
    tools = _tools(tokenizer, body)
    choice = _choice(body, tools)
    one_call = (body.tool_choice or {}).get("disable_parallel_tool_use") is True
    messages = _turns(tokenizer, body, services.media.parts)
    switch, thinking_budget, strip = _thinking(services, body)
    continues = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    return ChatJob(
        id=f"msg_{uuid.uuid4().hex[:24]}",
        messages=messages,
        sampling=sampling_params(body, tokenizer),
        max_tokens=body.max_tokens if isinstance(body, MessagesRequest) else None,
        stop_strings=tuple(body.stop_sequences or ()) if isinstance(body, MessagesRequest) else (),
        max_time_s=body.max_time_s or 0.0,
        prefixes=PrefixChoice.of(body),
        tools=tools if choice.may_call else (),
        one_call=one_call,
        form=call_form(choice, tools, _answer_form(body), only_one=one_call),
        template_options={**switch, **_output_options(tokenizer, body)},
        strip_thinking=strip,
        thinking_budget=thinking_budget,
        continues_last=continues,
        pixels=PixelBounds.of(body),
        frames=FrameWish.of(body),
    )


# ---------------------------------------------------------------- tools


def _tools(tokenizer: ModelTokenizer, body: Prompt) -> tuple[dict[str, Any], ...]:
    if body.tools:
        require_tools(tokenizer, "tools")
    return tuple(_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or ()))


def _choice(body: Prompt, tools: tuple[dict[str, Any], ...]) -> Choice:
    given = body.tool_choice or {}
    match given.get("type", "auto"):
        case "auto" | "none" as kind:
            return read_choice(kind, tools)
        case "any":
            return read_choice("required", tools)
        case "tool":
            return read_choice({"type": "function", "name": given.get("name")}, tools)
    raise invalid("Invalid 'tool_choice.type': auto, any, tool or none.", param="tool_choice.type")


def _answer_form(body: Prompt) -> AnswerForm | None:
    given = (body.output_config or {}).get("format")
    if given is None:
        return None
    if not isinstance(given, dict) or given.get("type") != "json_schema":
        raise invalid(
            "Invalid 'output_config.format': its type must be 'json_schema'.", param="output_config.format"
        )
    return schema_form(given.get("schema"), "output_config.format.schema")


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    kind = tool.get("type") or "custom"
    if kind != "custom":
        raise invalid(
            f"'{param}.type' is {str(kind)[:40]!r}; only the client's own tools, with an input_schema, are "
            "supported here.",
            param=f"{param}.type",
            code="unsupported_parameter",
        )
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    return function_tool(function, param)


# ---------------------------------------------------------------- turns


def _turns(tokenizer: ModelTokenizer, body: Prompt, parts: PartReader) -> list[dict[str, Any]]:
    turns: list[dict[str, Any]] = []
    if system := system_text(body.system):
        turns.append({"role": "system", "content": system})
    for at, turn in enumerate(body.messages):
        param = f"messages[{at}]"
        match turn.role:
            case "user":
                turns += _user(turn.content, f"{param}.content", parts)
            case "assistant":
                turns.append(_assistant(tokenizer, turn.content, f"{param}.content"))
            case "system":
                turns.append({"role": "system", "content": _text_of(turn.content, f"{param}.content")})
            case _:
                raise invalid(f"Invalid '{param}.role': user or assistant.", param=f"{param}.role")
    return turns


def system_text(system: Blocks | None) -> str:
    """The system prompt without billing lines; blocks are joined line by line."""
    if system is None:
        return ""
    blocks = [system] if isinstance(system, str) else [_text_of([one], "system") for one in system]
    kept = [_BILLING_LINE.sub("", block) for block in blocks]
    return "\n".join(text for text in kept if text.strip())


def _user(content: Blocks, param: str, parts: PartReader) -> list[dict[str, Any]]:
    """Tool results are turns of their own; text and images between them stay in their places."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    turns: list[dict[str, Any]] = []
    shown: list[dict[str, Any]] = []
    for at, block in enumerate(content):
        if block.get("type") != "tool_result":
            shown += _shown([block], param, parts, at)
            continue
        if shown:
            turns.append({"role": "user", "content": joined(shown)})
            shown = []
        result = _shown(block.get("content") or "", f"{param}[{at}].content", parts)
        if block.get("is_error") is True:
            is_text = bool(result) and result[0]["type"] == "text"
            first = text_part(f"Error: {result[0]['text'] if is_text else ''}")
            result = [first, *result[is_text:]]
        call_id = str(block.get("tool_use_id", ""))
        turns.append({"role": "tool", "content": joined(result), "tool_call_id": call_id})
    if shown or not turns:
        turns.append({"role": "user", "content": joined(shown)})
    return turns


def _assistant(tokenizer: ModelTokenizer, content: Blocks, param: str) -> dict[str, Any]:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for at, block in enumerate(content):
        match block.get("type"):
            case "thinking":
                thoughts.append(str(block.get("thinking") or ""))
            case "redacted_thinking":
                pass  # nobody but its maker can read it
            case "tool_use":
                calls.append(_call(block, f"{param}[{at}]"))
            case _:
                texts.append(_text_of([block], param, at))
    turn: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if calls:
        turn["tool_calls"] = calls
    return turn | earlier_reasoning("\n".join(thoughts), tokenizer)


def _call(block: dict[str, Any], param: str) -> dict[str, Any]:
    name, arguments = block.get("name"), block.get("input")
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        raise invalid(f"Invalid '{param}': a tool_use has a name and an input object.", param=param)
    return {
        "id": str(block.get("id", "")),
        "type": "function",
        "function": {"name": name, "arguments": arguments or {}},
    }


def _shown(content: Any, param: str, parts: PartReader, first: int = 0) -> list[dict[str, Any]]:
    """Text and image blocks as parts of a turn. Raises ApiError 400 naming a block that is neither."""
    if isinstance(content, str):
        return [text_part(content)]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(f"Invalid '{param}': a string or a list of blocks.", param=param)
    shown = []
    for at, block in enumerate(content, first):
        here, kind = f"{param}[{at}]", block.get("type")
        if kind == "image":
            shown.append(item_part(parts.anthropic_image(block, here)))
        elif kind in _MEDIA:
            raise parts.unsupported(here, kind, "of these, this API takes images only")
        else:
            shown.append(text_part(_text_of([block], param, at)))
    return shown


def _text_of(content: Any, param: str, first: int = 0) -> str:
    """Text blocks, a line each. Raises ApiError 400 naming a block that is no text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(f"Invalid '{param}': a string or a list of blocks.", param=param)
    texts: list[str] = []
    for at, block in enumerate(content, first):
        kind = block.get("type")
        if kind != "text":
            raise _not_text(str(kind), f"{param}[{at}]")
        if not isinstance(block.get("text"), str):
            raise invalid(f"Invalid '{param}[{at}].text': it must be a string.", param=f"{param}[{at}].text")
        texts.append(block["text"])
    return "\n".join(texts)


def _not_text(kind: str, param: str) -> ApiError:
    if kind in _MEDIA:
        return invalid(
            f"'{param}' has type {kind!r}; here, only text is taken.", param=param, code="unsupported_media"
        )
    return invalid(
        f"'{param}' has type {kind[:40]!r}, which is not supported here.",
        param=param,
        code="unsupported_parameter",
    )


# ---------------------------------------------------------------- thinking


def _thinking(services: Services, body: Prompt) -> tuple[dict[str, Any], int | None, bool]:
    """Template options, the budget, and whether reasoning is left out of the answer."""
    tokenizer, given = services.tokenizer, body.thinking
    strip = services.config.strip_thinking
    if given is None:
        return {}, None, strip
    kind = given.get("type")
    if kind not in ("enabled", "adaptive", "between_tools", "disabled"):
        raise invalid("Invalid 'thinking.type': enabled, adaptive or disabled.", param="thinking.type")
    if not tokenizer.markup.has_reasoning:
        return {}, None, strip  # it thinks nothing, within any budget
    can_switch = tokenizer.template_reads.variable("enable_thinking") or tokenizer.template_reads.variable(
        "thinking"
    )
    if kind == "disabled":
        if can_switch:
            return template_options(tokenizer, enable_thinking=False), None, True
        return {}, budget(tokenizer, 0, "thinking"), True
    switch = template_options(tokenizer, enable_thinking=True) if can_switch else {}
    wanted = given.get("budget_tokens")
    if wanted is not None and (type(wanted) is not int or wanted < 0):
        raise invalid("Invalid 'thinking.budget_tokens': a whole number.", param="thinking.budget_tokens")
    limit = budget(tokenizer, wanted, "thinking.budget_tokens")
    return switch, limit, given.get("display") == "omitted"


def _output_options(tokenizer: ModelTokenizer, body: Prompt) -> dict[str, Any]:
    """Effort goes to the templates that read it; other models have one effort."""
    given = body.output_config or {}
    effort = given.get("effort")
    if effort is not None and effort not in EFFORTS:
        raise invalid("Invalid 'output_config.effort'.", param="output_config.effort")
    if effort is None or not tokenizer.template_reads.variable("reasoning_effort"):
        return {}
    return template_options(tokenizer, effort=effort, effort_param="output_config.effort")
