"""What the pictures of one prompt become before the language model reads it, and which part of that each
chunk of the prompt needs.

The fields are those that mlx-vlm's models hand to their language model; which of them a model uses, it says
itself by filling them in. A field that no rule here knows is an error, never dropped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

TOKEN_AXIS = {
    "inputs_embeds": 1,  # (1, L, hidden)
    "position_ids": -1,  # (1, L) or (3, 1, L)
    "visual_pos_masks": 1,  # (1, L): which tokens are a picture's
    "per_layer_inputs": 1,  # (1, L, layers, d)
    "mm_token_type_ids": 1,  # (1, L): which pictures' tokens see each other
    "cross_attention_mask": 2,  # (1, 1, L, pictures)
    "full_text_row_masked_out_mask": 2,  # (1, 1, L, 1)
}
"""Fields with one value for each token of the prompt, and the axis on which the tokens are."""

PER_PICTURE_TOKEN = "deepstack_visual_embeds"
"""A list of (picture tokens, hidden), one for each of some layers; or all of it as one array by tokens."""

WHOLE = ("cross_attention_states",)
"""Fields that every step needs as a whole, decode steps included."""

DROPPED = ("attention_mask_4d", "rope_deltas")
"""Never read by a language model that gets caches and positions; the delta is kept as a number."""


_STATE = ("_position_ids", "_rope_deltas")
"""What some families leave on the language model between calls."""


class UnknownFeatureError(ValueError):
    """A model hands over something that no rule cuts into chunks; the message names it."""


@dataclass(frozen=True, slots=True, eq=False)
class Features:
    """The language model's inputs for one prompt of `length` tokens, by field. `delta`: by how much positions
    are ahead of places from the prompt's end on. Never changed, so rows may share it."""

    length: int
    fields: dict[str, Any]
    delta: int = 0
    keys: tuple[int, ...] = ()  # what the prompt's tokens are known by in prefix caches
    is_whole: bool = False  # the prompt is read in one forward
    sees_ahead: bool = False  # so does all that is read at once: what was said already comes one by one

    def __deepcopy__(self, memo: dict[int, Any]) -> Features:
        return self

    @property
    def nbytes(self) -> int:
        return sum(int(x.nbytes) for value in self.fields.values() for x in _arrays(value))

    @property
    def nbytes_after(self) -> int:
        """Of what is left when the prompt is read."""
        return sum(int(x.nbytes) for value in self.after().values() for x in _arrays(value))

    @property
    def has_more(self) -> bool:
        """Some of it is for reading the prompt alone."""
        return not self.fields.keys() <= set(WHOLE)

    def read(self) -> Features:
        """What is left when the prompt is read."""
        return replace(self, fields=self.after())

    def chunk(self, start: int, stop: int) -> dict[str, Any]:
        """Keyword arguments for the tokens [start, stop) of the prompt."""
        found: dict[str, Any] = {}
        for name, value in self.fields.items():
            if name in WHOLE:
                found[name] = value
            elif name == PER_PICTURE_TOKEN and isinstance(value, (list, tuple)):
                found[name] = self._deepstack(value, start, stop)
            elif name == PER_PICTURE_TOKEN:  # (1, L, layers, hidden), zeros where there is no picture
                found[name] = _slice(value, 1, start, stop)
            else:
                found[name] = _slice(value, TOKEN_AXIS[name], start, stop)
        if (
            isinstance(found.get(PER_PICTURE_TOKEN), list) and not found[PER_PICTURE_TOKEN]
        ):  # a chunk without picture tokens adds nothing
            del found[PER_PICTURE_TOKEN]
            found.pop("visual_pos_masks", None)
        return found

    def after(self) -> dict[str, Any]:
        """Keyword arguments for tokens behind the prompt."""
        return {name: value for name, value in self.fields.items() if name in WHOLE}

    def _deepstack(self, layers: Any, start: int, stop: int) -> list[Any]:
        mask = np.array(self.fields["visual_pos_masks"]).reshape(-1)
        first, last = int(mask[:start].sum()), int(mask[:stop].sum())
        return [layer[first:last] for layer in layers] if last > first else []


def features_of(fields: dict[str, Any], language_model: Any) -> Features:
    """From what `get_input_embeddings` gave (`to_dict()`), and what it left on the language model: positions
    and their delta are state there in some families. Raises UnknownFeatureError."""
    known = {**TOKEN_AXIS, PER_PICTURE_TOKEN: 0, **dict.fromkeys(WHOLE, 0)}
    given = {name: value for name, value in fields.items() if value is not None}
    unknown = sorted(given.keys() - known.keys() - set(DROPPED))
    if unknown:
        raise UnknownFeatureError(
            f"The model gives its language part `{unknown[0]}` beside the embeddings, which this version "
            "cannot cut into chunks."
        )
    length = int(given["inputs_embeds"].shape[1])
    positions, delta = given.get("position_ids"), given.get("rope_deltas")
    left_positions = getattr(language_model, "_position_ids", None)
    if positions is None and left_positions is not None and left_positions.shape[-1] == length:
        given["position_ids"] = left_positions
    if delta is None:
        delta = getattr(language_model, "_rope_deltas", None)
    return Features(
        length=length,
        fields={name: value for name, value in given.items() if name in known},
        delta=0 if delta is None else int(np.array(delta).reshape(-1)[0]),
    )


def passed_on(inputs: dict[str, Any], language_model: Any) -> dict[str, Any]:
    """Fields that the language model takes from the processor itself: where tokens of a picture see each
    other, which those are."""
    config = getattr(language_model, "config", None)
    types = inputs.get("mm_token_type_ids", inputs.get("token_type_ids"))
    if types is None or getattr(config, "use_bidirectional_attention", None) != "vision":
        return {}
    found = mx.array(np.array(types))
    return {"mm_token_type_ids": found} if bool(mx.any((found == 1) | (found == 2)).item()) else {}


def clear_state(language_model: Any) -> None:
    """Forget the positions of whatever was computed last."""
    for name in _STATE:
        if hasattr(language_model, name):
            setattr(language_model, name, None)


def _slice(value: Any, axis: int, start: int, stop: int) -> Any:
    index = [slice(None)] * value.ndim
    index[axis] = slice(start, stop)
    return value[tuple(index)]


def _arrays(value: Any) -> list[Any]:
    return [x for x in value if isinstance(x, mx.array)] if isinstance(value, (list, tuple)) else [value]
