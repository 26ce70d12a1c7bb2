"""The body of /v1/completions."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.schemas.common import (
    FILTERS_THAT_ARE_NOT,
    MAX_CHOICES,
    MAX_TOP_LOGPROBS,
    SamplingFields,
)
from mlx_mesh.proxy.schemas.fields import FieldPolicy, Refused

MAX_PROMPTS = 64

Prompt = str | tuple[int, ...]


class CompletionRequest(SamplingFields):
    prompt: Any  # checked by `prompts`: a union over a million token ids costs a million error records
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    best_of: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
    echo: bool | None = None
    return_token_ids: bool | None = None  # vLLM's name for it

    @property
    def picks_best(self) -> bool:
        """More are generated than are given out."""
        return self.best_of is not None and self.best_of > (self.n or 1)

    @property
    def prompts(self) -> tuple[Prompt, ...]:
        """One entry per choice of the answer: text, or token ids. Raises ApiError 400."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return (prompt,)
        if not isinstance(prompt, list) or not prompt:
            raise _bad_prompt("prompt")
        if all(type(part) is int for part in prompt):
            return (_token_ids(prompt, "prompt"),)
        if len(prompt) > MAX_PROMPTS:
            raise invalid(f"Invalid 'prompt': at most {MAX_PROMPTS} prompts in one request.", param="prompt")
        is_text = isinstance(prompt[0], str)
        return tuple(
            _text(part, f"prompt[{at}]") if is_text else _token_ids(part, f"prompt[{at}]")
            for at, part in enumerate(prompt)
        )


def _text(part: Any, param: str) -> str:
    if not isinstance(part, str):
        raise _bad_prompt(param)
    return part


def _token_ids(part: Any, param: str) -> tuple[int, ...]:
    if not isinstance(part, list) or not part or not all(type(i) is int and i >= 0 for i in part):
        raise _bad_prompt(param)
    return tuple(part)


def _bad_prompt(param: str) -> ApiError:
    message = (
        f"Invalid '{param}': a prompt is a string, a list of strings, a list of token ids, "
        "or a list of such lists; not a mixture, and none of them empty lists."
    )
    return invalid(message, param=param)


COMPLETION_FIELDS = FieldPolicy(
    body=CompletionRequest,
    refused={
        "suffix": Refused("text is only continued, never filled in.", ("",)),
        **FILTERS_THAT_ARE_NOT,
    },
    ignored={"user": "there are no per-user accounts or limits"},
)
