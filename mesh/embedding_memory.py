"""What an embedding model needs beside its weights, from its configuration. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_TOKENS = 8192
"""Of one input, whatever the model says."""

BATCH_TOKENS = 2048
"""Of a batch with its padding, if it has more than one input."""

BASE_BYTES = 128 * 1024 * 1024
"""The process with MLX and the tokenizer."""

_FLOAT_BYTES = 4
_HIDDEN_COPIES = (
    12  # residual, queries, keys, values, what they give, norms; half of them wait for MLX's cache
)
_INNER_COPIES = 4  # before and after the activation, with a gate
_SCORE_COPIES = 1  # the softmax takes the place of what it is of


def max_tokens_of(config: Mapping[str, Any], said: Any) -> int:
    """Of one input; `said` is max_seq_length of sentence_bert_config.json, if there is one."""
    limits = [MAX_TOKENS, config.get("max_position_embeddings"), said]
    return min(limit for limit in limits if type(limit) is int and limit > 0)


def working_bytes(config: Mapping[str, Any], max_tokens: int, *, keeps_scores: bool) -> int:
    """Of the largest batch there can be. `keeps_scores`: attention makes the scores of all pairs of tokens,
    as it does on a CPU; GPUs never have them as a whole."""

    def number(name: str, default: int) -> int:
        value = config.get(name)
        return value if type(value) is int and value > 0 else default

    hidden = number("hidden_size", 1024)
    inner, heads = number("intermediate_size", 4 * hidden), number("num_attention_heads", 16)
    tokens = max(BATCH_TOKENS, max_tokens)
    activations = tokens * (_HIDDEN_COPIES * hidden + _INNER_COPIES * inner) * _FLOAT_BYTES
    # A batch of several inputs has fewer pairs than one long input, or than one that fills it.
    pairs = max(max_tokens * max_tokens, BATCH_TOKENS * min(BATCH_TOKENS, max_tokens))
    scores = _SCORE_COPIES * heads * pairs * _FLOAT_BYTES if keeps_scores else 0
    return BASE_BYTES + activations + scores
