"""A tiny model that hears and sees as a complete folder: a gemma4 with both towers, a byte tokenizer with
marks, processor settings. And sounds for it.

Imported by path from tests that serve it; building it runs MLX in the test's process.
"""

from __future__ import annotations

import io
import json
import math
import wave
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKS = {
    "image_token": "<|image|>",
    "boi_token": "<|boi|>",
    "eoi_token": "<|eoi|>",
    "audio_token": "<|audio|>",
    "boa_token": "<|boa|>",
    "eoa_token": "<|eoa|>",
    "video_token": "<|video|>",
}
VOCABULARY = 320
NUM_LAYERS = 8
CUT = 3  # behind layer 4 come those that share keys and values
RATE = 16_000

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<|image|>' }}"
    "{% elif part['type'] == 'audio' %}{{ '<|audio|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*SPECIALS, *alphabet, *MARKS.values()])}
    vocab |= {f"<|unused{i}|>": i for i in range(len(vocab), VOCABULARY)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*SPECIALS, *MARKS.values())])
    return tokenizer


def config(**text: Any) -> dict[str, Any]:
    """Of a gemma4 with 8 layers; a picture is up to 4 tokens, a second of sound 25. `text`: other settings of
    the text part."""
    ids = _tokenizer()
    size = {"hidden_size": 64, "vocab_size": VOCABULARY}
    return {
        "model_type": "gemma4",
        "architectures": ["Gemma4ForConditionalGeneration"],
        **size,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **{f"{name}_id": ids.token_to_id(mark) for name, mark in MARKS.items()},
        "text_config": {
            **size,
            "model_type": "gemma4_text",
            "num_hidden_layers": NUM_LAYERS,
            "intermediate_size": 128,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 2048,
            "head_dim": 16,
            "global_head_dim": 32,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 3,
            "hidden_size_per_layer_input": 16,
            "sliding_window": 64,
            "sliding_window_pattern": 2,
            "use_double_wide_mlp": False,
            "layer_types": ["sliding_attention", "full_attention"] * 4,
            **text,
        },
        "vision_config": {
            "model_type": "gemma4_vision",
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 8,
            "global_head_dim": 8,
            "patch_size": 4,
            "position_embedding_size": 64,
            "pooling_kernel_size": 2,
            "default_output_length": 4,
        },
        "audio_config": {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "subsampling_conv_channels": [8, 4],
            "conv_kernel_size": 3,
            "attention_chunk_size": 4,
            "attention_context_left": 5,
            "output_proj_dims": 48,
        },
    }


def save(folder: Path, **text: Any) -> Path:
    """Write the whole model folder; `text`: see `config`."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_vlm.models import gemma4
    from mlx_vlm.utils import update_module_configs

    settings = config(**text)
    given = json.loads(json.dumps(settings))
    model_config = update_module_configs(
        gemma4.ModelConfig.from_dict(given), gemma4, given, ["text", "vision", "audio"]
    )
    mx.random.seed(23)
    model = gemma4.Model(model_config)
    weights = {
        name: array + mx.random.normal(array.shape) * 0.08 for name, array in tree_flatten(model.parameters())
    }
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    files: dict[str, Any] = {
        "config.json": settings,
        "generation_config.json": {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2},
        "processor_config.json": {
            "processor_class": "Gemma4Processor",
            "image_processor": {"patch_size": 4, "max_soft_tokens": 4, "pooling_kernel_size": 2},
            "feature_extractor": {"sampling_rate": RATE, "feature_size": 128, "fft_overdrive": True},
            "audio_seq_length": 100,
            "audio_ms_per_token": 40,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "extra_special_tokens": MARKS,
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "chat_template": TEMPLATE,
        },
    }
    for name, value in files.items():
        (folder / name).write_text(json.dumps(value, indent=1), encoding="utf-8")
    _tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def sound(seed: int, seconds: float = 0.4, rate: int = RATE) -> bytes:
    """A WAV file of tones, different for each seed."""
    samples = bytearray()
    for i in range(int(seconds * rate)):
        value = math.sin(i * (0.02 + 0.013 * seed)) + 0.5 * math.sin(i * i * 1e-5 * (1 + seed))
        samples += int(value * 12_000).to_bytes(2, "little", signed=True)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(rate)
        out.writeframes(bytes(samples))
    return file.getvalue()


def prompt(question: str, num_pictures: int = 0, num_sounds: int = 0) -> str:
    """As the chat template writes it."""
    marks = "<|image|>" * num_pictures + "<|audio|>" * num_sounds
    return f"<|im_start|>user\n{marks}{question}<|im_end|>\n<|im_start|>assistant\n"


def ids_of(text: str) -> list[int]:
    return list(_tokenizer().encode(text, add_special_tokens=False).ids)
