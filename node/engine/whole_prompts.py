"""Prompts that are read in one forward, under a generator that reads prompts in chunks.

In some families a token of a prompt sees later ones. At the first chunk of such a prompt the model gets the
whole prompt; the chunks that follow are answered from what that gave, the last one with the logits of the
last token. So the generator, its batches and its schedule stay what they are. Logits of other tokens are
never made: for a whole prompt they would be the largest array of all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlx_mesh.node.engine.row_media import RowMedia


def has_no_chunks(whole: Any, ids: list[int], inputs: dict[str, Any]) -> bool:
    """Whether mlx-vlm itself reads this prompt of a model (with its towers) in one piece."""
    models = (whole, whole.language_model)
    for model in models:
        policy = getattr(model, "chunked_prefill_policy", None)
        if callable(policy):
            found = policy(input_ids=mx.array([ids]), prefill_kwargs=inputs)
            return not getattr(found, "enabled", found)
    return any(getattr(model, "no_chunked_prefill", False) for model in models)


class _LastAlone(nn.Module):  # type: ignore[misc]
    """A norm of each token by itself, of the last one only."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.norm = norm

    def __call__(self, x: Any) -> Any:
        return self.norm(x[:, -1:])


@contextlib.contextmanager
def last_logits_alone(language_model: Any) -> Iterator[None]:
    """Meanwhile the model's head gets the last token alone. mlx-vlm's models that need it (gemma, gemma3n and
    gemma4) end with the same two: `model.norm`, and the embedding as head."""
    owner = language_model.model
    norm = owner.norm
    owner.norm = _LastAlone(norm)
    try:
        yield
    finally:
        owner.norm = norm


@dataclass(slots=True, eq=False)
class WholeRow:
    """Of a row whose prompt is read whole: its ids, what the last of them gave, and how many the generator
    has asked for."""

    ids: tuple[int, ...]
    num_asked: int = 0
    logits: Any = None  # (1, 1, vocabulary)

    def __deepcopy__(self, memo: dict[int, Any]) -> WholeRow:
        return self  # the generator copies batches to split them: the row goes on in one of the parts


class WholePrompts:
    """In front of a model that may have such prompts, for the generator."""

    def __init__(self, model: Any) -> None:
        self.model = model

    @property
    def layers(self) -> Any:
        return self.model.layers

    def make_cache(self) -> list[Any]:
        return list(self.model.make_cache())

    def __call__(self, tokens: Any, cache: list[Any] | None = None) -> Any:
        """As the model."""
        media = cache[-1] if cache else None
        row = media.whole[0] if isinstance(media, RowMedia) and len(media.whole) == 1 else None
        if row is None:
            return self.model(tokens, cache=cache)
        assert media is not None
        length = tokens.shape[1]
        if row.num_asked == 0:
            with last_logits_alone(self.model.language_model):
                row.logits = self.model(mx.array([row.ids]), cache=cache)[:, -1:]
        row.num_asked += length
        if row.num_asked > len(row.ids):
            raise ValueError("a prompt that is read whole has a chunk that goes beyond it")
        logits = mx.broadcast_to(row.logits, (1, length, row.logits.shape[-1]))
        if row.num_asked == len(row.ids):
            media.whole = [None]
        return logits
