"""/v1/chat/completions as a common request."""

from __future__ import annotations

import dataclasses
import uuid

from mlx_mesh.proxy.convert.common import ChatJob
from mlx_mesh.proxy.convert.prefixes import PrefixChoice
from mlx_mesh.proxy.convert.sampling import sampling_params
from mlx_mesh.proxy.convert.structure import wanted_form
from mlx_mesh.proxy.convert.thinking import budget, template_options
from mlx_mesh.proxy.convert.tools import call_form, read_choice, read_tools
from mlx_mesh.proxy.convert.turns import template_message
from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.media.frame_wish import FrameWish
from mlx_mesh.proxy.media.pixels import PixelBounds
from mlx_mesh.proxy.schemas.chat import ChatRequest
from mlx_mesh.proxy.services import Services


def chat_job(services: Services, body: ChatRequest) -> ChatJob:
    """Raises ApiError 400 naming the field."""
    tokenizer = services.tokenizer
    if body.top_logprobs and not body.logprobs:
        raise invalid("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
    tools = read_tools(tokenizer, body.tools or ())
    choice = read_choice(body.tool_choice, tools)
    one_call = body.parallel_tool_calls is False
    strip = services.config.strip_thinking if body.strip_thinking is None else body.strip_thinking
    return ChatJob(
        id=f"chatcmpl-{uuid.uuid4().hex}",
        messages=[
            template_message(message, f"messages[{at}]", tokenizer, services.media.parts)
            for at, message in enumerate(body.messages)
        ],
        sampling=sampling_params(body, tokenizer),
        max_tokens=body.token_limit,
        stop_strings=body.stop_strings,
        num_logprobs=body.num_logprobs,
        num_choices=body.n or 1,
        max_time_s=body.max_time_s or 0.0,
        prefixes=dataclasses.replace(PrefixChoice.of(body), is_reset=bool(body.reset_conversation)),
        tools=tools if choice.may_call else (),
        one_call=one_call,
        form=call_form(choice, tools, wanted_form(body), only_one=one_call),
        template_options=template_options(
            tokenizer,
            enable_thinking=body.enable_thinking,
            effort=body.reasoning_effort,
            more=body.chat_template_kwargs,
        ),
        strip_thinking=strip,
        thinking_budget=budget(tokenizer, body.thinking_limit, "thinking_budget"),
        pixels=PixelBounds.of(body),
        frames=FrameWish.of(body),
    )
