"""What tests of all folders share: the two model folders, and the check that nothing is left running."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parent.parent
SESSION_VARIABLE = "PYTEST_MESH_SESSION"  # inherited by every process that a test starts
LEAVE_WITHIN_S = 10.0

# CI tries the same examples each time, so that it judges the change and not the draw; elsewhere they vary.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

TINY_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "vocab_size": 320,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "torch_dtype": "float32",
}
TINY_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def load_module(path: Path) -> ModuleType:
    """A helper module by its path: test folders are no packages."""
    spec = importlib.util.spec_from_file_location(f"tests_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def macs() -> ModuleType:
    """See macs.py: imagined Macs and what macOS commands print on them."""
    return load_module(ROOT / "tests" / "macs.py")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct in float32. Without it tests skip, except in CI."""
    folder = ROOT / ".cache" / "models" / "SmolLM2-135M-Instruct-float32"
    if not (folder / "model.safetensors").is_file():
        reason = f"there is no {folder}; scripts/demo-model makes it"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random float32 llama, the same on every machine: 6 layers, 8 heads in 4 KV groups,
    untied head, a token per byte, chat template. Loads in milliseconds; its text is noise."""
    folder = tmp_path_factory.mktemp("tiny-llama")
    save_file(_tiny_weights(), folder / "model.safetensors", metadata={"format": "mlx"})
    _write_json(folder / "config.json", TINY_CONFIG)
    _write_json(folder / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 2})
    _byte_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|im_end|>",
            "pad_token": "<|im_end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 2048,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    return folder


@pytest.fixture(scope="session")
def tiny_adapters(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a "lora" and a "dora" of tiny_llama's last four layers, trained for ten steps by mlx-lm."""
    folders = {kind: tmp_path_factory.mktemp(f"tiny-{kind}") for kind in ("lora", "dora")}
    for kind, folder in folders.items():
        _train_adapter(tiny_llama, kind, folder)
    return folders


def _train_adapter(model_folder: Path, kind: str, folder: Path) -> None:
    import mlx.core as mx
    from mlx.optimizers import Adam
    from mlx_lm.tuner.trainer import TrainingArgs, train
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model, save_config

    class Texts:
        """Four rows of 24 tokens, as the trainer wants them."""

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> tuple[list[int], int]:
            return [(7 * index + k) % 300 + 3 for k in range(24)], 0

        def itemlen(self, index: int) -> int:
            return 24

    keys = ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"]
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": keys}
    model, _ = load_model(model_folder)
    model.freeze()
    mx.random.seed(11)
    linear_to_lora_layers(model, 4, parameters, use_dora=kind == "dora")
    save_config(
        {"fine_tune_type": kind, "num_layers": 4, "lora_parameters": parameters},
        folder / "adapter_config.json",
    )
    settings = TrainingArgs(
        batch_size=2,
        iters=10,
        val_batches=0,
        steps_per_report=1000,
        steps_per_save=1000,
        adapter_file=str(folder / "adapters.safetensors"),
        max_seq_length=32,
    )
    mx.disable_compile()  # ten steps are less work than compiling one
    try:
        train(model, Adam(1e-2), Texts(), None, args=settings)
    finally:
        mx.enable_compile()


def _tiny_weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(20240607)
    hidden, inner = 128, 256
    shapes = {
        "self_attn.q_proj": (128, hidden),
        "self_attn.k_proj": (64, hidden),
        "self_attn.v_proj": (64, hidden),
        "self_attn.o_proj": (hidden, 128),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    all_shapes = {
        f"model.layers.{i}.{name}.weight": shape for i in range(6) for name, shape in shapes.items()
    }
    all_shapes |= {
        "model.embed_tokens.weight": (320, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (320, hidden),
    }
    weights = {}
    for name, shape in all_shapes.items():
        noise = random.standard_normal(shape)
        # Norms near one, matrices that keep the size of what goes through them.
        weights[name] = (1 + 0.1 * noise if len(shape) == 1 else noise / np.sqrt(shape[-1])).astype(
            np.float32
        )
    return weights


def _byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*TINY_SPECIALS, *alphabet])}
    vocab |= {f"<|unused{i}|>": i for i in range(len(vocab), 320)}  # every id that the model can emit
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in TINY_SPECIALS])
    return tokenizer


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running() -> Iterator[None]:
    """At the end no process that any test started is still there, also not one that left its parent or
    session. What is left is ended and makes the run fail. Linux only: elsewhere there is no /proc to read."""
    session = uuid.uuid4().hex
    os.environ[SESSION_VARIABLE] = session
    yield
    if sys.platform != "linux":
        return
    deadline = time.monotonic() + LEAVE_WITHIN_S
    while (left := _processes_of(session)) and time.monotonic() < deadline:
        time.sleep(0.1)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, f"tests left processes running: {left}"


def _processes_of(session: str) -> dict[int, str]:
    """Process id -> command line of the living processes whose environment carries the session's id."""
    mark = f"{SESSION_VARIABLE}={session}".encode()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = command.strip()
        except OSError:  # gone meanwhile, or another user's
            continue
    return found


@pytest.fixture(scope="session")
def tiny_bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random float32 BERT with mean pooling: 2 layers, 16 dimensions, 24 tokens of a text, a
    token per byte between tokens for its beginning (0) and end (1)."""
    folder = tmp_path_factory.mktemp("tiny-bert")
    config = {
        "model_type": "bert",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 260,
        "max_position_embeddings": 24,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
    }
    _write_json(folder / "config.json", config)
    (folder / "1_Pooling").mkdir()
    _write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    save_file(_bert_weights(config), folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: at for at, token in enumerate(["<s>", "</s>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.enable_truncation(8)  # as published files do; ours decides by the model
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def _bert_weights(config: dict[str, Any]) -> dict[str, np.ndarray]:
    size, inner = config["hidden_size"], config["intermediate_size"]
    shapes = {
        "embeddings.word_embeddings.weight": (config["vocab_size"], size),
        "embeddings.position_embeddings.weight": (config["max_position_embeddings"], size),
        "embeddings.token_type_embeddings.weight": (2, size),
        "embeddings.LayerNorm.weight": (size,),
        "embeddings.LayerNorm.bias": (size,),
        "pooler.dense.weight": (size, size),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}."
        for name, rows, columns in (
            ("attention.self.query", size, size),
            ("attention.self.key", size, size),
            ("attention.self.value", size, size),
            ("attention.output.dense", size, size),
            ("intermediate.dense", inner, size),
            ("output.dense", size, inner),
        ):
            shapes |= {f"{prefix}{name}.weight": (rows, columns), f"{prefix}{name}.bias": (rows,)}
        for name in ("attention.output.LayerNorm", "output.LayerNorm"):
            shapes |= {f"{prefix}{name}.weight": (size,), f"{prefix}{name}.bias": (size,)}
    random = np.random.default_rng(5)
    return {name: random.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.fixture(scope="session")
def vlm() -> ModuleType:
    """See vlm.py: a tiny vision model, pictures and prompts for it."""
    return load_module(ROOT / "tests" / "vlm.py")


@pytest.fixture(scope="session")
def tiny_vlm_folder(vlm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random float32 vision model that can be served."""
    folder: Path = vlm.save(tmp_path_factory.mktemp("tiny-vlm"))
    return folder


@pytest.fixture(scope="session")
def clips() -> ModuleType:
    """See clips.py: small files with sound, and films."""
    return load_module(ROOT / "tests" / "clips.py")


@pytest.fixture(scope="session")
def alm() -> ModuleType:
    """See alm.py: a tiny model that hears and sees, sounds and prompts for it."""
    return load_module(ROOT / "tests" / "alm.py")


@pytest.fixture(scope="session")
def tiny_alm_folder(alm: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random float32 model that hears and sees, and can be served."""
    folder: Path = alm.save(tmp_path_factory.mktemp("tiny-alm"))
    return folder
