"""Ollama's /api/chat and /api/generate as a common request."""

from __future__ import annotations

import dataclasses
import uuid
from typing import Any

from mlx_mesh.mesh.messages import SamplingParams
from mlx_mesh.proxy.convert.common import ChatJob, Prepared, Room, Sequences, prepare, prepare_chat
from mlx_mesh.proxy.convert.prefixes import PrefixChoice
from mlx_mesh.proxy.convert.sampling import new_seed
from mlx_mesh.proxy.convert.structure import Form, form_of, grammar_of, json_format
from mlx_mesh.proxy.convert.thinking import template_options
from mlx_mesh.proxy.convert.tools import Choice, call_form, read_tools
from mlx_mesh.proxy.convert.turns import earlier_reasoning
from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.markup import Markup, Region
from mlx_mesh.proxy.media.frame_wish import FrameWish
from mlx_mesh.proxy.media.pixels import PixelBounds
from mlx_mesh.proxy.schemas.fields import parse
from mlx_mesh.proxy.schemas.ollama import (
    OPTION_FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaMessage,
    OllamaOptions,
    OllamaRequest,
)
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import ModelTokenizer, PromptTooLong

_ROLES = ("system", "user", "assistant", "tool")

_MAX_PENALTY_TOKENS = 4096


async def prepare_ollama_chat(services: Services, body: OllamaChatRequest) -> Prepared:
    """Raises ApiError 400 naming the field, and the tokenizer's errors."""
    turns = _turns(services, body.messages)
    tools = read_tools(services.tokenizer, body.tools)
    form = call_form(Choice(), tools, json_format(body.format), only_one=False)
    return await prepare_chat(services, _job(services, body, turns, tools, form))


async def prepare_ollama_generate(services: Services, body: OllamaGenerateRequest) -> Prepared:
    """`raw`: the prompt as it is; else one turn of a conversation."""
    content = services.media.parts.ollama(body.prompt, body.images, "images")
    form = form_of(json_format(body.format))
    if not body.raw:
        turns = [{"role": "system", "content": body.system}] if body.system else []
        turn = {"role": "user", "content": content}
        return await prepare_chat(services, _job(services, body, [*turns, turn], (), form))
    if body.images:
        raise invalid("'images' cannot be put into a raw prompt.", param="images")
    if body.system:
        raise invalid("'system' cannot be put into a raw prompt.", param="system")
    room = Room.of(services)
    try:
        ids = await services.tokenizer.encode(body.prompt, limit=room.num_tokens)
    except PromptTooLong as error:
        raise room.too_long(error.at_least, "prompt") from error
    grammar = await grammar_of(services, form, Markup(), Region.ANSWER)
    sequences = _sequences(services, body)
    return prepare(services, sequences, [ids], "prompt", continues_prompt=True, grammar=grammar)


def _sequences(services: Services, body: OllamaRequest) -> Sequences:
    try:
        options = parse(OPTION_FIELDS, OllamaOptions, body.options)
    except ApiError as error:
        raise ApiError(
            error.status, f"options: {error}", code=error.code, param=f"options.{error.param}"
        ) from error
    if options.num_predict == 0:
        raise invalid("Invalid 'options.num_predict': at least 1, or below 0.", param="options.num_predict")
    look_back = _MAX_PENALTY_TOKENS if options.repeat_last_n == -1 else options.repeat_last_n
    return Sequences(
        id=f"ollama-{uuid.uuid4().hex}",
        sampling=SamplingParams(
            temperature=0.0 if options.top_p == 0 else options.temperature,
            top_p=options.top_p or 1.0,
            top_k=max(options.top_k, 0),
            min_p=options.min_p,
            repetition_penalty=options.repeat_penalty if look_back else 1.0,
            repetition_context_size=min(look_back, _MAX_PENALTY_TOKENS) or 1,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            seed=new_seed() if options.seed == -1 else options.seed,
        ),
        max_tokens=options.num_predict if options.num_predict > 0 else None,
        stop_strings=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop or ()),
        num_logprobs=body.num_logprobs,
        max_time_s=body.max_time_s,
        prefixes=PrefixChoice.of(body),
    )


def _job(
    services: Services,
    body: OllamaRequest,
    turns: list[dict[str, Any]],
    tools: tuple[dict[str, Any], ...],
    form: Form,
) -> ChatJob:
    sequences = _sequences(services, body)
    fields = {field.name: getattr(sequences, field.name) for field in dataclasses.fields(sequences)}
    fields["form"] = form
    strip = services.config.strip_thinking if body.think is None else body.think is False
    return ChatJob(
        **fields,
        messages=turns,
        tools=tools,
        template_options=_think(services.tokenizer, body.think),
        strip_thinking=strip,
        pixels=PixelBounds.of(body),
        frames=FrameWish.of(body),
    )


def _think(tokenizer: ModelTokenizer, think: bool | str | None) -> dict[str, Any]:
    if think is None:
        return {}
    if isinstance(think, str):
        return template_options(tokenizer, effort=think, effort_param="think")
    return template_options(tokenizer, enable_thinking=think, switch_param="think")


# ---------------------------------------------------------------- turns


def _turns(services: Services, messages: list[OllamaMessage]) -> list[dict[str, Any]]:
    """Ollama's calls have no ids: they are numbered, and results take those of their function in order."""
    turns: list[dict[str, Any]] = []
    open_calls: list[tuple[str, str]] = []  # id and name, not answered yet
    num_calls = 0
    for at, message in enumerate(messages):
        param = f"messages[{at}]"
        if message.role not in _ROLES:
            raise invalid(f"Invalid '{param}.role': {', '.join(_ROLES)}.", param=f"{param}.role")
        content = services.media.parts.ollama(
            message.content or "",
            message.images or [],
            f"{param}.images",
            may_show=message.role in ("user", "tool"),
        )
        turn: dict[str, Any] = {"role": message.role, "content": content}
        if message.thinking:
            turn |= earlier_reasoning(message.thinking, services.tokenizer)
        if message.tool_calls:
            calls = [
                _call(call, f"call_{num_calls + number}", f"{param}.tool_calls[{number}]")
                for number, call in enumerate(message.tool_calls)
            ]
            num_calls += len(calls)
            open_calls += [(call["id"], call["function"]["name"]) for call in calls]
            turn["tool_calls"] = calls
        if message.role == "tool":
            turn |= _answered(message, open_calls)
        turns.append(turn)
    return turns


def _call(call: dict[str, Any], call_id: str, param: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise invalid(f"Invalid '{param}': a call has a function with a name.", param=param)
    arguments = function.get("arguments")
    if not isinstance(arguments, dict | None):
        raise invalid(
            f"Invalid '{param}.function.arguments': an object.", param=f"{param}.function.arguments"
        )
    return {
        "id": str(call.get("id") or call_id),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments or {}},
    }


def _answered(message: OllamaMessage, open_calls: list[tuple[str, str]]) -> dict[str, Any]:
    for at, (call_id, name) in enumerate(open_calls):
        if message.tool_call_id in (None, call_id) and message.tool_name in (None, name):
            del open_calls[at]
            return {"tool_call_id": call_id, "name": name}
    return {"name": message.tool_name} if message.tool_name else {}
