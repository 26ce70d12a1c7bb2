"""Sampling fields of the OpenAI endpoints as the engine reads them."""

from __future__ import annotations

import secrets
from typing import TypeVar

from mlx_mesh.mesh.messages import SamplingParams
from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.schemas.common import CoreSampling
from mlx_mesh.proxy.tokenizer import ModelTokenizer

T = TypeVar("T")


def sampling_params(body: CoreSampling, tokenizer: ModelTokenizer) -> SamplingParams:
    """OpenAI's defaults where nothing is given, and a random seed. Raises ApiError 400."""
    defaults = SamplingParams()
    temperature = given(body.temperature, defaults.temperature)
    top_p = given(body.top_p, defaults.top_p)
    if top_p == 0:  # only the most probable token is left
        temperature, top_p = 0.0, 1.0
    return SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=max(given(body.top_k, defaults.top_k), 0),  # -1 = off, as elsewhere
        min_p=given(body.min_p, defaults.min_p),
        repetition_penalty=given(body.repetition_penalty, defaults.repetition_penalty),
        repetition_context_size=given(body.repetition_context_size, defaults.repetition_context_size),
        presence_penalty=given(body.presence_penalty, defaults.presence_penalty),
        frequency_penalty=given(body.frequency_penalty, defaults.frequency_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}, tokenizer.vocab_size),
        xtc_probability=given(body.xtc_probability, defaults.xtc_probability),
        xtc_threshold=given(body.xtc_threshold, defaults.xtc_threshold),
        xtc_kept=(*tokenizer.end_token_ids, *tokenizer.plain_ids("\n")) if body.xtc_probability else (),
        seed=new_seed() if body.seed is None else body.seed,
    )


def new_seed() -> int:
    return secrets.randbits(63)


def given(value: T | None, default: T) -> T:
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
