"""Log probabilities in OpenAI's two shapes: chat (with bytes) and legacy completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_mesh.proxy.pieces import TokenSpan
from mlx_mesh.proxy.tokenizer import ModelTokenizer

MINIMUM = -9999.0
"""OpenAI's value for a probability of zero; JSON has no infinity."""


def token_text(raw: bytes) -> str:
    """A token alone as text; one that is a part of a character as `bytes:\\xe2\\x98`."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: ModelTokenizer, tokens: Sequence[TokenSpan]) -> dict[str, Any]:
    """`choices[].logprobs` of chat completions."""
    content: list[dict[str, Any]] = []
    for token in tokens:
        entry = _entry(tokenizer, token.token_id, token.logprobs.logprob if token.logprobs else MINIMUM)
        top = token.logprobs.top if token.logprobs else ()
        entry["top_logprobs"] = [_entry(tokenizer, token_id, logprob) for token_id, logprob in top]
        content.append(entry)
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: ModelTokenizer, tokens: Sequence[TokenSpan]) -> dict[str, Any]:
    """`choices[].logprobs` of completions."""
    return {
        "tokens": [_text(tokenizer, token.token_id) for token in tokens],
        "token_logprobs": [_finite(token.logprobs.logprob) if token.logprobs else None for token in tokens],
        "top_logprobs": [
            {_text(tokenizer, token_id): _finite(logprob) for token_id, logprob in token.logprobs.top}
            if token.logprobs
            else None
            for token in tokens
        ],
        "text_offset": [token.start for token in tokens],
    }


def _entry(tokenizer: ModelTokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.raw_token_bytes(token_id)
    return {"token": token_text(raw), "logprob": _finite(logprob), "bytes": list(raw)}


def _text(tokenizer: ModelTokenizer, token_id: int) -> str:
    return token_text(tokenizer.raw_token_bytes(token_id))


def _finite(logprob: float) -> float:
    return logprob if logprob > MINIMUM else MINIMUM  # also for NaN
