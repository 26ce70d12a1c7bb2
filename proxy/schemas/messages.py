"""The bodies of Anthropic's /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, Field

from mlx_mesh.proxy.schemas.common import MAX_STOPS, CoreSampling, PixelFields, StopString
from mlx_mesh.proxy.schemas.fields import FieldPolicy, Refused

Blocks = str | list[dict[str, Any]]


class Turn(pydantic.BaseModel):
    """One message; its blocks are checked in `convert`, which can name the block."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    role: str
    content: Blocks


class Prompt(CoreSampling, PixelFields):
    """What makes the prompt."""

    messages: list[Turn] = Field(min_length=1)
    system: Blocks | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


class MessagesRequest(Prompt):
    max_tokens: int = Field(ge=1)
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None


class CountTokensRequest(Prompt):
    """Sampling fields are taken and say nothing about the count."""


_REFUSED = {
    "container": Refused("no code is run here."),
    "mcp_servers": Refused("the server calls no tools itself.", ([],)),
    "fallbacks": Refused("one model is served.", ([],)),
}
_IGNORED = {
    "cache_control": "a hint for speed; the answer is the same",
    "context_management": "the conversation is taken as it was sent",
    "diagnostics": "nothing is measured beyond usage",
    "inference_geo": "answers come from this mesh only",
    "metadata": "nothing is stored",
    "service_tier": "there is one tier",
    "speed": "there is one speed",
    "user_profile_id": "there are no per-user accounts or limits",
    "workspace_id": "there are no accounts",
    "betas": "what is known is served",
}

MESSAGES_FIELDS = FieldPolicy(body=MessagesRequest, refused=_REFUSED, ignored=_IGNORED)
COUNT_FIELDS = FieldPolicy(
    body=CountTokensRequest,
    refused=_REFUSED,
    ignored={
        **_IGNORED,
        "max_tokens": "it says nothing about the prompt",
        "stop_sequences": "they say nothing about the prompt",
    },
)
