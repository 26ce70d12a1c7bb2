"""Tiny configs made fit for a number of ranks: heads, groups and inner sizes that divide by it.

A config of four heads cannot be fully split over three ranks, whatever the rules. Which of its numbers must
grow together differs from one architecture to the next, so several ways are offered, and whoever asks takes
the first that the model accepts and that divides best.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

_HEADS = re.compile(
    r"(^|_)(heads?|kv_heads|heads_per_layer|query_heads|key_value_heads|attention_groups|n_groups|o_groups)$|^n_head(_kv)?$"
)
_INNER = re.compile(
    r"intermediate_size|^n_inner$|ffn_hidden_size|ff_dim|share_expert_dim|moe_hidden_size|^mamba_d_ssm$"
)
_HIDDEN = re.compile(r"^(hidden_size|n_embd|d_model|model_dim|hidden_dim|block_dim)$")
_NOT = re.compile(r"_per_head|shared_head|d_head|head_dim")

WAYS = (
    (),
    (_HEADS, _INNER, _HIDDEN),
    (_HEADS, _INNER),
    (_INNER, _HIDDEN),
    (_INNER,),
    (_HIDDEN,),
)


def widened(config: dict[str, Any], num_ranks: int) -> Iterator[dict[str, Any]]:
    """The config itself, then with some of its numbers multiplied so that `num_ranks` divides them."""
    for way in WAYS:
        yield _times(copy.deepcopy(config), num_ranks, way)


def _times(config: dict[str, Any], factor: int, way: tuple[re.Pattern[str], ...]) -> dict[str, Any]:
    for name, value in config.items():
        if isinstance(value, dict):
            config[name] = _times(value, factor, way)
        elif not _NOT.search(name) and any(pattern.search(name) for pattern in way):
            if isinstance(value, list) and all(isinstance(item, int) for item in value):
                config[name] = [item * factor for item in value]
            elif isinstance(value, int) and not isinstance(value, bool):
                config[name] = value * factor
    return config
