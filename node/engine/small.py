"""Narrow versions of a model's config: the same pattern of layers, heads, KV groups and experts."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

_WIDTH = re.compile(
    r"(hidden_size|intermediate_size|head_dim|_dim|^dim|d_model|n_embd|n_inner|_rank|ffn_size|lru_width|_width"
    r"|kv_channels|d_state|d_head|d_ssm|state_size|mamba_d_\w+|ff_dim|_latent_size|block_dim)$"
)
_NOT_WIDTH = re.compile(r"num_|layer|conv|kernel|window|position|groups|factor|multiplier|expand")
_LENGTHS = re.compile(r"(sliding_window|window_size|attention_chunk_size|index_topk)$")
_EXPERTS = re.compile(r"^(moe_)?(num|n)_(routed_|local_)?experts$")
_VOCABULARY = re.compile(r"vocab_size")
_NUM_LAYERS = re.compile(r"^(num_hidden_layers|num_layers|n_layers?|num_transformer_layers)$")
_FACTORS = (64, 32, 16, 8, 4, 2, 1)
_LEAST_HIDDEN = 32
_DEPTH = 8
_NUM_EXPERTS = 32  # all experts are cut alike, so a quarter of many shows as much


def small_configs(config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Narrow configs, the narrowest first: eight layers, which show every pattern, before full depth. Whoever
    tries them finds which one the model accepts."""
    plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
    for num_layers in (_DEPTH, 0, _DEPTH // 2):
        for factor in _FACTORS:
            narrow = _narrow(copy.deepcopy(plain), factor, num_layers)
            if _hidden(narrow) >= _LEAST_HIDDEN:
                yield narrow


def _hidden(config: dict[str, Any]) -> int:
    for part in (config.get("text_config"), config):
        for name in ("hidden_size", "n_embd", "d_model", "model_dim", "hidden_dim"):
            value = part.get(name) if isinstance(part, dict) else None
            if isinstance(value, int):
                return value
    return _LEAST_HIDDEN


def _narrow(config: dict[str, Any], factor: int, num_layers: int) -> dict[str, Any]:
    depth = next((config[name] for name in config if _NUM_LAYERS.match(name)), 0)
    for name, value in config.items():
        if isinstance(value, dict):
            config[name] = _narrow(value, factor, num_layers)
        elif isinstance(value, list) and num_layers and depth and len(value) == depth:
            config[name] = value[:num_layers]
        elif not isinstance(value, int) or isinstance(value, bool):
            continue
        elif _VOCABULARY.search(name):
            config[name] = min(value, 256)
        elif _EXPERTS.match(name) and value % _NUM_EXPERTS == 0:
            config[name] = min(value, _NUM_EXPERTS)
        elif _LENGTHS.search(name):
            config[name] = min(value, 8) if value > 0 else value
        elif _NUM_LAYERS.match(name) and num_layers:
            config[name] = min(value, num_layers)
        elif _WIDTH.search(name) and not _NOT_WIDTH.search(name) and value % factor == 0:
            config[name] = max(2, value // factor)
    return config
