"""A long prompt takes its turns beside the answers that are under way; it does not stop them."""

from __future__ import annotations

from pathlib import Path

from mlx_lm.utils import load_model

from mlx_mesh.mesh.messages import Admission, GenerateRequest, SamplingParams, StepPlan
from mlx_mesh.node.engine.exchanges import SoloExchange
from mlx_mesh.node.engine.loop import Generation

CHUNK = 64
PROMPTS = {"first": (5, 6, 7), "long": tuple(5 + n % 90 for n in range(10 * CHUNK))}


def request(request_id: str) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0)
    return GenerateRequest(id=request_id, prompt_ids=PROMPTS[request_id], max_tokens=500, sampling=sampling)


def admit(generation: Generation, step: int, request_id: str) -> None:
    admission = Admission(id=request_id, prompt_ids=PROMPTS[request_id], max_tokens=500, stop_token_ids=())
    generation.apply(StepPlan(epoch=1, step=step, admit=(admission,)), request)


def test_rows_get_their_tokens_while_a_long_prompt_is_read(tiny_llama: Path) -> None:
    model, _ = load_model(tiny_llama)
    generation = Generation(model, SoloExchange(), max_sequences=4, prefill_step_size=CHUNK, is_leader=True)
    admit(generation, 1, "first")
    while not generation.step():
        pass
    admit(generation, 2, "long")
    steps = []
    while "long" not in (ids := [row.id for row in generation.step()]):
        steps.append(ids)
    assert len(steps) >= len(PROMPTS["long"]) // CHUNK - 1
    assert all(ids == ["first"] for ids in steps), "a token of the other row in each of these steps"
    generation.close()
