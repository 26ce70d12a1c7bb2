"""SmolLM2 in float32: the same 64 tokens for every split, alone and in a batch of 8, greedy and seeded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.messages import GenerateRequest, SamplingParams
from mlx_mesh.mesh.types import Sharding

pytestmark = [pytest.mark.two_rank, pytest.mark.real_model, pytest.mark.timeout(1500)]

NUM_LAYERS = 30
NUM_TOKENS = 64
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "Write a short poem about the sea.",
    "Explain why the sky is blue to a child of five years.",
    "Count from one to twenty.",
    "Who wrote Hamlet, and when?",
    "Give me a recipe for pancakes with apples.",
    "What does a compiler do?",
)
SPLITS = {
    "none": (Sharding.NONE, [1]),
    "pipeline 2": (Sharding.PIPELINE, [15, 15]),
    "pipeline 3 uneven": (Sharding.PIPELINE, [6, 14, 10]),
    "tensor 2": (Sharding.TENSOR, [1, 1]),  # 9 heads in 3 KV groups: 6 and 3
}


@pytest.fixture(scope="module")
def prompts(smollm2: Path) -> list[tuple[int, ...]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    texts = [f"<|im_start|>user\n{q}<|im_end|>\n<|im_start|>assistant\n" for q in QUESTIONS]
    return [tuple(tokenizer.encode(text, add_special_tokens=False).ids) for text in texts]


@pytest.fixture(scope="module")
def first_answers() -> dict[float, list[list[int]]]:
    """By temperature: what the first split gave."""
    return {}


@pytest.mark.parametrize("name", SPLITS)
def test_64_tokens_are_the_same_for_every_split(
    name: str,
    bench: Any,
    smollm2: Path,
    prompts: list[tuple[int, ...]],
    first_answers: dict[float, list[list[int]]],
) -> None:
    sharding, stages = SPLITS[name]
    bench.be_patient(600.0)
    with bench.mesh(len(stages)) as mesh:
        mesh.connect()
        mesh.load(smollm2, bench.split(sharding, NUM_LAYERS, stages))
        for temperature in (0.0, 0.8):
            rows = [
                GenerateRequest(
                    id=f"{temperature} {i}",
                    prompt_ids=prompt,
                    max_tokens=NUM_TOKENS,
                    sampling=SamplingParams(temperature=temperature, top_p=0.95, seed=i),
                )
                for i, prompt in enumerate(prompts)
            ]
            mesh.submit(*rows)
            together = [mesh.answer(row.id).token_ids for row in rows]
            assert together == first_answers.setdefault(temperature, together)
            alone = GenerateRequest(
                id=f"{temperature} alone",
                prompt_ids=prompts[2],
                max_tokens=NUM_TOKENS,
                sampling=rows[2].sampling,
            )
            mesh.submit(alone)
            assert mesh.answer(alone.id).token_ids == together[2]
        assert mesh.stop() == [0] * len(stages)
