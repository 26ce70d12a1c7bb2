"""A small random copy of a vision model's language part, and what it is asked when its splits are tried: a
row with a picture and one of text, each read alone and then decoded together, and text again behind them.

What towers make of a picture is made up, in the form in which the family hands it over: embeddings,
positions, features between layers, states for cross attention. So it takes no pixels and no processor.
"""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlx_mesh.node.engine.features import Features
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.vision import why_alone

_PICTURE = range(2, 8)
"""Places of the picture's tokens in its prompt."""

_LENGTH = 11
_CHUNKS = (5, 5, 1)
"""Of the prompt with a picture: the first one ends inside it, the last one is what the generator takes."""


def build_small(config: dict[str, Any]) -> LanguagePart:
    """As mlx-vlm makes it of a config, over lazy arrays; its towers are dropped unread."""
    from mlx_vlm import utils

    own = json.loads(json.dumps(config))
    package, _ = utils.get_model_and_args(config=own)
    own.setdefault("text_config", own.pop("llm_config", {}))
    own.setdefault("vision_config", {})
    own.setdefault("audio_config", {})
    made = package.ModelConfig.from_dict(own)
    modules = ["text", "vision", "perceiver", "projector", "audio"]
    model = package.Model(utils.update_module_configs(made, package, own, modules))
    model.eval()
    return LanguagePart(model.language_model, is_for_one_row=bool(why_alone(config)))


def made_up(part: LanguagePart, config: dict[str, Any]) -> Features | None:
    """A picture's features, the same at each call; None where nobody can tell how wide embeddings are."""
    width = _width(part)
    if not width:
        return None
    key = mx.random.key(11)
    fields: dict[str, Any] = {"inputs_embeds": mx.random.normal((1, _LENGTH, width), key=key) * width**-0.5}
    delta = 0
    if hasattr(part.language_model, "_rope_deltas"):
        fields["position_ids"], delta = _positions()
    vision, text = config.get("vision_config") or {}, config.get("text_config") or {}
    if layers := vision.get("deepstack_visual_indexes"):
        picture = mx.array([[place in _PICTURE for place in range(_LENGTH)]])
        fields["visual_pos_masks"] = picture
        fields["deepstack_visual_embeds"] = [
            mx.random.normal((len(_PICTURE), width), key=mx.random.key(13 + at)) * width**-0.5
            for at in range(len(layers))
        ]
    if text.get("cross_attention_layers"):
        fields["cross_attention_states"] = mx.random.normal((1, 4, width), key=mx.random.key(12))
        fields["cross_attention_mask"] = mx.zeros((1, 1, _LENGTH, 4))
        fields["full_text_row_masked_out_mask"] = mx.ones((1, 1, _LENGTH, 1))
    return Features(_LENGTH, fields, delta)


def _width(part: LanguagePart) -> int:
    """Of an embedding."""
    for name, array in tree_flatten(part.parameters()):
        if name.endswith(("embed_tokens.weight", "wte.embedding", "wte.weight", "tok_embeddings.weight")):
            return int(array.shape[-1])
    return 0


def _positions() -> tuple[Any, int]:
    """Of a picture of two rows and three columns among text: (3, 1, length), and how far behind the places
    the last one is."""
    rows = []
    for axis in range(3):
        places: list[int] = []
        for place in range(_LENGTH):
            if place in _PICTURE:
                at = place - _PICTURE.start
                places.append(_PICTURE.start + (0, at // 3, at % 3)[axis])
            else:
                places.append(place if place < _PICTURE.start else place - 3)
        rows.append([places])
    return mx.array(rows), -3


def forward_rows(part: LanguagePart, picture: Features | None) -> list[Any]:
    """Logits of all that is read and decoded. `picture` None = both rows are of text."""
    outputs: list[Any] = []

    def read(start: int, features: Features | None) -> list[Any]:
        cache, at = part.make_cache(), 0
        cache[-1].features = [features]
        for length in (_LENGTH,) if features is None else _CHUNKS:
            outputs.append(part(_tokens(start, at, length), cache=cache))
            at += length
        return cache

    rows = [read(11, picture), read(23, None)]
    if part.is_for_one_row:
        for row in rows:
            outputs.append(part(mx.array([[7]]), cache=row))
    else:
        both = [type(one).merge([one, other]) for one, other in zip(*rows, strict=True)]
        for token in (7, 9):
            outputs.append(part(mx.array([[token], [token + 1]]), cache=both))
    read(23, None)
    mx.eval(outputs)
    return outputs


def _tokens(start: int, at: int, length: int) -> Any:
    return ((mx.arange(at, at + length) * 37 + start) % 61)[None]
