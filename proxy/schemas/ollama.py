"""The bodies of Ollama's /api/chat and /api/generate."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, Field

from mlx_mesh.proxy.schemas.common import (
    MAX_SALT_CHARS,
    MAX_STOPS,
    MAX_TOP_LOGPROBS,
    PixelFields,
    StopString,
    Strict,
)
from mlx_mesh.proxy.schemas.fields import FieldPolicy, Refused


class OllamaOptions(Strict):
    """Ollama's own defaults, which differ from OpenAI's. `seed` -1 = random; `num_predict` below 0 = what
    the context leaves; `repeat_last_n` 0 = no penalty, -1 = as far back as possible."""

    temperature: float = Field(default=0.8, ge=0, le=2, allow_inf_nan=False)
    top_k: int = Field(default=40, ge=-1)
    top_p: float = Field(default=0.9, ge=0, le=1, allow_inf_nan=False)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    repeat_penalty: float = Field(default=1.1, gt=0, le=10, allow_inf_nan=False)
    repeat_last_n: int = Field(default=64, ge=-1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    seed: int = Field(default=-1, ge=-(2**63), lt=2**63)
    num_predict: int = Field(default=-1, ge=-2)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None


_HOST = "how the model is run is decided when the mesh starts"

OPTION_FIELDS = FieldPolicy(
    body=OllamaOptions,
    refused={
        "typical_p": Refused("this filter does not exist here.", (1.0, 1)),
        "tfs_z": Refused("this filter does not exist here.", (1.0, 1)),
        "mirostat": Refused("this sampler does not exist here.", (0,)),
        "penalize_newline": Refused("penalties make no exception.", (True,)),
    },
    ignored={
        "num_ctx": "the context is the model's",
        "num_keep": "nothing of a prompt is left out",
        "mirostat_tau": "without mirostat it says nothing",
        "mirostat_eta": "without mirostat it says nothing",
        **dict.fromkeys(
            (
                "numa",
                "num_batch",
                "num_gpu",
                "main_gpu",
                "low_vram",
                "f16_kv",
                "logits_all",
                "vocab_only",
                "use_mmap",
                "use_mlock",
                "embedding_only",
                "num_thread",
            ),
            _HOST,
        ),
    },
)


class OllamaRequest(PixelFields):
    """What both have. They stream unless told otherwise."""

    model: str = Field(min_length=1)
    stream: bool = True
    options: dict[str, Any] = Field(default_factory=dict)
    think: bool | str | None = None
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    max_time_s: float = Field(default=0.0, gt=0, allow_inf_nan=False)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARS)
    skip_prefix_cache: bool | None = None
    format: str | dict[str, Any] | None = None  # "json", or a JSON schema

    @property
    def num_logprobs(self) -> int | None:
        return self.top_logprobs if self.logprobs else None


class OllamaMessage(pydantic.BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", frozen=True, hide_input_in_errors=True)

    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None  # base64; checked in `convert`, which can name the item
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaChatRequest(OllamaRequest):
    messages: list[OllamaMessage] = Field(default_factory=list)
    tools: list[dict[str, Any]] = Field(default_factory=list)


class OllamaGenerateRequest(OllamaRequest):
    prompt: str = ""
    system: str = ""
    raw: bool = False
    images: list[Any] = Field(default_factory=list)  # base64; checked in `convert`


_IGNORED = {"keep_alive": "the model stays loaded as long as the mesh runs"}

OLLAMA_CHAT_FIELDS = FieldPolicy(body=OllamaChatRequest, refused={}, ignored=_IGNORED)
OLLAMA_GENERATE_FIELDS = FieldPolicy(
    body=OllamaGenerateRequest,
    refused={
        "suffix": Refused("text is only continued, never filled in.", ("",)),
        "template": Refused("the mesh has one template.", ("",)),
        "context": Refused("send the conversation to /api/chat.", ([],)),
        "width": Refused("only text is produced.", (0,)),
        "height": Refused("only text is produced.", (0,)),
        "steps": Refused("only text is produced.", (0,)),
    },
    ignored=_IGNORED,
)
