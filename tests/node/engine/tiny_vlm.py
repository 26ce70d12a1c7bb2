"""Tiny random models of mlx-vlm's families, a picture for each, and what mlx-vlm makes of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm import utils

from mlx_mesh.node.engine.features import Features, features_of, passed_on
from mlx_mesh.node.engine.videos import joined
from mlx_mesh.node.engine.whole_prompts import WholePrompts, WholeRow
from mlx_mesh.node.vision import why_whole


def _configs(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return found


HEARING = _configs("tiny_audio_configs.json")
"""Families with an audio part."""

CONFIGS = _configs("tiny_vlm_configs.json") | HEARING
"""One small config per family; what follows a # is a variant."""

PICTURE, VIDEO = 990, 991
"""The ids that stand for a picture's and a video's tokens in all these configs."""

GRIDS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe")
"""Families that cut pictures into patches, with a grid for each."""


LARGE_TOWERS = ("gemma3n",)
"""Families whose vision tower cannot be made small; their audio variants have none."""


def build(family: str, settings: dict[str, Any] | None = None, *, is_blind: bool = False) -> Any:
    """mlx-vlm's whole model, random and float32; `settings` in place of the family's config. `is_blind`:
    without its vision tower, the rest being the same."""
    config = json.loads(json.dumps(settings or CONFIGS[family]))
    package, _ = utils.get_model_and_args(config=config)
    config.setdefault("text_config", config.pop("llm_config", {}))
    config.setdefault("vision_config", {})
    config.setdefault("audio_config", {})
    model_config = package.ModelConfig.from_dict(config)
    modules = ["text", "vision", "perceiver", "projector", "audio"]
    model_config = utils.update_module_configs(model_config, package, config, modules)
    mx.random.seed(zlib.crc32(family.encode()))
    model = package.Model(model_config)
    model.eval()
    changed = [
        (name, array + mx.random.normal(array.shape, dtype=array.dtype) * 0.05)
        for name, array in tree_flatten(model.parameters())
        if mx.issubdtype(array.dtype, mx.floating)
    ]
    model.update(tree_unflatten(changed))
    if is_blind or (family in HEARING and family.partition("#")[0] in LARGE_TOWERS):
        model.vision_tower = nn.Identity()
    elif family in LARGE_TOWERS and settings is None:
        model.vision_tower = _towers.setdefault(family, _Remembering(model.vision_tower))
    mx.eval(model.parameters())
    return model


class _Remembering(nn.Module):  # type: ignore[misc]
    """A tower whose pass takes most of a minute, and that every build of its family has alike: what it made
    of each picture is made once."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower
        self._seen: dict[bytes, Any] = {}

    def __call__(self, pixels: Any, **others: Any) -> Any:
        key = np.array(pixels).tobytes() + repr(sorted(others.items())).encode()
        if key not in self._seen:
            self._seen[key] = self.tower(pixels, **others)
            mx.eval(self._seen[key])
        return self._seen[key]


_towers: dict[str, _Remembering] = {}


def refusal(family: str) -> str:
    """Why the program does not serve this family; '' when it does."""
    from mlx_mesh.node.vision import why_no_vision

    return why_no_vision(CONFIGS[family])


def picture(family: str, seed: int = 1) -> tuple[list[int], dict[str, Any]]:
    """Prompt ids with one picture in them, and the keyword arguments of `get_input_embeddings`."""
    name = family.partition("#")[0]
    mx.random.seed(seed)

    def noise(*shape: int) -> Any:
        return mx.random.normal(shape)

    def prompt(num_pictures_tokens: int, first: bool = False) -> list[int]:
        text = [(37 * i + 11 + seed) % 900 for i in range(13)]
        marks = [PICTURE] * num_pictures_tokens
        return [*marks, *text] if first else [5, 6, 992, *marks, 993, *text]

    if name in GRIDS:
        return prompt(6), {"pixel_values": noise(24, 96), "image_grid_thw": mx.array([[1, 4, 6]])}
    if name in ("gemma3", "internvl", "internvl_chat", "aya_vision", "llama4"):
        ids = prompt(4)
        extra = {"mask": mx.ones((1, len(ids)))} if name == "gemma3" else {}
        return ids, {"pixel_values": noise(1, 3, 32, 32), **extra}
    if name in ("idefics3", "smolvlm"):
        return prompt(4), {"pixel_values": noise(1, 1, 3, 32, 32)}
    if name == "pixtral":
        return prompt(12), {"pixel_values": noise(1, 3, 24, 32), "image_sizes": mx.array([[24, 32]])}
    if name == "mistral3":
        return prompt(4), {"pixel_values": noise(1, 3, 32, 32), "image_sizes": mx.array([[32, 32]])}
    if name == "llava":
        return prompt(16), {"pixel_values": noise(1, 3, 32, 32)}
    if name == "llava_next":
        return prompt(2), {"pixel_values": noise(1, 1, 3, 32, 32)}
    if name == "paligemma":
        ids = prompt(16, first=True)
        return ids, {"pixel_values": noise(1, 3, 32, 32), "mask": mx.ones((1, len(ids)))}
    if name == "kimi_vl":
        return prompt(6), {"pixel_values": noise(24, 3, 8, 8), "image_grid_hws": mx.array([[4, 6]])}
    if name == "lfm2_vl":
        return prompt(4), {
            "pixel_values": noise(1, 16, 192),
            "spatial_shapes": mx.array([[4, 4]]),
            "pixel_attention_mask": mx.ones((1, 16), dtype=mx.int32),
        }
    if name == "minicpmv4_6":
        return prompt(1), {
            "pixel_values": [[noise(3, 8, 128)]],
            "tgt_sizes": [[[4, 4]]],
            "image_bound": [[[3, 4]]],
        }
    if name == "molmo":
        ids = prompt(4)
        return ids, {
            "pixel_values": noise(1, 1, 16, 48),
            "image_masks": mx.ones((1, 1, 16)),
            "image_input_idx": mx.array([[[3, 4, 5, 6]]]),
        }
    if name == "mllama":
        ids = prompt(1)
        return ids, {
            "pixel_values": noise(1, 1, 4, 3, 16, 16),
            "aspect_ratio_ids": mx.array([[6]]),
            "aspect_ratio_mask": mx.ones((1, 1, 4)),
            "cross_attention_mask": mx.ones((1, len(ids), 1, 4)),
        }
    if name == "gemma4":
        ids = prompt(4)
        types = mx.array([[int(token == PICTURE) for token in ids]])
        return ids, {"pixel_values": noise(1, 3, 16, 16), "mm_token_type_ids": types}
    if name == "gemma3n":
        return prompt(256), {"pixel_values": noise(1, 3, 256, 256)}
    if name == "deepseek_vl_v2":
        ids = prompt(13)
        return ids, {
            "pixel_values": noise(1, 2, 3, 32, 32),
            "images_spatial_crop": mx.array([[[1, 1], [0, 0]]]),
            "images_seq_mask": mx.array([[token == PICTURE for token in ids]]),
        }
    if name == "llava_onevision":
        sizes = mx.array([[32, 32]])
        return prompt(36), {"pixel_values": noise(1, 2, 3, 32, 32), "image_sizes": sizes}
    raise KeyError(family)


Prompt = tuple[list[int], dict[str, Any]]
"""Ids, and the keyword arguments of `get_input_embeddings`."""

SOUND = 994
"""The id that stands for a sound's tokens."""

UNKNOWN = 7
"""What stands for a sound's tokens in families whose configs name no id for it."""

_NUM_SOUND_TOKENS = {"qwen3_omni_moe": (7, 4), "minicpmo": (7, 4), "gemma3n": (6, 6)}  # of all others: 5, 3
_PICTURES_WITH_SOUND: dict[str, tuple[int, Callable[[Any], dict[str, Any]]]] = {
    "gemma4": (4, lambda noise: {"pixel_values": noise(1, 3, 16, 16)}),
    "gemma4_unified": (
        4,
        lambda noise: {
            "pixel_values": noise(1, 4, 192),
            "image_position_ids": mx.array([[[0, 0], [1, 0], [0, 1], [1, 1]]]),
        },
    ),
    "qwen3_omni_moe": (
        6,
        lambda noise: {"pixel_values": noise(24, 96), "image_grid_thw": mx.array([[1, 4, 6]])},
    ),
    "minicpmo": (
        4,
        lambda noise: {
            "pixel_values": [[noise(3, 8, 128)]],
            "tgt_sizes": [mx.array([[4, 4]])],
            "image_bound": [[[3, 7]]],
        },
    ),
    "nemotron_h_nano_omni": (4, lambda noise: {"pixel_values": noise(1, 3, 32, 32)}),
    "mimo_v2": (
        6,
        lambda noise: {"pixel_values": noise(24, 96), "image_grid_thw": mx.array([[1, 4, 6]])},
    ),
}
"""By family: tokens of a picture beside sounds, and what makes its inputs."""


def sound(
    family: str, seed: int = 1, num_sounds: int = 1, has_picture: bool = False
) -> tuple[list[int], dict[str, Any]]:
    """Prompt ids with one or two sounds in them, a picture before them, and the keyword arguments of
    `get_input_embeddings`."""
    name = family.partition("#")[0]
    mx.random.seed(seed)
    inputs: dict[str, Any] = {}
    ids = [5, 6]

    def noise(*shape: int) -> Any:
        return mx.random.normal(shape)

    def put(mark: int, num_tokens: int, *, start: int = 995, end: int = 996) -> tuple[int, int]:
        ids.extend([start, *[mark] * num_tokens, end, 30 + num_tokens])
        return len(ids) - num_tokens - 2, len(ids) - 2

    if has_picture:
        num_tokens, make = _PICTURES_WITH_SOUND[name]
        inputs |= make(noise)
        put(PICTURE, num_tokens, start=992, end=993)
    counts = _NUM_SOUND_TOKENS.get(name, (5, 3))[:num_sounds]
    mark = {"minicpmo": UNKNOWN, "gemma3n": 998}.get(name, SOUND)
    bounds = [put(mark, num_tokens) for num_tokens in counts]
    ids += [(37 * i + 11 + seed) % 900 for i in range(9)]

    def masks(*lengths: int) -> Any:
        kept = lengths[:num_sounds]
        return mx.array([[1] * one + [0] * (kept[0] - one) for one in kept])

    if name == "gemma3n":
        inputs |= {
            "input_features": noise(num_sounds, 80, 80),
            "input_features_mask": masks(80, 48).astype(mx.bool_),
        }
    elif name == "gemma4":
        inputs |= {"input_features": noise(num_sounds, 20, 128), "input_features_mask": masks(20, 12)}
    elif name == "gemma4_unified":
        inputs |= {"input_features": noise(num_sounds, 5, 40), "input_features_mask": masks(5, 3)}
    elif name == "qwen3_omni_moe":
        inputs |= {"input_features": noise(num_sounds, 16, 50), "feature_attention_mask": masks(50, 30)}
    elif name == "minicpmo":
        inputs |= {
            "audio_features": noise(num_sounds, 16, 32),
            "audio_feature_lens": [[28, 17][:num_sounds]],
            "audio_bounds": [np.array(bounds)],
        }
    elif name == "nemotron_h_nano_omni":
        inputs |= {"input_features": noise(num_sounds, 20, 16), "feature_attention_mask": masks(20, 12)}
    elif name == "inkling":
        bins = mx.random.randint(0, 4, (num_sounds, 5, 8))
        inputs |= {"audio_input_ids": bins, "audio_input_ids_mask": masks(5, 3)}
    elif name == "mimo_v2":
        lengths = [20, 12][:num_sounds]
        inputs |= {
            "audio_codes": mx.random.randint(0, 16, (sum(lengths), 4)),
            "audio_code_lengths": lengths,
        }
    else:
        raise KeyError(family)
    if has_picture and name.startswith("gemma4"):
        kinds = {PICTURE: 1, mark: 3}
        inputs["mm_token_type_ids"] = mx.array([[kinds.get(token, 0) for token in ids]])
    return ids, inputs


def heard(family: str) -> dict[str, Prompt]:
    """Prompts with sounds."""
    found = {"two sounds": sound(family, 1, 2)}
    if family.partition("#")[0] in _PICTURES_WITH_SOUND:
        found["a picture and a sound"] = sound(family, 2, 1, has_picture=True)
    return found


def embed_prompt(model: Any, prompt: Prompt) -> tuple[list[int], Any]:
    """As `embed`, of any prompt and inputs. Where a model reads pictures or videos but not both, by its
    towers and positions."""
    ids, inputs = prompt
    if _has_grids_of_both(inputs) and model.config.model_type != "qwen3_vl":
        return ids, _embed_apart(model, ids, inputs)
    pixels = inputs.get("pixel_values")
    others = {name: value for name, value in inputs.items() if name != "pixel_values"}
    return ids, model.get_input_embeddings(mx.array([ids]), pixels, **others)


def video(family: str, seed: int = 1) -> tuple[list[int], dict[str, Any]]:
    """As `picture`, with a video of two frames, or of two pairs of frames."""
    mx.random.seed(100 + seed)
    text = [(29 * i + 17 + seed) % 900 for i in range(11)]
    frame = [992, *([VIDEO] * (4 if family == "gemma4" else 6)), 993]
    if family in GRIDS:
        ids = [7, 8, 992, *([VIDEO] * 12), 993, *text]
        if family.startswith("qwen3"):  # with words between that say when
            ids = [7, 8, 31, *frame, 47, *frame, *text]
        return ids, {
            "pixel_values_videos": mx.random.normal((48, 96)),
            "video_grid_thw": mx.array([[2, 4, 6]]),
        }
    if family == "gemma4":
        places = mx.array([[[x, y] for y in range(4) for x in range(4)]] * 2)
        return [7, 31, *frame, 47, *frame, *text], {
            "pixel_values_videos": mx.random.normal((1, 2, 16, 48)),
            "video_position_ids": places[None],
        }
    if family == "minicpmv4_6":
        return [7, 992, VIDEO, 993, 992, VIDEO, 993, *text], {
            "pixel_values": [[mx.random.normal((3, 8, 128)) for _ in range(2)]],
            "tgt_sizes": [[[4, 4], [4, 4]]],
            "image_bound": [[[2, 3], [5, 6]]],
        }
    if family == "llava_onevision":
        return [7, *([VIDEO] * 9), *text], {"pixel_values_videos": mx.random.normal((1, 2, 3, 32, 32))}
    raise KeyError(family)


def both(family: str, seed: int = 1) -> tuple[list[int], dict[str, Any]]:
    """As `picture`, with a video and behind it a picture."""
    ids, inputs = video(family, seed)
    more, others = picture(family, seed)
    if family == "minicpmv4_6":
        others["image_bound"] = [[[len(ids) + at for at in bound] for bound in others["image_bound"][0]]]
        return [*ids, *more], {name: [[*inputs[name][0], *others[name][0]]] for name in inputs}
    return [*ids, *more], inputs | others


def sounds(family: str, seed: int = 1) -> Prompt:
    """Two of them."""
    return sound(family, seed, 2)


SHOWN = {"picture": picture, "video": video, "both": both, "sounds": sounds}


def _has_grids_of_both(inputs: dict[str, Any]) -> bool:
    return "image_grid_thw" in inputs and "video_grid_thw" in inputs


def _embed_apart(model: Any, ids: list[int], inputs: dict[str, Any]) -> Any:
    from mlx_vlm.models.base import InputEmbeddingsFeatures

    part = model.language_model
    embeds, deep = np.array(part.model.embed_tokens(mx.array([ids]))), []
    for mark, pixels, grid in (
        (VIDEO, inputs["pixel_values_videos"], inputs["video_grid_thw"]),
        (PICTURE, inputs["pixel_values"], inputs["image_grid_thw"]),
    ):
        seen = model.vision_tower(pixels, grid)
        if isinstance(seen, tuple):
            seen, layers = seen
            deep.append(layers)
        embeds[0, np.array(ids) == mark] = np.array(seen)
    positions, delta = part.get_rope_index(
        mx.array([ids]), inputs["image_grid_thw"], inputs["video_grid_thw"]
    )
    return InputEmbeddingsFeatures(
        inputs_embeds=mx.array(embeds),
        position_ids=positions,
        rope_deltas=delta,
        visual_pos_masks=mx.array([[token in (PICTURE, VIDEO) for token in ids]])
        if deep and deep[0]
        else None,
        deepstack_visual_embeds=[mx.concatenate(pair) for pair in zip(*deep, strict=True)] or None,
    )


def embed(model: Any, family: str, seed: int = 1) -> tuple[list[int], Any]:
    """Prompt ids and what the model's own `get_input_embeddings` makes of them and their picture."""
    return embed_prompt(model, picture(family, seed))


def reference(
    model: Any,
    family: str,
    num_decoded: int,
    seed: int = 1,
    prompt: Prompt | None = None,
) -> tuple[list[Any], list[int]]:
    """Logits (1, vocabulary) of the last prompt token and of each decoded one, and the greedy tokens: as
    mlx-vlm's own generation does it, on one process and with all its state. `prompt`: another than the
    family's picture."""
    ids, embedded = embed_prompt(model, prompt or picture(family, seed))
    fields = {k: v for k, v in embedded.to_dict().items() if v is not None and k != "inputs_embeds"}
    fields |= passed_on((prompt or picture(family, seed))[1], model.language_model)
    return decoded(model, ids, embedded, fields, num_decoded)


def decoded(
    model: Any, ids: Sequence[int], embedded: Any, fields: dict[str, Any], num_decoded: int
) -> tuple[list[Any], list[int]]:
    """Logits and tokens as of `reference`, for a prompt that is embedded already."""
    from mlx_vlm.models.cache import make_prompt_cache

    cache = make_prompt_cache(model.language_model)
    out = model.language_model(
        mx.array([list(ids)]), inputs_embeds=embedded.inputs_embeds, cache=cache, **fields
    )
    logits, tokens = [out.logits[:, -1]], []
    for _ in range(num_decoded):
        tokens.append(int(mx.argmax(logits[-1], axis=-1).item()))
        kept = (
            {}
            if out.cross_attention_states is None
            else {"cross_attention_states": out.cross_attention_states}
        )
        out = model.language_model(mx.array([[tokens[-1]]]), cache=cache, **kept)
        logits.append(out.logits[:, -1])
        mx.eval(logits[-1])
    return logits, tokens


def features_in(model: Any, family: str, prompt: Prompt) -> tuple[list[int], Features]:
    """Prompt ids and what the leader makes of them."""
    ids, inputs = prompt
    if _has_grids_of_both(inputs):
        given, inputs = joined(ids, inputs, frozenset({PICTURE}), frozenset({VIDEO}), merge=2)
        _, embedded = embed_prompt(model, (given, inputs))
    else:
        _, embedded = embed_prompt(model, prompt)
    given_on = passed_on(inputs, model.language_model)
    features = features_of({**embedded.to_dict(), **given_on}, model.language_model)
    reads_whole = bool(why_whole(CONFIGS[family]))
    is_whole = reads_whole or bool(given_on)
    return ids, replace(features, is_whole=is_whole, sees_ahead=reads_whole)


def chunks_of(length: int) -> list[int]:
    """A chunk that ends inside the picture, the rest, and the last token as the generator takes it."""
    return [5, length - 6, 1]


def forward(part: Any, ids: list[int], features: Any, chunks: list[int], tokens: list[int]) -> list[Any]:
    """Logits after the prompt and after each of `tokens`."""
    cache = part.make_cache()
    cache[-1].features = [features]
    ids = (ids + ids[-1:] * features.length)[: features.length]
    if features.is_whole:
        cache[-1].whole = [WholeRow(tuple(ids))]
    part = WholePrompts(part)
    logits, at = [], 0
    for size in chunks:
        last = part(mx.array([ids[at : at + size]]), cache=cache)[:, -1]
        mx.eval(last, [part.state for part in cache])
        at += size
    logits.append(last)
    for token in tokens:
        logits.append(part(mx.array([[token]]), cache=cache)[:, -1])
        mx.eval(logits[-1], [part.state for part in cache])
    return logits


def poison(module: Any) -> None:
    """Every parameter NaN."""
    module.update(
        tree_unflatten(
            [(name, mx.full(x.shape, float("nan"))) for name, x in tree_flatten(module.parameters())]
        )
    )


def poison_tower(whole: Any) -> None:
    """Everything of the model that is not its language part."""
    owner = whole.thinker if hasattr(whole, "thinker") else whole
    for name, child in owner.children().items():
        if name != "language_model":
            for part in child if isinstance(child, list) else [child]:
                poison(part)


def generate(part: Any, prompts: dict[str, tuple[list[int], Any]], num_tokens: int) -> dict[str, list[int]]:
    """Greedy tokens of prompts that come one after the other into one batch: name -> (ids, features)."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(WholePrompts(part), prefill_batch_size=1, prefill_step_size=8)
    names: dict[int, str] = {}
    tokens: dict[str, list[int]] = {name: [] for name in prompts}
    waiting = list(prompts)
    num_chunks = sum(features.length // 8 for _, features in prompts.values() if features is not None)
    for step in range(40 * len(prompts) + num_chunks):
        if waiting and step % 3 == 0:
            name = waiting.pop(0)
            ids, features = prompts[name]
            cache = part.make_cache()
            if features is not None:
                cache[-1].features = [features]
                ids = (ids + ids[-1:] * features.length)[: features.length]
                if features.is_whole:
                    cache[-1].whole = [WholeRow(tuple(ids))]
            (uid,) = generator.insert([list(ids)], max_tokens=[num_tokens], caches=[cache])
            names[uid] = name
        for response in generator.next()[1]:
            tokens[names[response.uid]].append(response.token)
    generator.close()
    return tokens


def prompts_of(
    model: Any, family: str, shown: Sequence[tuple[str, int]] = (("picture", 1), ("picture", 2))
) -> dict[str, tuple[list[int], Any]]:
    """One for each of `shown`, a kind and its seed; before and behind them one of text alone."""
    found: dict[str, tuple[list[int], Any]] = {
        "short text": text_in(model, family, [(31 * i + 7) % 900 for i in range(9)])
    }
    for kind, seed in shown:
        found[f"{kind} {seed}"] = features_in(model, family, SHOWN[kind](family, seed))
    found["long text"] = text_in(model, family, [(17 * i + 3) % 900 for i in range(30)])
    return found


def text_in(model: Any, family: str, ids: list[int]) -> tuple[list[int], Any]:
    """A prompt of text alone: it has features where prompts are read in one piece."""
    return features_in(model, family, (ids, {})) if why_whole(CONFIGS[family]) else (ids, None)


def rows_with_sounds(model: Any, family: str) -> dict[str, tuple[list[int], Any]]:
    """Prompts with sounds between two of text alone."""
    return {
        "short text": text_in(model, family, [(31 * i + 7) % 900 for i in range(9)]),
        **{name: features_in(model, family, prompt) for name, prompt in heard(family).items()},
        "long text": text_in(model, family, [(17 * i + 3) % 900 for i in range(30)]),
    }
