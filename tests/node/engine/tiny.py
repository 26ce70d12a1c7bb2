"""Tiny random models of any architecture, the same at each call, and placements over them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.utils
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

from mlx_mesh.mesh.types import Placement, Shard, Sharding
from mlx_mesh.node.engine.loader import LazyModel

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parent / "tiny_configs.json").read_text(encoding="utf-8")
)
"""One small config per architecture that mlx-lm has."""


SLIDING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
}
"""Makes two of three llama layers look back eight tokens only."""


def llama(**changes: Any) -> dict[str, Any]:
    """A llama of 6 layers with 9 heads in 3 KV groups, which no even split divides."""
    base = {
        "model_type": "llama",
        "hidden_size": 96,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": 101,
        "tie_word_embeddings": True,
    }
    return base | changes


def build(config: dict[str, Any]) -> LazyModel:
    """A random float32 model. Norms and biases are random too, so that each of them matters. Models of one
    config share their arrays, which nothing changes."""
    key = json.dumps(config, sort_keys=True)
    model_class, args_class = mlx_lm.utils._get_classes(config)
    mx.random.seed(7)
    model = model_class(args_class.from_dict(config))
    model.eval()
    if key not in _made:
        _add_noise(model)
    if quantization := config.get("quantization"):
        nn.quantize(model, **quantization, class_predicate=_chooser(config))
    if rank := config.get("adapter_rank"):
        _adapt(model, rank)
    if key in _made:
        model.update(tree_unflatten(_made[key]))
    else:
        while len(_made) >= _NUM_KEPT:
            del _made[next(iter(_made))]
        _made[key] = tree_flatten(model.parameters())
    mx.eval(model.parameters())
    return LazyModel(Path(config["model_type"]), model, config, {})


_made: dict[str, list[tuple[str, Any]]] = {}  # config -> the parameters of its model
_NUM_KEPT = 3


def _add_noise(model: Any) -> None:
    changed = []
    for name, array in tree_flatten(model.parameters()):
        if mx.issubdtype(array.dtype, mx.floating):
            noise = mx.random.normal(array.shape, dtype=array.dtype) * 0.05
            changed.append((name, array + noise))
    model.update(tree_unflatten(changed))


def _chooser(config: dict[str, Any]) -> Any:
    """Which modules are quantised: those whose path has `quantized_parts`, and whose inputs allow it."""
    part, size = config.get("quantized_parts", ""), config["quantization"]["group_size"]

    def is_quantised(path: str, module: Any) -> bool:
        return hasattr(module, "to_quantized") and part in path and module.weight.shape[-1] % size == 0

    return is_quantised


def _adapt(model: Any, rank: int) -> None:
    """A LoRA adapter of every layer's attention and MLP, with random matrices so that it matters."""
    keys = ["self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"]
    parameters = {"rank": rank, "scale": 8.0, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, len(model.layers), parameters)
    model.eval()
    matrices = [
        (name, array + mx.random.normal(array.shape) * 0.05)
        for name, array in tree_flatten(model.parameters())
        if name.rsplit(".", 1)[-1] in ("lora_a", "lora_b")
    ]
    model.update(tree_unflatten(matrices))


def whole(num_layers: int) -> Placement:
    """World size 1."""
    return _placement(
        Sharding.NONE, num_layers, [Shard(rank=0, host="h", start_layer=0, end_layer=num_layers)]
    )


def stages(num_layers: int, limits: Sequence[int]) -> Placement:
    """A pipeline with these inner cuts, in layer order: stages(6, [2, 3]) has 2, 1 and 3 layers."""
    edges = [0, *limits, num_layers]
    spans = list(itertools.pairwise(edges))[::-1]
    shards = [Shard(rank=r, host="h", start_layer=a, end_layer=b) for r, (a, b) in enumerate(spans)]
    return _placement(Sharding.PIPELINE, num_layers, shards)


def slices(num_layers: int, weights: Sequence[int]) -> Placement:
    """Tensor sharding by these weights."""
    shards = [
        Shard(rank=r, host="h", start_layer=0, end_layer=num_layers, weight=w) for r, w in enumerate(weights)
    ]
    return _placement(Sharding.TENSOR, num_layers, shards)


def _placement(sharding: Sharding, num_layers: int, shards: list[Shard]) -> Placement:
    return Placement(sharding=sharding, model_digest="", num_layers=num_layers, shards=tuple(shards))


def parameters(config: dict[str, Any]) -> dict[str, Any]:
    """All parameters of `build(config)` by path."""
    return dict(tree_flatten(build(config).model.parameters()))


def save(config: dict[str, Any], folder: Path, num_files: int = 1) -> Path:
    """Write the model of `build(config)` as a model folder."""
    items = list(parameters(config).items())
    for number in range(num_files):
        name = "model.safetensors" if num_files == 1 else f"model-{number:05}.safetensors"
        mx.save_safetensors(str(folder / name), dict(items[number::num_files]))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def ignore_progress(done: int, total: int) -> None:
    """For tests that do not look at it."""


def forward(model: Any, num_decoded: int = 5) -> list[Any]:
    """Logits of a prefill in three chunks (9, 3 and 7 tokens) and some decode steps, with a cache."""
    cache = make_prompt_cache(model)
    tokens = (mx.arange(24) * 37 + 11) % 97
    outputs = []
    for start, stop in ((0, 9), (9, 12), (12, 19), *((19 + i, 20 + i) for i in range(num_decoded))):
        outputs.append(model(tokens[None, start:stop], cache=cache))
        mx.eval(outputs[-1])
    return outputs


def generate(model: Any, exchange: Any) -> dict[int, list[int]]:
    """Three prompts of different lengths, prefilled in chunks of 8; one more and one less on the way."""

    def sampler(logprobs: Any) -> Any:
        ids = mx.argmax(logprobs, axis=-1)
        if exchange is None:
            return ids
        own = ids if exchange.rank == 0 else None
        return exchange.broadcast_ids(own, logprobs.shape[0], [logprobs])

    generator = BatchGenerator(model, sampler=sampler, prefill_step_size=8)
    prompts = [[(7 * i + 3 * p) % 97 for i in range(n)] for p, n in enumerate([3, 21, 11])]
    generator.insert(prompts, max_tokens=[24, 6, 19])
    tokens: dict[int, list[int]] = {}
    for step in range(40):
        if step == 4:
            generator.insert([[5, 6, 7, 8, 9]], max_tokens=[12])
        if step == 9:
            generator.remove([2])
        _, responses = generator.next()
        for response in responses:
            tokens.setdefault(response.uid, []).append(response.token)
    mx.synchronize(generator.stream)
    assert [len(tokens[uid]) for uid in (0, 1, 3)] == [24, 6, 12]
    return tokens


def gap(outputs: Sequence[Any], reference: Sequence[Any]) -> float:
    """The largest difference relative to the largest reference value."""
    return max(
        float((mx.abs(a - b).max() / mx.abs(b).max()).item()) for a, b in zip(outputs, reference, strict=True)
    )
