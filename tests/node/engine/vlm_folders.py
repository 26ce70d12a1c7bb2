"""Tiny models of mlx-vlm's families as complete folders, like checkpoints of the hub: weights, a byte
tokenizer with the family's special tokens, its processor's settings, and a chat template that puts pictures
where the family's own does. As far as the installed packages document them; no checkpoint is reachable here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 1000
MARK_ID = 990
"""Of the token that stands for a picture's embeddings, in all configs of tiny_vlm."""

_BASE: dict[int, str] = {0: "<s>", 1: "<pad>", 2: "</s>", 3: "<unk>"}
_FIRST_BYTE = 4
_FIRST_SPECIAL = 900


@dataclass(frozen=True)
class Kind:
    """What a family's folder has. `mark`: the token with MARK_ID; `others`: more special tokens, `placed`:
    with their ids. `named`: attributes of the tokenizer. `shown`: what the template writes for a picture;
    '' = the template reads text only. `settings`: more entries of config.json, `nested`: of parts of it, None
    = left out there."""

    mark: str
    shown: str
    others: tuple[str, ...] = ()
    placed: dict[int, str] = field(default_factory=dict)
    named: dict[str, str] = field(default_factory=dict)
    preprocessor: dict[str, Any] = field(default_factory=dict)
    processor: dict[str, Any] = field(default_factory=dict)
    video: dict[str, Any] = field(default_factory=dict)  # preprocessor of videos, where it has a file
    settings: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, dict[str, Any]] = field(default_factory=dict)  # entries of a part of config.json


_QWEN: dict[str, Any] = {
    "others": ("<|im_start|>", "<|im_end|>"),
    "placed": {991: "<|video_pad|>", 992: "<|vision_start|>", 993: "<|vision_end|>"},
    "mark": "<|image_pad|>",
    "shown": "<|vision_start|><|image_pad|><|vision_end|>",
}
_QWEN_PIXELS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 64,
    "max_pixels": 1024,
    "image_processor_type": "Qwen2VLImageProcessor",
}
_QWEN3_PIXELS: dict[str, Any] = {
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 1024},
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
_GLM: dict[str, Any] = {
    "mark": "<|image|>",
    "shown": "<|begin_of_image|><|image|><|end_of_image|>",
    "placed": {991: "<|video|>", 992: "<|begin_of_image|>", 993: "<|end_of_image|>"},
    "others": ("[gMASK]", "<sop>", "<|user|>", "<|assistant|>", "<|system|>"),
    "preprocessor": {
        "patch_size": 4,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 2048},
        "image_processor_type": "Glm4vImageProcessor",
        "processor_class": "Glm4vProcessor",
    },
}
_IDEFICS: dict[str, Any] = {
    "mark": "<image>",
    "shown": "<image>",
    "others": (
        "<fake_token_around_image>",
        "<end_of_utterance>",
        "<global-img>",
        *(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)),
    ),
    "processor": {"image_seq_len": 4},
}
_IDEFICS_PIXELS: dict[str, Any] = {
    "do_image_splitting": True,
    "max_image_size": {"longest_edge": 32},
    "size": {"longest_edge": 64},
}
_INTERNVL: dict[str, Any] = {
    "mark": "<IMG_CONTEXT>",
    "others": ("<img>", "</img>", "<|im_start|>", "<|im_end|>"),
}
_PIXTRAL: dict[str, Any] = {
    "mark": "[IMG]",
    "shown": "[IMG]",
    "others": ("[INST]", "[/INST]", "[IMG_BREAK]", "[IMG_END]"),
    "preprocessor": {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 8, "width": 8},
        "size": {"longest_edge": 64},
    },
}
_MISTRAL3: dict[str, Any] = {**_PIXTRAL, "processor": {"patch_size": 8, "spatial_merge_size": 2}}
_PALIGEMMA: dict[str, Any] = {
    "mark": "<image>",
    "shown": "",
    "preprocessor": {
        "image_processor_type": "SiglipImageProcessor",
        "size": {"height": 32, "width": 32},
        "image_seq_length": 16,
    },
    "processor": {"image_seq_length": 16},
}
_CLIP_PIXELS: dict[str, Any] = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}

KINDS: dict[str, Kind] = {
    "aya_vision": Kind(
        mark="<|IMG_PATCH|>",
        shown="<image>",
        others=(
            "<image>",
            "<|START_OF_IMG|>",
            "<|END_OF_IMG|>",
            "<|IMG_LINE_BREAK|>",
            "TILE",
            "TILE_GLOBAL",
        ),
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "crop_to_patches": True,
            "size": {"height": 32, "width": 32},
            "min_patches": 1,
            "max_patches": 4,
            "processor_class": "AyaVisionProcessor",
        },
        processor={
            "processor_class": "AyaVisionProcessor",
            "img_size": 32,
            "patch_size": 8,
            "downsample_factor": 2,
        },
    ),
    "deepseek_vl_v2": Kind(
        mark="<image>",
        shown="",
        others=("<｜▁pad▁｜>", "<|User|>", "<|Assistant|>"),
        processor={
            "candidate_resolutions": [[32, 32], [32, 64], [64, 32]],
            "patch_size": 8,
            "downsample_ratio": 2,
            "processor_class": "DeepseekVLV2Processor",
        },
    ),
    "gemma3": Kind(
        mark="<image_soft_token>",
        shown="<start_of_image>",
        others=("<start_of_image>", "<end_of_image>", "<start_of_turn>", "<end_of_turn>"),
        named={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
            "image_seq_length": 4,
            "processor_class": "Gemma3Processor",
        },
        processor={"image_seq_length": 4, "processor_class": "Gemma3Processor"},
    ),
    "gemma4": Kind(
        mark="<|image|>",
        shown="<|image|>",
        placed={
            991: "<|video|>",
            994: "<|audio|>",
            992: "<|image>",
            993: "<image|>",
            995: "<|audio>",
            996: "<audio|>",
        },
        others=("<|turn>", "<turn|>"),
        named={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        processor={
            "processor_class": "Gemma4Processor",
            "image_processor": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
            "video_processor": {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 2},
        },
    ),
    "glm4v": Kind(**_GLM),
    "glm4v_moe": Kind(**_GLM),
    "idefics3": Kind(
        **_IDEFICS,
        preprocessor={**_IDEFICS_PIXELS, "image_processor_type": "Idefics3ImageProcessor"},
    ),
    "internvl": Kind(**_INTERNVL, shown="<IMG_CONTEXT>\n", processor={"image_seq_length": 4}),
    "internvl_chat": Kind(**_INTERNVL, shown="<image>\n"),
    "kimi_vl": Kind(
        mark="<|media_pad|>",
        shown="<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        others=(
            "<|media_start|>",
            "<|media_content|>",
            "<|media_end|>",
            "<|im_user|>",
            "<|im_assistant|>",
            "<|im_middle|>",
            "<|im_end|>",
        ),
    ),
    "lfm2_vl": Kind(
        mark="<image>",
        shown="<image>",
        others=(
            "<|image_start|>",
            "<|image_end|>",
            "<|img_thumbnail|>",
            "<|im_start|>",
            "<|im_end|>",
            *(f"<|img_row_{r}_col_{c}|>" for r in range(1, 4) for c in range(1, 4)),
        ),
        named={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
        preprocessor={
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "encoder_patch_size": 8,
            "downsample_factor": 2,
            "min_image_tokens": 1,
            "max_image_tokens": 16,
            "max_num_patches": 64,
            "tile_size": 64,
            "do_image_splitting": False,
            "use_thumbnail": True,
        },
        processor={"processor_class": "Lfm2VlProcessor"},
    ),
    "llama4": Kind(
        mark="<|patch|>",
        shown="<|image|>",
        others=(
            "<|image|>",
            "<|image_start|>",
            "<|image_end|>",
            "<|tile_x_separator|>",
            "<|tile_y_separator|>",
            "<|header_start|>",
            "<|header_end|>",
            "<|eot|>",
        ),
        preprocessor={
            "image_processor_type": "Llama4ImageProcessorFast",
            "size": {"height": 56, "width": 56},
            "max_patches": 4,
        },
        nested={"vision_config": {"image_size": 56, "patch_size": 14}},
    ),
    "llava": Kind(
        mark="<image>",
        shown="<image>\n",
        preprocessor={**_CLIP_PIXELS, "image_processor_type": "CLIPImageProcessor"},
        processor={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    ),
    "llava_onevision": Kind(
        mark="<image>",
        placed={991: "<video>"},
        shown="<image>\n",
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "image_grid_pinpoints": [[32, 32]],
            "size": {"height": 32, "width": 32},
        },
        video={"size": {"height": 32, "width": 32}},
        processor={"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "llava_next": Kind(
        mark="<image>",
        shown="<image>\n",
        preprocessor={
            **_CLIP_PIXELS,
            "image_processor_type": "LlavaNextImageProcessor",
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
        },
        processor={
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
    ),
    "minicpmv4_6": Kind(
        mark="<|image_pad|>",
        placed={991: "<|video_pad|>"},
        shown="(<image>./</image>)\n",
        others=(
            "<image>",
            "</image>",
            "<slice>",
            "</slice>",
            "<image_id>",
            "</image_id>",
            "<|im_start|>",
            "<|im_end|>",
        ),
        preprocessor={
            "image_processor_type": "MiniCPMVImageProcessor",
            "max_slice_nums": 2,
            "scale_resolution": 64,
            "patch_size": 8,
            "image_feature_size": 4,
        },
    ),
    "mistral3": Kind(**_MISTRAL3),
    "mistral3#ministral3": Kind(**_MISTRAL3),
    "mllama": Kind(
        mark="<|image|>",
        shown="<|image|>",
        others=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"),
        preprocessor={
            "image_processor_type": "MllamaImageProcessor",
            "size": {"height": 16, "width": 16},
            "max_image_tiles": 4,
        },
        nested={"vision_config": {"max_aspect_ratio_id": None}},
    ),
    "molmo": Kind(
        mark="<im_patch>",
        shown="",
        others=("<im_col>", "<im_start>", "<im_end>"),
        preprocessor={
            "base_image_input_size": [32, 32],
            "image_patch_size": 4,
            "image_token_length_w": 4,
            "image_token_length_h": 4,
            "max_crops": 2,
            "overlap_margins": [2, 2],
        },
        nested={"vision_config": {"image_default_input_size": [32, 32], "image_num_pos": 65}},
    ),
    "paligemma": Kind(**_PALIGEMMA),
    "paligemma#gemma2": Kind(**_PALIGEMMA),
    "pixtral": Kind(**_PIXTRAL, processor={"patch_size": 8}),
    "qwen2_vl": Kind(**_QWEN, preprocessor=_QWEN_PIXELS, nested={"vision_config": {"mlp_ratio": 2}}),
    "qwen2_5_vl": Kind(**_QWEN, preprocessor=_QWEN_PIXELS),
    "qwen3_vl": Kind(**_QWEN, preprocessor=_QWEN3_PIXELS),
    "qwen3_vl_moe": Kind(**_QWEN, preprocessor=_QWEN3_PIXELS),
    "qwen3_5": Kind(**_QWEN, preprocessor=_QWEN3_PIXELS),
    "qwen3_5_moe": Kind(**_QWEN, preprocessor=_QWEN3_PIXELS),
    "smolvlm": Kind(
        **_IDEFICS,
        named={
            "image_token": "<image>",
            "fake_image_token": "<fake_token_around_image>",
            "global_image_token": "<global-img>",
            "end_of_utterance_token": "<end_of_utterance>",
        },
        preprocessor={**_IDEFICS_PIXELS, "image_processor_type": "SmolVLMImageProcessor"},
    ),
}


def save(family: str, folder: Path, tiny_vlm: ModuleType) -> Path:
    """Write the whole folder."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    kind = KINDS[family]
    config = json.loads(json.dumps(tiny_vlm.CONFIGS[family])) | kind.settings
    for part, entries in kind.nested.items():
        config[part] = {k: v for k, v in (config[part] | entries).items() if v is not None}
    model = tiny_vlm.build(family, config)
    config |= {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "float32"}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    files: dict[str, Any] = {
        "config.json": config,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1},
        "preprocessor_config.json": kind.preprocessor,
        "processor_config.json": kind.processor,
        "video_preprocessor_config.json": kind.video,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<s>",
            "eos_token": "</s>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 512,
            "extra_special_tokens": kind.named,
            "chat_template": template(kind),
        },
    }
    for name, content in files.items():
        if content or name == "preprocessor_config.json":  # which every checkpoint has
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    tokenizer(kind).save(str(folder / "tokenizer.json"))
    return folder


def tokenizer(kind: Kind) -> Tokenizer:
    """A token for each byte, and the special ones at their ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    texts = dict(_BASE) | {_FIRST_BYTE + i: text for i, text in enumerate(alphabet)}
    special = {MARK_ID: kind.mark, **kind.placed}
    special |= {_FIRST_SPECIAL + i: text for i, text in enumerate(kind.others)}
    texts |= special
    texts |= {i: f"<|unused{i}|>" for i in range(VOCABULARY) if i not in texts}
    made = Tokenizer(models.BPE(vocab={text: i for i, text in texts.items()}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, special=True) for text in (*_BASE.values(), *special.values())])
    return made


def template(kind: Kind) -> str:
    """Lists with the family's mark where pictures stand; or text only."""
    if not kind.shown:
        return (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        )
    return (
        "{% for m in messages %}{{ m['role'] + ': ' }}"
        "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
        "{% if part['type'] == 'image' %}{{ '" + kind.shown.replace("\n", "\\n") + "' }}"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
