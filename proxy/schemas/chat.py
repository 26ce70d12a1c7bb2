"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Any

import pydantic
from pydantic import ConfigDict, Field

from mlx_mesh.proxy.schemas.common import MAX_TOP_LOGPROBS, SamplingFields
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


class ChatRequest(SamplingFields):
    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)  # needs logprobs

    @property
    def num_logprobs(self) -> int | None:
        """None = none wanted; k = the chosen token and the k best."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


_NO_TOOLS = "this version calls no tools; tool messages in the conversation are passed to the template."

CHAT_FIELDS = FieldPolicy(
    body=ChatRequest,
    refused={
        "n": Refused("one choice is generated; send the request n times with different seeds.", (1,)),
        "tools": Refused(_NO_TOOLS, ([],)),
        "tool_choice": Refused(_NO_TOOLS, ("none", "auto")),
        "functions": Refused(_NO_TOOLS, ([],)),
        "function_call": Refused(_NO_TOOLS, ("none", "auto")),
        "response_format": Refused("output is not constrained; only plain text.", ({"type": "text"},)),
        "modalities": Refused("only text is produced.", (["text"],)),
        "audio": Refused("only text is produced."),
        "reasoning_effort": Refused("reasoning is neither controlled nor split off."),
        "verbosity": Refused("the model has no such setting.", ("medium",)),
        "web_search_options": Refused("there is no web search."),
        "moderation": Refused("nothing is moderated."),
    },
    ignored={
        "user": "there are no per-user accounts or limits",
        "safety_identifier": "there are no per-user accounts or limits",
        "metadata": "nothing is stored",
        "store": "nothing is stored",
        "service_tier": "there is one tier",
        "parallel_tool_calls": "without tools it says nothing",
        "prediction": "a hint for speed; the answer is the same",
        "prompt_cache_key": "a hint for speed; the answer is the same",
        "prompt_cache_options": "a hint for speed; the answer is the same",
        "prompt_cache_retention": "a hint for speed; the answer is the same",
    },
)
