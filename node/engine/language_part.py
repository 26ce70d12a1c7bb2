"""The language part of an mlx-vlm model, as a model of its own that rows of text and pictures share.

To the rest of the engine it is any language model: layers, caches, tokens in, logits out. It never relies on
what a model keeps on itself between calls: a chunk of a prompt with pictures gets that chunk's features, and
every other step gets explicit positions, so rows mix freely.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mesh.node.engine.features import clear_state
from mlx_mesh.node.engine.one_row import for_one_row
from mlx_mesh.node.engine.row_media import RowMedia


class LanguagePart(nn.Module):  # type: ignore[misc]
    """See the module. Its caches are the model's own and a RowMedia at the end."""

    reads_alone = True  # each prompt is read by itself, see RowMedia

    def __init__(self, language_model: Any, *, is_for_one_row: bool = False) -> None:
        """`is_for_one_row`: its caches are never joined with another row's."""
        super().__init__()
        self.language_model = language_model
        self.is_for_one_row = is_for_one_row

    @property
    def layers(self) -> list[Any]:
        return list(layers_of(self.language_model))

    def make_cache(self) -> list[Any]:
        from mlx_vlm.models.cache import KVCache

        own = getattr(self.language_model, "make_cache", None)
        caches = own() if own is not None else [KVCache() for _ in self.layers]
        if self.is_for_one_row:
            caches = [for_one_row(cache) for cache in caches]
        return [*caches, RowMedia()]

    def __call__(self, tokens: Any, cache: list[Any] | None = None) -> Any:
        """Logits (batch, length, vocabulary) of tokens (batch, length)."""
        clear_state(self.language_model)
        if cache is None:
            return self.language_model(tokens).logits
        *caches, media = cache
        inputs = self._inputs(media, *tokens.shape)
        media.advance(tokens.shape[1])
        media.let_go_of_read()
        out = self.language_model(tokens, cache=caches, **inputs)
        cache[:-1] = caches  # a model may have put others into the list that it got
        clear_state(self.language_model)
        return out.logits

    def _inputs(self, media: RowMedia, batch: int, length: int) -> dict[str, Any]:
        start = media.num_tokens[0]
        features = media.features[0]
        if features is not None and start < features.length:
            if batch != 1 or start + length > features.length:
                raise ValueError("a prompt with pictures is read alone, and its chunks end where it ends")
            return features.chunk(start, start + length)
        inputs = features.after() if features is not None and batch == 1 else {}
        if self._has_positions:
            first = mx.array([n + d for n, d in zip(media.num_tokens, media.deltas, strict=True)])
            positions = first[:, None] + mx.arange(length)[None]
            inputs["position_ids"] = mx.broadcast_to(positions[None], (3, batch, length))
        return inputs

    @property
    def _has_positions(self) -> bool:
        return hasattr(self.language_model, "_rope_deltas")


def layers_of(language_model: Any) -> Any:
    """The list of layers, wherever the family keeps it."""
    for owner in (language_model, getattr(language_model, "model", None)):
        for name in ("layers", "blocks"):
            found = getattr(owner, name, None)
            if found is not None:
                return found
    raise ValueError("the language part has no list of layers")
