"""Tiny random models of mlx-vlm's families, a picture for each, and what mlx-vlm makes of it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten
from mlx_vlm import utils

from mlx_mesh.node.engine.features import Features, features_of, passed_on
from mlx_mesh.node.engine.whole_prompts import WholePrompts, WholeRow
from mlx_mesh.node.vision import why_whole


def _configs(name: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
    return found


HEARING = _configs("tiny_audio_configs.json")
"""Families with an audio part."""

CONFIGS = _configs("tiny_vlm_configs.json") | HEARING
"""One small config per family; what follows a # is a variant."""

PICTURE = 990
"""The id that stands for a picture's tokens in all these configs."""


def build(family: str) -> Any:
    """mlx-vlm's whole model, random and float32."""
    config = json.loads(json.dumps(CONFIGS[family]))
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
    mx.eval(model.parameters())
    return model


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

    if name in (
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "qwen3_5",
        "qwen3_5_moe",
        "glm4v",
        "glm4v_moe",
    ):
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
    raise KeyError(family)


SOUND = 994
"""The id that stands for a sound's tokens."""

UNKNOWN = 7
"""What stands for a sound's tokens in families whose configs name no id for it."""

_NUM_SOUND_TOKENS = {"qwen3_omni_moe": (7, 4), "minicpmo": (7, 4)}  # of all others: 5, 3
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
    mark = UNKNOWN if name == "minicpmo" else SOUND
    bounds = [put(mark, num_tokens) for num_tokens in counts]
    ids += [(37 * i + 11 + seed) % 900 for i in range(9)]

    def masks(*lengths: int) -> Any:
        kept = lengths[:num_sounds]
        return mx.array([[1] * one + [0] * (kept[0] - one) for one in kept])

    if name == "gemma4":
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
    return ids, inputs


Prompt = tuple[list[int], dict[str, Any]]


def embed_prompt(model: Any, prompt: Prompt) -> tuple[list[int], Any]:
    """As `embed`, of any prompt and inputs."""
    ids, inputs = prompt
    pixels = inputs.get("pixel_values")
    others = {name: value for name, value in inputs.items() if name != "pixel_values"}
    return ids, model.get_input_embeddings(mx.array([ids]), pixels, **others)


def embed(model: Any, family: str, seed: int = 1) -> tuple[list[int], Any]:
    """Prompt ids and what the model's own `get_input_embeddings` makes of them and their picture."""
    return embed_prompt(model, picture(family, seed))


def reference(
    model: Any, family: str, num_decoded: int, seed: int = 1, prompt: Prompt | None = None
) -> tuple[list[Any], list[int]]:
    """Logits (1, vocabulary) of the last prompt token and of each decoded one, and the greedy tokens: as
    mlx-vlm's own generation does it, on one process and with all its state. `prompt`: another than the
    family's picture."""
    from mlx_vlm.models.cache import make_prompt_cache

    ids, embedded = embed_prompt(model, prompt or picture(family, seed))
    fields = {k: v for k, v in embedded.to_dict().items() if v is not None and k != "inputs_embeds"}
    fields |= passed_on((prompt or picture(family, seed))[1], model.language_model)
    cache = make_prompt_cache(model.language_model)
    out = model.language_model(mx.array([ids]), inputs_embeds=embedded.inputs_embeds, cache=cache, **fields)
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
    ids, embedded = embed_prompt(model, prompt)
    given_on = passed_on(prompt[1], model.language_model)
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
    for step in range(40 * len(prompts)):
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


def prompts_of(model: Any, family: str) -> dict[str, tuple[list[int], Any]]:
    """Two with a picture, two of text alone."""
    found: dict[str, tuple[list[int], Any]] = {
        "short text": text_in(model, family, [(31 * i + 7) % 900 for i in range(9)])
    }
    for seed in (1, 2):
        found[f"picture {seed}"] = features_in(model, family, picture(family, seed))
    found["long text"] = text_in(model, family, [(17 * i + 3) % 900 for i in range(30)])
    return found


def text_in(model: Any, family: str, ids: list[int]) -> tuple[list[int], Any]:
    """A prompt of text alone: it has features where prompts are read in one piece."""
    return features_in(model, family, (ids, {})) if why_whole(CONFIGS[family]) else (ids, None)
