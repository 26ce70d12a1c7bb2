"""What a row of a vision model carries from step to step beside its keys and values.

It stands at the end of the row's list of caches, so that whatever the generator does to rows (merge, extend,
filter, extract, trim) it does to this as well, and no step depends on what a model left on itself. All of it
is numbers on the host: nothing is computed to know where a row is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_mesh.node.engine.features import Features


def reads_alone(model: Any) -> bool:
    """Whether this is the language part of a vision model, whose prompts are never padded to be read
    together."""
    return bool(getattr(model, "reads_alone", False))


class RowMedia:
    """One entry per row of the batch: how many tokens its caches have, its prompt's features or None, and
    what a prompt needs that is read whole (see whole_prompts) or None."""

    def __init__(self, features: Features | None = None) -> None:
        self.num_tokens = [0]
        self.features: list[Features | None] = [features]
        self.whole: list[Any] = [None]

    @property
    def deltas(self) -> list[int]:
        """By row: how much positions are ahead of places."""
        return [0 if one is None else one.delta for one in self.features]

    def advance(self, num_tokens: int) -> None:
        self.num_tokens = [before + num_tokens for before in self.num_tokens]

    def let_go_of_read(self) -> None:
        """Of prompts that are read, keep only what every step needs."""
        self.features = [
            one.read() if one is not None and length >= one.length and one.has_more else one
            for one, length in zip(self.features, self.num_tokens, strict=True)
        ]

    @classmethod
    def merge(cls, parts: Sequence[RowMedia]) -> RowMedia:
        merged = cls()
        merged.num_tokens = [number for part in parts for number in part.num_tokens]
        merged.features = [one for part in parts for one in part.features]
        merged.whole = [one for part in parts for one in part.whole]
        return merged

    def extend(self, other: RowMedia) -> None:
        self.num_tokens = self.num_tokens + other.num_tokens
        self.features = self.features + other.features
        self.whole = self.whole + other.whole

    def filter(self, keep: Any) -> None:
        rows = [int(row) for row in (keep.tolist() if hasattr(keep, "tolist") else keep)]
        self.num_tokens = [self.num_tokens[row] for row in rows]
        self.features = [self.features[row] for row in rows]
        self.whole = [self.whole[row] for row in rows]

    def extract(self, row: int) -> RowMedia:
        alone = RowMedia(self.features[row])
        alone.num_tokens = [self.num_tokens[row]]
        alone.whole = [self.whole[row]]
        return alone

    def prepare(self, **_: Any) -> None:
        """Rows are never padded: each prompt is read alone."""

    def finalize(self) -> None:
        """See prepare."""

    def is_trimmable(self) -> bool:
        return True

    def trim(self, num_tokens: int) -> int:
        self.num_tokens = [before - num_tokens for before in self.num_tokens]
        return num_tokens

    def size(self) -> int:
        return max(self.num_tokens, default=0)

    def empty(self) -> bool:
        return not any(self.num_tokens)

    def let_go(self, tokens: Sequence[int]) -> Sequence[int]:
        """Of a row alone whose cache is kept: what its `tokens` are known by. The features are dropped: who
        begins with this cache brings its own."""
        (features,), self.features = self.features, [None]
        if features is None or not features.keys:
            return tokens
        return (*features.keys[: len(tokens)], *tokens[features.length :])

    @property
    def state(self) -> list[Any]:
        """No array of it is a step's to compute."""
        return []

    @state.setter
    def state(self, value: Any) -> None:
        assert not value, "a row's media has no state of arrays"

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in {id(one): one for one in self.features if one}.values())

    def __copy__(self) -> RowMedia:
        return RowMedia.merge([self])
