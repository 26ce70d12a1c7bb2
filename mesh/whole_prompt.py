"""How long a prompt may be that is read in one forward, by what memory is left for it. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mlx_mesh.mesh.kv_budget import BLOCK_TOKENS, KvBudget

LONGEST = 32_768
"""Tokens, where no memory limit is known."""

# Measured in float32 on the CPU: 5.3 of the first, 6.7 of the second, and the scores once. A model in 16 bits
# needs about half.
_WIDE_COPIES = 6  # hidden states and what the largest block makes of them, at one time
_STREAM_COPIES = 7  # the same where hidden states are kept several times over (gemma3n)
_LOGIT_COPIES = 4  # their cap, and what sampling makes of them
_NUMBER_BYTES = 4


@dataclass(frozen=True, slots=True)
class Widths:
    """Of a text part."""

    hidden: int
    inner: int
    heads: int
    vocabulary: int
    streams: int = 0  # copies of the hidden states that go from layer to layer, if more than one

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Widths:
        """From a model's config; what it does not say is taken for what large models have."""
        text = config.get("text_config")
        owners = (text if isinstance(text, dict) else {}, config)

        def say(name: str, otherwise: int) -> int:
            for owner in owners:
                value = owner.get(name)
                value = max(value) if isinstance(value, list) and value else value
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
            return otherwise

        hidden = say("hidden_size", 8192)
        return cls(
            hidden,
            say("intermediate_size", 4 * hidden),
            say("num_attention_heads", 64),
            say("vocab_size", 262_144),
            say("altup_num_inputs", 0),
        )

    def bytes_of(self, num_tokens: int) -> int:
        """What one forward over so many tokens has at one time beside weights and caches: wide rows, scores
        of all pairs in one layer, logits of the last token."""
        wide = _WIDE_COPIES * (self.hidden + self.inner) + _STREAM_COPIES * self.streams * self.hidden
        pairs = self.heads * num_tokens**2
        return _NUMBER_BYTES * (num_tokens * wide + pairs + _LOGIT_COPIES * self.vocabulary)


def longest_in_one_piece(kv: KvBudget, widths: Widths) -> int:
    """Tokens of the longest prompt that every rank has memory for: its keys and values, and the forward. A
    whole number of blocks, 0 when not even one fits."""
    limited = [rank for rank in kv.ranks if rank.budget_bytes is not None]
    if not limited:
        return LONGEST
    fits, too_many = 0, LONGEST // BLOCK_TOKENS + 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        taken = (widths.bytes_of(middle * BLOCK_TOKENS),) * len(kv.ranks)
        if kv.short(1, middle * BLOCK_TOKENS, taken) is None:
            fits = middle
        else:
            too_many = middle
    return fits * BLOCK_TOKENS
