"""/v1/responses as a common request: items become turns."""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.convert.common import ChatJob
from mlx_mesh.proxy.convert.prefixes import PrefixChoice
from mlx_mesh.proxy.convert.sampling import sampling_params
from mlx_mesh.proxy.convert.structure import response_format
from mlx_mesh.proxy.convert.thinking import template_options
from mlx_mesh.proxy.convert.tools import call_form, function_tool, read_choice, require_tools
from mlx_mesh.proxy.convert.turns import earlier_reasoning, with_arguments_read
from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.frame_wish import FrameWish
from mlx_mesh.proxy.media.parts import PartReader
from mlx_mesh.proxy.media.pixels import PixelBounds
from mlx_mesh.proxy.schemas.responses import ResponsesRequest
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import ModelTokenizer

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_INCLUDES = (
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
"""Known; apart from the first they ask for parts of items that are never made here."""


@dataclass(frozen=True, slots=True)
class ResponsesJob:
    """`turns`: the conversation without instructions; `items`: the input as a list of items."""

    job: ChatJob
    turns: list[dict[str, Any]]
    items: list[dict[str, Any]]


def responses_job(services: Services, body: ResponsesRequest) -> ResponsesJob:
    """Raises ApiError 400 naming the field."""
    tokenizer = services.tokenizer
    earlier: list[dict[str, Any]] = []
    if body.previous_response_id is not None:
        stored = services.responses.get(body.previous_response_id)
        if stored is None:
            raise invalid(
                f"There is no response '{body.previous_response_id[:80]}' here; send the whole conversation.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        earlier = stored.turns
    _check(body)
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    turns = [*earlier, *item_turns(tokenizer, items, services.media.parts)]
    if not turns:
        raise invalid("'input' has no items.", param="input")
    tools = _tools(tokenizer, body)
    choice = read_choice(body.tool_choice, tools)
    one_call = body.parallel_tool_calls is False
    text_format = (body.text or {}).get("format")
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    job = ChatJob(
        id=f"resp_{uuid.uuid4().hex}",
        messages=[*system, *turns],
        sampling=sampling_params(body, tokenizer),
        max_tokens=body.max_output_tokens,
        max_time_s=body.max_time_s or 0.0,
        prefixes=PrefixChoice.of(body),
        num_logprobs=body.num_logprobs,
        tools=tools if choice.may_call else (),
        one_call=one_call,
        form=call_form(choice, tools, response_format(text_format, "text.format"), only_one=one_call),
        template_options=template_options(
            tokenizer, effort=_effort(body.reasoning or {}), effort_param="reasoning.effort"
        ),
        strip_thinking=services.config.strip_thinking,
        param="input",
        pixels=PixelBounds.of(body),
        frames=FrameWish.of(body),
    )
    return ResponsesJob(job, turns, items)


def _check(body: ResponsesRequest) -> None:
    text = body.text or {}
    if text.get("verbosity") not in (None, "medium"):
        raise invalid(
            "'text.verbosity' is not supported here: the model has no such setting.",
            param="text.verbosity",
            code="unsupported_parameter",
        )
    for at, name in enumerate(body.include or ()):
        if name not in _INCLUDES:
            raise invalid(f"Invalid 'include[{at}]'.", param=f"include[{at}]")


def _effort(reasoning: dict[str, Any]) -> str | None:
    """`summary` asks for less than is given: the reasoning itself is in the answer."""
    effort = reasoning.get("effort")
    if effort is not None and not isinstance(effort, str):
        raise invalid("Invalid 'reasoning.effort'.", param="reasoning.effort")
    return effort


def _tools(tokenizer: ModelTokenizer, body: ResponsesRequest) -> tuple[dict[str, Any], ...]:
    if body.tools:
        require_tools(tokenizer, "tools")
    tools = []
    for at, tool in enumerate(body.tools or ()):
        if tool.get("type") != "function":
            raise invalid(
                f"'tools[{at}].type' is {str(tool.get('type'))[:40]!r}; only tools of type 'function' are "
                "supported here.",
                param=f"tools[{at}].type",
                code="unsupported_parameter",
            )
        tools.append(function_tool(tool, f"tools[{at}]"))
    return tuple(tools)


# ---------------------------------------------------------------- items


def item_turns(
    tokenizer: ModelTokenizer, items: list[dict[str, Any]], parts: PartReader
) -> list[dict[str, Any]]:
    """An assistant's reasoning, text and calls are several items and one turn. Raises ApiError 400."""
    turns: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for at, item in enumerate(items):
        param = f"input[{at}]"
        match item.get("type", "message"):
            case "message":
                turns.append(_message(item, param, parts))
            case "reasoning":
                name = "content" if item.get("content") else "summary"
                said = _parts(item.get(name), f"{param}.{name}") or ()
                thoughts += [str(part.get("text") or "") for part in said if isinstance(part, dict)]
                continue
            case "function_call":
                _add_call(turns, item, param)
            case "function_call_output":
                content = parts.openai(_parts(item.get("output"), f"{param}.output"), f"{param}.output")
                call_id = str(item.get("call_id", ""))
                turns.append({"role": "tool", "content": content, "tool_call_id": call_id})
            case other:
                raise invalid(
                    f"'{param}.type' is {str(other)[:40]!r}, which is not supported here.",
                    param=f"{param}.type",
                    code="unsupported_parameter",
                )
        if thoughts and turns[-1]["role"] == "assistant":
            turns[-1] |= earlier_reasoning("\n".join(thoughts), tokenizer)
            thoughts = []
    return turns


def _message(item: dict[str, Any], param: str, parts: PartReader) -> dict[str, Any]:
    given = item.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        raise invalid(f"Invalid '{param}.role': {', '.join(_ROLES)}.", param=f"{param}.role")
    content = _parts(item.get("content"), f"{param}.content")
    return {
        "role": role,
        "content": parts.openai(content, f"{param}.content", may_show=role == "user"),
    }


def _parts(content: Any, param: str) -> str | list[dict[str, Any]] | None:
    if isinstance(content, list) and not all(isinstance(part, dict) for part in content):
        raise invalid(f"Invalid '{param}': a string or a list of parts.", param=param)
    if content is not None and not isinstance(content, str | list):
        raise invalid(f"Invalid '{param}': a string or a list of parts.", param=param)
    return content


def _add_call(turns: list[dict[str, Any]], item: dict[str, Any], param: str) -> None:
    name, arguments = item.get("name"), item.get("arguments", "{}")
    if not isinstance(name, str) or not isinstance(arguments, str):
        raise invalid(f"Invalid '{param}': a function_call has a name and arguments as text.", param=param)
    call = with_arguments_read(
        {
            "id": str(item.get("call_id", "")),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
    )
    if not turns or turns[-1]["role"] != "assistant":
        turns.append({"role": "assistant", "content": ""})
    turns[-1].setdefault("tool_calls", []).append(call)
