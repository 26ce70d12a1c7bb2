"""An adapter that mlx-lm trained gives mlx-lm's own tokens at every world size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.types import Sharding

pytestmark = pytest.mark.two_rank

NUM_TOKENS = 32
PROMPT = [(7 * k + 5) % 300 + 3 for k in range(40)]  # several prefill chunks of 16


def tokens_of_mlx_lm(model_folder: Path, adapter: Path | None) -> list[int]:
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.tuner.utils import load_adapters
    from mlx_lm.utils import load_model

    model, _ = load_model(model_folder)
    if adapter is not None:
        load_adapters(model, str(adapter))
        model.eval()
    steps = generate_step(mx.array(PROMPT), model, max_tokens=NUM_TOKENS)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize(
    ("kind", "sharding", "stages"),
    [
        ("lora", Sharding.PIPELINE, [3, 3]),
        ("dora", Sharding.TENSOR, [1, 1]),
        pytest.param("lora", Sharding.NONE, [1], marks=pytest.mark.long),
        pytest.param("lora", Sharding.TENSOR, [1, 1], marks=pytest.mark.long),
        pytest.param("dora", Sharding.PIPELINE, [3, 3], marks=pytest.mark.long),
    ],
)
def test_the_tokens_are_mlx_lms(
    kind: str, sharding: Sharding, stages: list[int], bench: Any, tiny_llama: Path, tiny_adapters: Any
) -> None:
    expected = tokens_of_mlx_lm(tiny_llama, tiny_adapters[kind])
    assert expected != tokens_of_mlx_lm(tiny_llama, None)
    with bench.mesh(len(stages)) as mesh:
        mesh.connect()
        placement = bench.split(sharding, 6, stages)
        mesh.load(tiny_llama, placement, prefill_step_size=16, adapter=str(tiny_adapters[kind]))
        mesh.submit(bench.greedy("a", PROMPT, NUM_TOKENS))
        assert mesh.answer("a").token_ids == expected
        assert mesh.stop() == [0] * len(stages)
