"""BERT's encoder, which mlx-lm does not have: the architecture of most small embedding models.

Names and shapes are those of the published weights. Attention sees all tokens of a text, and no padding.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

Weights = dict[str, Any]


class SelfAttention(nn.Module):  # type: ignore[misc]
    def __init__(self, size: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.query = nn.Linear(size, size)
        self.key = nn.Linear(size, size)
        self.value = nn.Linear(size, size)

    def __call__(self, x: Any, mask: Any) -> Any:
        """(B, L, D) and an additive mask (B, 1, 1, L) to (B, L, D)."""
        batch, length, size = x.shape
        heads = (batch, length, self._num_heads, -1)
        queries, keys, values = (
            part(x).reshape(heads).transpose(0, 2, 1, 3) for part in (self.query, self.key, self.value)
        )
        scale = (size // self._num_heads) ** -0.5
        mixed = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)
        return mixed.transpose(0, 2, 1, 3).reshape(batch, length, size)


class AddAndNorm(nn.Module):  # type: ignore[misc]
    def __init__(self, size_in: int, size: int, epsilon: float) -> None:
        super().__init__()
        self.dense = nn.Linear(size_in, size)
        self.LayerNorm = nn.LayerNorm(size, eps=epsilon)

    def __call__(self, x: Any, residual: Any) -> Any:
        return self.LayerNorm(self.dense(x) + residual)


class Layer(nn.Module):  # type: ignore[misc]
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size, inner, epsilon = (
            config["hidden_size"],
            config["intermediate_size"],
            config.get("layer_norm_eps", 1e-12),
        )
        self.attention = nn.Module()
        self.attention.self = SelfAttention(size, config["num_attention_heads"])
        self.attention.output = AddAndNorm(size, size, epsilon)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(size, inner)
        self.output = AddAndNorm(inner, size, epsilon)

    def __call__(self, x: Any, mask: Any) -> Any:
        x = self.attention.output(self.attention.self(x, mask), x)
        return self.output(nn.gelu(self.intermediate.dense(x)), x)


class Bert(nn.Module):  # type: ignore[misc]
    """Token ids (B, L) and which of them count (B, L) to hidden states (B, L, D)."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        size = config["hidden_size"]
        self.embeddings = nn.Module()
        self.embeddings.word_embeddings = nn.Embedding(config["vocab_size"], size)
        self.embeddings.position_embeddings = nn.Embedding(config["max_position_embeddings"], size)
        self.embeddings.token_type_embeddings = nn.Embedding(config.get("type_vocab_size", 2), size)
        self.embeddings.LayerNorm = nn.LayerNorm(size, eps=config.get("layer_norm_eps", 1e-12))
        self.encoder = nn.Module()
        self.encoder.layer = [Layer(config) for _ in range(config["num_hidden_layers"])]

    def __call__(self, ids: Any, counts: Any) -> Any:
        parts = self.embeddings
        x = parts.word_embeddings(ids)
        x = x + parts.position_embeddings(mx.arange(ids.shape[1])) + parts.token_type_embeddings(mx.array(0))
        x = parts.LayerNorm(x)
        mask = mx.where(counts[:, None, None, :], 0, mx.finfo(x.dtype).min).astype(x.dtype)
        for layer in self.encoder.layer:
            x = layer(x, mask)
        return x


def rename(weights: Weights) -> Weights:
    """As this module calls them; the pooler and the heads of other tasks are left out."""
    renamed = {name.removeprefix("bert."): array for name, array in weights.items()}
    return {
        name: array
        for name, array in renamed.items()
        if name.startswith(("embeddings.", "encoder.")) and not name.endswith("position_ids")
    }
