"""The body of /v1/responses."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mlx_mesh.proxy.schemas.common import MAX_TOP_LOGPROBS, CoreSampling, PixelFields, StreamOptions
from mlx_mesh.proxy.schemas.fields import FieldPolicy, Refused


class ResponsesRequest(CoreSampling, PixelFields):
    input: str | list[dict[str, Any]]  # items are checked in `convert`, which can name the item
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    include: list[str] | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    stream_options: StreamOptions | None = None
    metadata: dict[str, Any] | None = None  # comes back in the answer
    user: str | None = None  # comes back in the answer

    @property
    def num_logprobs(self) -> int | None:
        """None = none wanted."""
        wanted = "message.output_text.logprobs" in (self.include or ()) or self.top_logprobs
        return (self.top_logprobs or 0) if wanted else None


RESPONSES_FIELDS = FieldPolicy(
    body=ResponsesRequest,
    refused={
        "background": Refused("answers are generated while the client waits.", (False,)),
        "background_options": Refused("answers are generated while the client waits."),
        "conversation": Refused("use previous_response_id, or send the items."),
        "context_management": Refused("nothing of a conversation is left out.", ([],)),
        "image": Refused("only text is produced."),
        "moderation": Refused("nothing is moderated."),
        "prompt": Refused("no prompts are stored here."),
        "truncation": Refused("nothing of a conversation is left out.", ("disabled",)),
        "personality": Refused("the model has the one that its prompt gives it."),
        "access_programs": Refused("there are no such programs."),
    },
    ignored={
        "max_tool_calls": "it limits built-in tools, of which there are none",
        "safety_identifier": "there are no per-user accounts or limits",
        "service_tier": "there is one tier",
        "prompt_cache_key": "a hint for speed; the answer is the same",
        "prompt_cache_options": "a hint for speed; the answer is the same",
        "prompt_cache_retention": "a hint for speed; the answer is the same",
    },
)
