"""A tiny vision model as a complete folder: weights, byte tokenizer with picture marks, processor settings.

Imported by path from tests that serve it; building it runs MLX in the test's process.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from mlx_mesh.mesh.messages import Video

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VOCABULARY = 320
NUM_LAYERS = 6

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% elif part['type'] == 'video' %}"
    "{{ '<|vision_start|><|video_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIALS, *alphabet, *MARKS])}
    vocab |= {f"<|unused{i}|>": i for i in range(len(vocab), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIALS, *MARKS)])
    return tokenizer


def config() -> dict[str, Any]:
    """Of a qwen2_vl with 6 layers; a picture of 16 by 24 pixels is 6 tokens."""
    ids = _tokenizer()
    return {
        "model_type": "qwen2_vl",
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "hidden_size": 64,
        "num_hidden_layers": NUM_LAYERS,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "image_token_id": ids.token_to_id("<|image_pad|>"),
        "video_token_id": ids.token_to_id("<|video_pad|>"),
        "vision_start_token_id": ids.token_to_id("<|vision_start|>"),
        "vision_config": {
            "depth": 2,
            "hidden_size": 64,
            "num_heads": 4,
            "patch_size": 4,
            "spatial_patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "model_type": "qwen2_vl",
            "embed_dim": 32,
            "in_channels": 3,
            "mlp_ratio": 2,
        },
    }


def save(folder: Path) -> Path:
    """Write the whole model folder."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models import qwen2_vl
    from mlx_vlm.utils import update_module_configs

    settings = config()
    text = {**settings, "text_config": {}}
    model_config = update_module_configs(
        qwen2_vl.ModelConfig.from_dict(text), qwen2_vl, text, ["text", "vision"]
    )
    mx.random.seed(17)
    model = qwen2_vl.Model(model_config)
    weights = {
        name: array + mx.random.normal(array.shape) * 0.08 for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    files: dict[str, Any] = {
        "config.json": settings,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2},
        "preprocessor_config.json": {
            "patch_size": 4,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "min_pixels": 64,
            "max_pixels": 1024,
            "image_processor_type": "Qwen2VLImageProcessor",
            "processor_class": "Qwen2VLProcessor",
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "chat_template": TEMPLATE,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def picture(seed: int, width: int = 24, height: int = 16, kind: str = "PNG") -> bytes:
    """A file of noise, different for each seed."""
    image = Image.effect_noise((width, height), 40 + 5 * seed).convert("RGB")
    pixels = image.load()
    assert pixels is not None
    for x in range(width):
        for y in range(height):
            pixels[x, y] = ((x * 11 + seed * 53) % 256, (y * 17 + seed * 29) % 256, (x * y + seed * 71) % 256)
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def video(seed: int, num_frames: int = 4, fps: float = 2.0, width: int = 16, height: int = 16) -> Video:
    """Frames of noise as the front end hands them over; with these numbers 8 tokens."""
    frames = tuple(picture(100 * seed + i, width, height) for i in range(num_frames))
    return Video(frames=frames, fps=fps, times=tuple(i / fps for i in range(num_frames)))


def film(seed: int, num_frames: int = 20, rate: int = 10, width: int = 16, height: int = 16) -> bytes:
    """An MP4 file without any loss, so that every decoder gives the same frames."""
    import av

    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264rgb", rate=rate, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = width, height, "rgb24"
        for i in range(num_frames):
            image = Image.open(io.BytesIO(picture(100 * seed + i, width, height)))
            frame = av.VideoFrame.from_ndarray(np.asarray(image), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def prompt(question: str, num_pictures: int = 1, num_videos: int = 0) -> str:
    """As the chat template writes it."""
    marks = "<|vision_start|><|image_pad|><|vision_end|>" * num_pictures
    marks += "<|vision_start|><|video_pad|><|vision_end|>" * num_videos
    return f"<|im_start|>user\n{marks}{question}<|im_end|>\n<|im_start|>assistant\n"


def ids_of(text: str) -> list[int]:
    return list(_tokenizer().encode(text, add_special_tokens=False).ids)
