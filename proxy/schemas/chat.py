"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import ConfigDict, Field

from mlx_mesh.proxy.schemas.common import (
    FILTERS_THAT_ARE_NOT,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    PixelFields,
    SamplingFields,
)
from mlx_mesh.proxy.schemas.fields import FieldPolicy, Refused


class ChatMessage(pydantic.BaseModel):
    """One turn. Clients send back what they were given, so fields that templates do not read are allowed
    here; null is absent. Content parts are checked in `convert`, which can name the part."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None  # refused by name in `convert`
    audio: dict[str, Any] | None = None  # refused by name in `convert`
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatRequest(SamplingFields, PixelFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)  # needs logprobs
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    tools: list[dict[str, Any]] | None = None  # checked in `convert`
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    strip_thinking: bool | None = None
    thinking_budget: int | None = Field(default=None, ge=0)
    thinking_token_budget: int | None = Field(default=None, ge=0)  # vLLM's name
    metadata: dict[str, Any] | None = None  # of it, conversation_id is read
    conversation_id: str | None = None
    conversation: str | None = None
    reset_conversation: bool | None = None

    @property
    def thinking_limit(self) -> int | None:
        return self.thinking_token_budget if self.thinking_budget is None else self.thinking_budget

    @property
    def num_logprobs(self) -> int | None:
        """None = none wanted; k = the chosen token and the k best."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


CHAT_FIELDS = FieldPolicy(
    body=ChatRequest,
    refused={
        "functions": Refused("use tools, the newer name.", ([],)),
        "function_call": Refused("use tool_choice, the newer name.", ("none", "auto")),
        "modalities": Refused("only text is produced.", (["text"],)),
        "audio": Refused("only text is produced."),
        "verbosity": Refused("the model has no such setting.", ("medium",)),
        "web_search_options": Refused("there is no web search."),
        "moderation": Refused("nothing is moderated."),
        **FILTERS_THAT_ARE_NOT,
    },
    ignored={
        "user": "there are no per-user accounts or limits",
        "safety_identifier": "there are no per-user accounts or limits",
        "store": "nothing is stored",
        "service_tier": "there is one tier",
        "prediction": "a hint for speed; the answer is the same",
        "prompt_cache_key": "a hint for speed; the answer is the same",
        "prompt_cache_options": "a hint for speed; the answer is the same",
        "prompt_cache_retention": "a hint for speed; the answer is the same",
    },
)
