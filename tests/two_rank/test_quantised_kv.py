"""Real ranks with quantised caches give mlx-lm's tokens: in a batch, from a kept prefix, and resumed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import QuantizedKVCache
from mlx_lm.models.llama import Model, ModelArgs

from mlx_mesh.mesh.kv_options import KvOptions
from mlx_mesh.mesh.types import Sharding

pytestmark = pytest.mark.two_rank

NUM_TOKENS = 16
CONFIG = {
    "model_type": "llama",
    "hidden_size": 96,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 320,
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A random llama, and its folder without a tokenizer."""
    folder = tmp_path_factory.mktemp("tiny-heads-of-32")
    mx.random.seed(3)
    made = Model(ModelArgs.from_dict(CONFIG))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(made.parameters())))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return made, folder


def expected(model: Any, prompt: list[int]) -> list[int]:
    caches = [QuantizedKVCache(group_size=32, bits=4) for _ in model.layers]
    steps = generate_step(
        mx.array(prompt), model, max_tokens=NUM_TOKENS, prompt_cache=caches, prefill_step_size=16
    )
    return [token for token, _ in steps]


@pytest.mark.parametrize(
    ("sharding", "stages"),
    [(Sharding.PIPELINE, [3, 1]), pytest.param(Sharding.TENSOR, [1, 1], marks=pytest.mark.long)],
)
def test_quantised_rows_are_the_same_however_they_come_to_be(
    bench: Any, model: tuple[Any, Path], sharding: Sharding, stages: list[int]
) -> None:
    made, folder = model
    prompts = [[(7 * i + 11 * k) % 317 + 3 for k in range(20 + 9 * i)] for i in range(4)]
    wanted = [expected(made, prompt) for prompt in prompts]
    with bench.mesh(2) as mesh:
        mesh.connect()
        mesh.load(
            folder,
            bench.split(sharding, 4, stages),
            prefill_step_size=16,
            kv_options=KvOptions(bits=4, group_size=32),
        )
        for kind in ("first", "from a kept prefix"):
            rows = [bench.greedy(f"{kind} {i}", prompt, NUM_TOKENS) for i, prompt in enumerate(prompts)]
            mesh.submit(*rows)
            assert [mesh.answer(row.id).token_ids for row in rows] == wanted, kind
        resumed = bench.greedy("resumed", prompts[2], NUM_TOKENS, sent_ids=tuple(wanted[2][:9]))
        mesh.submit(resumed)
        assert mesh.answer("resumed").token_ids == wanted[2][9:]
        assert mesh.stop() == [0, 0]
