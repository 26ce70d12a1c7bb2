"""From a validated request body to the sequences that the coordinator generates."""

from __future__ import annotations

import json
import secrets
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mlx_mesh.mesh.messages import GenerateRequest, SamplingParams
from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.schemas.chat import ChatMessage, ChatRequest
from mlx_mesh.proxy.schemas.common import SamplingFields
from mlx_mesh.proxy.schemas.completions import CompletionRequest, Prompt
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import PromptTooLong

T = TypeVar("T")

CLAMPED_HEADER = "x-mlx-mesh-max-tokens-clamped"

UNKNOWN_CONTEXT_MAX_TOKENS = 4096
"""The default of max_tokens for a model that does not say how long its context is."""

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


@dataclass(frozen=True, slots=True)
class NewSequence:
    """One sequence to generate, and how its tokens become text."""

    request: GenerateRequest
    stop_strings: tuple[str, ...]
    prompt_tail: tuple[int, ...] = ()  # what the text continues


@dataclass(frozen=True, slots=True)
class Prepared:
    """All sequences of one HTTP request; `headers` tell the client of a clamp."""

    id: str
    sequences: tuple[NewSequence, ...]
    headers: dict[str, str] = field(default_factory=dict)


async def prepare_chat(services: Services, body: ChatRequest) -> Prepared:
    """Raises ApiError and the tokenizer's errors."""
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    messages = [template_message(message, f"messages[{at}]") for at, message in enumerate(body.messages)]
    limit = services.client.readiness.context_length
    try:
        prompt_ids = await services.tokenizer.encode_chat(messages, limit=limit)
    except PromptTooLong as error:
        raise _too_long(error.at_least, limit, "messages") from error
    return _prepare(
        services,
        f"chatcmpl-{uuid.uuid4().hex}",
        body,
        [prompt_ids],
        body.token_limit,
        body.num_logprobs,
        "messages",
    )


async def prepare_completion(services: Services, body: CompletionRequest) -> Prepared:
    """Raises ApiError and the tokenizer's errors."""
    limit = services.client.readiness.context_length
    prompts: list[tuple[int, ...]] = []
    for prompt in body.prompts:
        try:
            prompts.append(await _completion_ids(services, prompt, limit))
        except PromptTooLong as error:
            raise _too_long(error.at_least, limit, "prompt") from error
    return _prepare(
        services,
        f"cmpl-{uuid.uuid4().hex}",
        body,
        prompts,
        body.max_tokens,
        body.logprobs,
        "prompt",
        continues_prompt=True,
    )


async def _completion_ids(services: Services, prompt: Prompt, limit: int) -> tuple[int, ...]:
    tokenizer = services.tokenizer
    if isinstance(prompt, str):
        ids = await tokenizer.encode(prompt, limit=limit)
        if not ids and tokenizer.bos_token_id is not None:
            ids = (tokenizer.bos_token_id,)
        if not ids:
            raise invalid(
                "The prompt is empty, and this model has no token to start a text with.", param="prompt"
            )
        return ids
    if (largest := max(prompt)) >= tokenizer.vocab_size:
        raise invalid(
            f"The prompt has token id {largest}; ids of this model are below {tokenizer.vocab_size}.",
            param="prompt",
        )
    return prompt


def _prepare(
    services: Services,
    answer_id: str,
    body: SamplingFields,
    prompts: Sequence[tuple[int, ...]],
    wanted_tokens: int | None,
    num_logprobs: int | None,
    prompt_param: str,
    continues_prompt: bool = False,
) -> Prepared:
    sampling = sampling_params(body, services.tokenizer.vocab_size)
    stop_strings = body.stop_strings
    special = [services.tokenizer.special_token_id(stop) for stop in stop_strings]
    end_ids = dict.fromkeys((*services.tokenizer.end_token_ids, *(i for i in special if i is not None)))
    context_length = services.client.readiness.context_length
    headers: dict[str, str] = {}
    sequences: list[NewSequence] = []
    for at, prompt_ids in enumerate(prompts):
        max_tokens = token_budget(len(prompt_ids), wanted_tokens, context_length, prompt_param)
        if wanted_tokens is not None and max_tokens < wanted_tokens:
            headers[CLAMPED_HEADER] = str(max_tokens)
        request = GenerateRequest(
            id=answer_id if len(prompts) == 1 else f"{answer_id}-{at}",
            prompt_ids=prompt_ids,
            max_tokens=max_tokens,
            sampling=sampling,
            stop_token_ids=tuple(end_ids),
            logprobs=num_logprobs,
        )
        sequences.append(NewSequence(request, stop_strings, prompt_ids if continues_prompt else ()))
    return Prepared(answer_id, tuple(sequences), headers)


def token_budget(num_prompt: int, wanted: int | None, context_length: int, param: str) -> int:
    """How many tokens may be generated: what was asked for, within the context. `context_length` 0 =
    unknown. Raises ApiError 400 when not even one fits."""
    if context_length <= 0:
        return wanted or UNKNOWN_CONTEXT_MAX_TOKENS
    left = context_length - num_prompt
    if left < 1:
        raise _too_long(num_prompt, context_length, param)
    return left if wanted is None else min(wanted, left)


def _too_long(num_prompt: int, context_length: int, param: str) -> ApiError:
    return invalid(
        f"This model's maximum context length is {context_length} tokens, and the prompt has {num_prompt} or "
        "more; at least one more is needed for the answer. Shorten the prompt.",
        param=param,
        code="context_length_exceeded",
    )


def sampling_params(body: SamplingFields, vocab_size: int) -> SamplingParams:
    """OpenAI's defaults where nothing is given, and a random seed. Raises ApiError 400."""
    defaults = SamplingParams()
    temperature = _given(body.temperature, defaults.temperature)
    top_p = _given(body.top_p, defaults.top_p)
    if top_p == 0:  # only the most probable token is left
        temperature, top_p = 0.0, 1.0
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(_given(body.top_k, defaults.top_k), 0),  # -1 = off, as elsewhere
        min_p=_given(body.min_p, defaults.min_p),
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        repetition_context_size=_given(body.repetition_context_size, defaults.repetition_context_size),
        presence_penalty=_given(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, defaults.frequency_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
    )


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _logit_bias(given: dict[str, float], vocab_size: int) -> dict[int, float]:
    bias: dict[int, float] = {}
    for key, value in given.items():
        is_number = key.isascii() and key.isdecimal() and len(key) < 12
        if not is_number or int(key) >= vocab_size:
            raise invalid(
                f"Invalid 'logit_bias': '{key[:40]}' is not one of this model's token ids, "
                f"0 to {vocab_size - 1}.",
                param="logit_bias",
            )
        bias[int(key)] = value
    return bias


# ---------------------------------------------------------------- messages


def template_message(message: ChatMessage, param: str) -> dict[str, Any]:
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
    turn: dict[str, Any] = {"role": role, "content": _text(message.content, f"{param}.content")}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [_with_arguments_read(call) for call in message.tool_calls]
    return turn


def _text(content: str | list[dict[str, Any]] | None, param: str) -> str:
    """Text parts, a line each."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for at, part in enumerate(content):
        kind = part.get("type", "text")
        text = part.get("refusal" if kind == "refusal" else "text")
        if kind not in ("text", "refusal"):
            raise invalid(
                f"'{param}[{at}]' has type {kind!r}; this model takes text only.",
                param=f"{param}[{at}]",
                code="unsupported_media",
            )
        if text is not None and not isinstance(text, str):
            raise invalid(f"Invalid '{param}[{at}].text': it must be a string.", param=f"{param}[{at}].text")
        texts.append(text or "")
    return "\n".join(texts)


def _with_arguments_read(call: dict[str, Any]) -> dict[str, Any]:
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
