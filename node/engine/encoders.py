"""Embedding models: which folders can be used, and texts to unit vectors.

Two kinds: BERT, and the decoders of mlx-lm that are trained as embedding models, whose last token's hidden
state is the vector. What a folder asks for beyond that is refused, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.utils
import numpy as np
from tokenizers import Tokenizer

from mlx_mesh.mesh.embedding_memory import max_tokens_of
from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.node.engine.bert import Bert, rename

DECODERS = ("qwen3", "qwen2", "llama", "mistral")
"""Of mlx-lm. Attention is causal in all of them, so that padding on the right changes nothing."""

_MODULES = ("Transformer", "Pooling", "Normalize")
_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}

Forward = Callable[[Any, Any], Any]
"""Ids (B, L) and which of them count (B, L, bool) to hidden states (B, L, D)."""


class Encoder:
    """A loaded model with its tokenizer."""

    def __init__(self, folder: Path) -> None:
        """Raises SettingsError for a folder that cannot be used."""
        config = _read(folder / "config.json")
        if not config:
            raise SettingsError(f"{folder} has no readable config.json: it is no model folder.")
        kind = str(config.get("model_type"))
        self.pooling = _pooling(folder, default="mean" if kind == "bert" else "last")
        try:
            self._forward, self.weights_bytes = _load(folder, config, kind)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SettingsError(f"the weights in {folder} do not fit its config.json: {error}") from error
        self.num_dimensions = int(config["hidden_size"])
        self.vocab_size = int(config["vocab_size"])
        said = _read(folder / "sentence_bert_config.json").get("max_seq_length")
        self.max_tokens = max_tokens_of(config, said)
        self._tokenizer = _tokenizer(folder)

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """With the tokens that the model wants around a text; of any length."""
        return [encoding.ids for encoding in self._tokenizer.encode_batch(list(texts))]

    def cut(self, ids: Sequence[int]) -> list[int]:
        """At most max_tokens; the token that ends a text stays."""
        return list(ids) if len(ids) <= self.max_tokens else [*ids[: self.max_tokens - 1], ids[-1]]

    def embed(self, batch: Sequence[Sequence[int]]) -> Any:
        """Unit vectors, float32 (len(batch), num_dimensions) in numpy. No input is empty."""
        longest = max(map(len, batch))
        ids = np.zeros((len(batch), longest), dtype=np.int32)
        lengths = np.array([len(one) for one in batch])
        for row, one in enumerate(batch):
            ids[row, : len(one)] = one
        counts = mx.array(np.arange(longest)[None, :] < lengths[:, None])
        states = self._forward(mx.array(ids), counts).astype(mx.float32)
        match self.pooling:
            case "cls":
                pooled = states[:, 0]
            case "last":
                pooled = states[mx.arange(len(batch)), mx.array(lengths - 1)]
            case _:
                weights = counts[:, :, None].astype(mx.float32)
                pooled = (states * weights).sum(axis=1) / weights.sum(axis=1)
        pooled = pooled / mx.maximum(mx.linalg.norm(pooled, axis=-1, keepdims=True), 1e-12)
        mx.eval(pooled)
        return np.array(pooled)


def _load(folder: Path, config: dict[str, Any], kind: str) -> tuple[Forward, int]:
    if kind == "bert":
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise SettingsError(f"{folder}: only absolute positions are known of BERT.")
        if config.get("hidden_act", "gelu") != "gelu":
            raise SettingsError(f"{folder}: the activation {config['hidden_act']!r} is not known of BERT.")
        bert = Bert(config)
        weights: dict[str, Any] = {}
        for path in sorted(folder.glob("*.safetensors")):
            weights |= mx.load(str(path))
        weights = rename(weights)
        if quantization := config.get("quantization"):
            nn.quantize(
                bert,
                quantization["group_size"],
                quantization["bits"],
                class_predicate=lambda name, module: f"{name}.scales" in weights,
            )
        bert.load_weights(list(weights.items()))
        return bert, _evaluated(bert)
    if kind in DECODERS:
        from mlx_lm.utils import load_model  # seconds to import, and needed for these only

        model, _ = load_model(folder, lazy=True)
        return lambda ids, counts: model.model(ids), _evaluated(model.model)
    raise SettingsError(
        f"{folder} is of type {kind!r}; embedding models can be bert, {', '.join(DECODERS)} (the latter as "
        "mlx-lm converts them)."
    )


def _evaluated(module: Any) -> int:
    mx.eval(module.parameters())
    return sum(array.nbytes for _, array in mlx.utils.tree_flatten(module.parameters()))


def _pooling(folder: Path, default: str) -> str:
    """How the states of a text's tokens become one vector."""
    for module in _read(folder / "modules.json", []):
        name = str(module.get("type", "")).rpartition(".")[2]
        if name not in _MODULES:
            raise SettingsError(
                f"{folder}: its modules.json asks for a step {name!r}, which is not known here "
                f"({', '.join(_MODULES)} are)."
            )
    config = _read(folder / "1_Pooling" / "config.json")
    modes = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if not config:
        return default
    if len(modes) != 1 or modes[0] not in _POOLING:
        raise SettingsError(
            f"{folder}: its pooling is {', '.join(modes) or 'unknown'}; one of {', '.join(_POOLING)} will do."
        )
    return _POOLING[modes[0]]


def _tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise SettingsError(f"{folder} has no tokenizer.json.")
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()  # files often have both switched on
    tokenizer.no_truncation()
    return tokenizer


def _read(path: Path, default: Any = None) -> Any:
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        return {} if default is None else default
    except ValueError as error:
        raise SettingsError(f"{path} is not JSON: {error}") from error
