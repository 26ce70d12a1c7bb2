"""Kept prefixes of vision models: nobody changes what is kept, and a picture is known by its content."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec
import pytest

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.messages import GenerateRequest, SamplingParams
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.node.engine.features import Features, features_of
from mlx_mesh.node.engine.language_part import LanguagePart
from mlx_mesh.node.engine.loop import Generation
from mlx_mesh.node.engine.media_keys import Items, keys_of
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

    def ask(
        self,
        prompt: tuple[int, ...],
        max_tokens: int = 8,
        features: Features | None = None,
        sent_ids: tuple[int, ...] = (),
    ) -> list[int]:
        self.num_asked += 1
        request = GenerateRequest(
            id=str(self.num_asked),
            prompt_ids=prompt,
            max_tokens=max_tokens,
            sampling=SamplingParams(temperature=0.0),
            prefix_keys=() if features is None else features.keys,
            sent_ids=sent_ids,
        )
        if features is not None:
            self.generation.features[request.id] = features
        assert self.scheduler.submit(request) is None
        tokens: list[int] = []
        while self.scheduler.has_work:
            plan = self.scheduler.next_plan(0.0)
            if features is not None:
                marked = (msgspec.structs.replace(one, features=b"these") for one in plan.admit)
                plan = msgspec.structs.replace(plan, admit=tuple(marked))
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


def test_prompts_with_pictures_begin_with_their_own_ones_and_go_on_where_they_were(
    tiny_vlm: ModuleType, simulator: ModuleType
) -> None:
    family = "qwen2_vl"
    whole = tiny_vlm.build(family)

    def read(seed: int, question: tuple[int, ...]) -> tuple[tuple[int, ...], Features]:
        """A prompt whose ids are the same whatever the picture is."""
        ids = (*tiny_vlm.picture(family, 1)[0], *question)
        embedded = whole.get_input_embeddings(mx.array([ids]), **tiny_vlm.picture(family, seed)[1])
        features = features_of(embedded.to_dict(), whole.language_model)
        keys = keys_of(ids, [Items(frozenset({tiny_vlm.PICTURE}), (b"%d" % seed,))], features)
        return ids, dataclasses.replace(features, keys=keys)

    prompts = [read(seed, words(count, 4)) for seed, count in ((1, 20), (2, 20), (1, 30), (2, 25), (1, 20))]

    def body(rank: int, exchange: Any) -> None:
        part = LanguagePart(whole.language_model)
        new, kept = Alone(part, exchange, keeps=False), Alone(part, exchange, keeps=True)
        answers = []
        for at, (ids, features) in enumerate(prompts):
            answers.append(new.ask(ids, features=features))
            before = kept.num_cached
            assert kept.ask(ids, features=features) == answers[-1], at
            cached.append(kept.num_cached - before)
        assert answers[0] != answers[1] and answers[0] == answers[4]
        for one in (new, kept):  # as after an engine's end
            ids, features = prompts[0]
            sent = tuple(answers[0][:5])
            assert one.ask(ids, features=features, sent_ids=sent) == answers[0][5:]

    cached: list[int] = []
    simulator.Simulator(1).run(body)
    mx.synchronize()
    first = len(tiny_vlm.picture(family, 1)[0]) + 20
    assert cached[:2] == [0, 0] and cached[2] >= first - 1 and cached[3] >= first - 1
