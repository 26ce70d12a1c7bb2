"""Kept prefixes of models that serve one sequence at a time: nobody changes what is kept."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.messages import GenerateRequest, SamplingParams
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.loop import Generation
from mlx_mesh.node.engine.prefix_planner import PrefixPlanner
from mlx_mesh.node.engine.scheduler import Scheduler

FAMILIES = ["llama4", "mistral3#ministral3", "llava"]  # the last has plain caches, which are cut back


class Alone:
    """One engine's rows and plans, prefixes kept or not."""

    def __init__(self, part: Any, exchange: Any, *, keeps: bool) -> None:
        self.generation = Generation(part, exchange, max_sequences=1, prefill_step_size=16, is_leader=True)
        budget = KvBudget()
        self.planner = PrefixPlanner(
            PrefixSettings(is_enabled=keeps), budget, can_cut=self.generation.can_always_cut
        )
        self.scheduler = Scheduler(1, max_sequences=1, kv=budget, prefixes=self.planner)
        self.num_asked = self.num_cached = 0

    def ask(self, prompt: tuple[int, ...], max_tokens: int = 8) -> list[int]:
        self.num_asked += 1
        request = GenerateRequest(
            id=str(self.num_asked),
            prompt_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0),
        )
        assert self.scheduler.submit(request) is None
        tokens: list[int] = []
        while self.scheduler.has_work:
            plan = self.scheduler.next_plan(0.0)
            self.generation.apply(plan, self.scheduler.request)
            produced = self.generation.step()
            chunks = self.scheduler.applied(plan) + self.scheduler.produced(produced, 0.0)
            self.scheduler.stored(self.generation.take_stored())
            for chunk in chunks:
                tokens += chunk.token_ids
                self.num_cached += chunk.cached_tokens
        return tokens


def words(count: int, seed: int) -> tuple[int, ...]:
    return tuple((7 * i * i + 11 * i + 31 * seed + 5) % 900 + 3 for i in range(count))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_that_parts_from_a_kept_one_leaves_it_as_it_was(
    tiny_vlm: ModuleType, simulator: ModuleType, family: str
) -> None:
    first = words(60, 1)
    prompts = [first, first[:40] + words(20, 2), first + words(9, 3), first[:40] + words(30, 2), first]

    def body(rank: int, exchange: Any) -> None:
        part = LanguagePart(tiny_vlm.build(family).language_model, is_for_one_row=True)
        new, kept = Alone(part, exchange, keeps=False), Alone(part, exchange, keeps=True)
        for at, prompt in enumerate(prompts):
            assert kept.ask(prompt) == new.ask(prompt), at
        found.append(kept.num_cached)

    found: list[int] = []
    simulator.Simulator(1).run(body)
    mx.synchronize()
    assert found[0] >= 100
