"""Answers that begin with a kept prefix are the answers without one, however the model is split."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.messages import GenerateRequest, SamplingParams, StepPlan
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.mesh.types import Placement
from mlx_mesh.node.engine import scheduler
from mlx_mesh.node.engine.loop import Generation
from mlx_mesh.node.engine.prefix_planner import PrefixPlanner
from mlx_mesh.node.engine.prefix_store import can_always_cut
from mlx_mesh.node.engine.scheduler import Scheduler
from mlx_mesh.node.engine.shard import shard_model

RESET = "reset"

Turn = Sequence[GenerateRequest | str]
"""Requests that are submitted together; a text is the id of one that is cancelled in the step after its first
token, or RESET."""


@dataclass
class Played:
    """What came of some turns."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)
    plans: list[StepPlan] = field(default_factory=list)
    entries: list[set[int]] = field(default_factory=list)  # by rank, at the end
    num_bytes: list[int] = field(default_factory=list)
    num_evicted: int = 0
    num_preempted: int = 0


@dataclass(frozen=True)
class Stage:
    """Runs turns over the ranks of a placement."""

    tiny: ModuleType
    simulator: ModuleType

    def play(
        self,
        config: dict[str, Any],
        placement: Placement,
        *turns: Turn,
        prefix: PrefixSettings | None = None,
        kv: KvBudget | None = None,
        ahead: int = 0,
    ) -> Played:
        played = Played()
        ranks: dict[int, Generation] = {}

        def body(rank: int, exchange: Any) -> None:
            model = self.tiny.build(config)
            shard = shard_model(model, placement, rank, exchange, self.tiny.ignore_progress)
            ranks[rank] = generation = Generation(
                shard.model, exchange, max_sequences=8, prefill_step_size=16, is_leader=rank == 0
            )
            if rank == 0:
                lead(generation)
            else:
                follow(generation, exchange)

        def follow(generation: Generation, exchange: Any) -> None:
            for at in range(1_000_000):
                while len(played.plans) <= at:
                    exchange.simulator.wait()
                if played.plans[at].stop:
                    return
                generation.apply(played.plans[at])
                generation.step()

        def lead(generation: Generation) -> None:
            budget = kv or KvBudget()
            planner = PrefixPlanner(prefix or PrefixSettings(), budget, can_cut=generation.can_always_cut)
            scheduler = Scheduler(1, max_sequences=8, kv=budget, prefixes=planner)
            published: deque[StepPlan] = deque()
            for turn in turns:
                if RESET in turn:
                    planner.clear()
                doomed = {one for one in turn if isinstance(one, str)}
                for one in turn:
                    if isinstance(one, GenerateRequest):
                        assert scheduler.submit(one) is None
                while scheduler.has_work or published:
                    while scheduler.has_work and len(published) <= ahead:
                        published.append(scheduler.next_plan(0.0))
                        played.plans.append(published[-1])
                    plan = published.popleft()
                    generation.apply(plan, scheduler.request)
                    produced = generation.step()
                    chunks = scheduler.applied(plan) + scheduler.produced(produced, 0.0)
                    scheduler.stored(generation.take_stored())
                    for chunk in chunks:
                        played.tokens.setdefault(chunk.id, []).extend(chunk.token_ids)
                        played.cached.setdefault(chunk.id, chunk.cached_tokens)
                        if chunk.id in doomed and chunk.token_ids:
                            scheduler.cancel(chunk.id)
            played.plans.append(scheduler.stop_plan())
            counters = planner.counters(0, 0)
            played.num_evicted, played.num_preempted = counters.num_evicted, scheduler.num_preempted

        self.simulator.Simulator(placement.world_size).run(body)
        mx.synchronize()
        for rank in range(placement.world_size):
            store = ranks[rank].prefixes
            played.entries.append(set(store._caches))
            played.num_bytes.append(store.num_bytes)
        return played


@pytest.fixture
def stage(tiny: ModuleType, simulator: ModuleType) -> Stage:
    return Stage(tiny, simulator)


def words(count: int, seed: int = 0) -> tuple[int, ...]:
    return tuple((7 * i * i + 11 * i + 31 * seed + 5) % 90 + 3 for i in range(count))


def greedy(request_id: str, prompt: Sequence[int], max_tokens: int = 6, **other: Any) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.0)
    return GenerateRequest(
        id=request_id, prompt_ids=tuple(prompt), max_tokens=max_tokens, **{"sampling": sampling, **other}
    )


def seeded(request_id: str, prompt: Sequence[int], max_tokens: int = 6) -> GenerateRequest:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, frequency_penalty=0.3, seed=11)
    return greedy(request_id, prompt, max_tokens, sampling=sampling, logprobs=1)


def splits(tiny: ModuleType, num_layers: int) -> dict[str, Placement]:
    return {
        "none": tiny.whole(num_layers),
        "pipeline": tiny.stages(num_layers, [num_layers // 2]),
        "tensor": tiny.slices(num_layers, [1, 1]),
    }


OFF = PrefixSettings(is_enabled=False)

GEMMA3 = {"sliding_window": 24, "sliding_window_pattern": 3, "vocab_size": 100, "hidden_size": 64}
LFM2 = {"block_dim": 64, "block_ff_dim": 96, "hidden_size": 64, "vocab_size": 100}


def configs(tiny: ModuleType) -> dict[str, dict[str, Any]]:
    return {
        "llama": tiny.llama(),
        "lfm2": tiny.CONFIGS["lfm2"] | LFM2,
        "gemma3_text": tiny.CONFIGS["gemma3_text"] | GEMMA3,
    }


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        ("llama", "tensor"),
        ("llama", "none"),
        ("lfm2", "pipeline"),
        ("lfm2", "tensor"),
        ("gemma3_text", "pipeline"),
    ],
)
def test_the_next_turn_begins_with_the_last_one_and_says_the_same(
    stage: Stage, tiny: ModuleType, kind: str, split: str
) -> None:
    config = configs(tiny)[kind]
    placement = splits(tiny, len(tiny.build(config).layers))[split]
    if kind == "lfm2" and split == "tensor":
        placement = tiny.slices(len(tiny.build(config).layers), [2, 1])
    first, answer_of = words(50), 6
    cold = stage.play(config, placement, [greedy("1", first)], prefix=OFF)
    assert cold.entries == [set()] * placement.world_size
    second = (*first, *cold.tokens["1"], *words(9, seed=3))
    other = (*first[:30], *words(25, seed=4))  # goes on differently from within the prompt
    turns: list[Turn] = [
        [greedy("1", first)],
        [greedy("2", second), seeded("seeded", second), greedy("short", words(3))],
        [greedy("other", other)],
        [greedy("other again", (*other[:30], *words(7, seed=5)))],
    ]
    cold = stage.play(config, placement, *turns, prefix=OFF)
    warm = stage.play(config, placement, *turns, ahead=placement.world_size - 1)

    assert warm.tokens == cold.tokens
    assert set(cold.cached.values()) == {0}
    assert warm.cached["1"] == warm.cached["short"] == 0
    assert warm.cached["2"] == warm.cached["seeded"] == len(first) + answer_of
    if kind == "llama":
        assert warm.cached["other"] == warm.cached["other again"] == 30
    else:  # what cannot be cut: the second prompt that goes on from there finds a checkpoint
        assert (warm.cached["other"], warm.cached["other again"]) == (0, 30)
    assert all(entries == warm.entries[0] for entries in warm.entries)
    assert min(warm.num_bytes) > 0


def test_a_prompt_that_is_kept_whole_is_computed_from_its_last_token(stage: Stage, tiny: ModuleType) -> None:
    placement = tiny.whole(6)
    prompt = words(40)
    turns: list[Turn] = [[greedy("1", prompt)], [seeded("2", prompt)], [seeded("3", prompt[:33])]]
    warm = stage.play(tiny.llama(), placement, *turns)
    assert warm.tokens == stage.play(tiny.llama(), placement, *turns, prefix=OFF).tokens
    assert warm.cached == {"1": 0, "2": 39, "3": 32}


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_parallel_requests_compute_their_common_prefix_once_and_answer_as_alone(
    stage: Stage, tiny: ModuleType, kind: str
) -> None:
    """Sixteen, of two system prompts; the first of each is computed, and the others wait for it."""
    config = configs(tiny)[kind]
    placement = tiny.stages(len(tiny.build(config).layers), [2])
    systems = [words(90, seed=1), words(80, seed=2)]
    requests = [
        greedy(f"r{i}", (*systems[i % 2], *words(3 + i, seed=i)), cache_points=(len(systems[i % 2]),))
        for i in range(16)
    ]
    alone: dict[str, list[int]] = {}
    for request in requests[::5]:
        alone |= stage.play(config, placement, [request], prefix=OFF).tokens
    together = stage.play(config, placement, requests, ahead=1)
    for request_id, tokens in alone.items():
        assert together.tokens[request_id] == tokens
    cached = [together.cached[f"r{i}"] for i in range(16)]
    assert cached[:2] == [0, 0]
    assert [c >= len(systems[i % 2]) for i, c in enumerate(cached)][2:] == [True] * 14


def test_the_choices_of_one_request_share_its_prompt(stage: Stage, tiny: ModuleType) -> None:
    prompt = words(100)
    requests = [seeded(f"c{i}", prompt) for i in range(4)]
    warm = stage.play(tiny.llama(), tiny.slices(6, [1, 1]), requests, ahead=1)
    cold = stage.play(tiny.llama(), tiny.slices(6, [1, 1]), requests, prefix=OFF)
    assert warm.tokens == cold.tokens
    assert warm.cached == {"c0": 0, "c1": 99, "c2": 99, "c3": 99}


def test_salts_and_requests_that_skip_the_cache_share_nothing(stage: Stage, tiny: ModuleType) -> None:
    prompt = words(60)
    turns: list[Turn] = [
        [greedy("skips", prompt, skip_prefix_cache=True)],
        [greedy("a", prompt, cache_salt="a")],
        [greedy("b", prompt, cache_salt="b")],
        [greedy("a again", prompt, cache_salt="a")],
        [greedy("skips again", prompt, skip_prefix_cache=True)],
    ]
    played = stage.play(tiny.llama(), tiny.whole(6), *turns)
    assert played.cached == {"skips": 0, "a": 0, "b": 0, "a again": 59, "skips again": 0}


@pytest.mark.parametrize("kind", ["llama", "lfm2"])
def test_what_a_cancelled_request_computed_is_kept(stage: Stage, tiny: ModuleType, kind: str) -> None:
    config = configs(tiny)[kind]
    placement = tiny.stages(len(tiny.build(config).layers), [2])
    prompt = words(60)
    turns: list[Turn] = [[greedy("1", prompt, 50), "1"], [greedy("2", (*prompt, 7, 8))]]
    warm = stage.play(config, placement, *turns, ahead=1)
    assert len(warm.tokens["1"]) < 50
    assert warm.cached["2"] >= 59
    assert warm.tokens["2"] == stage.play(config, placement, turns[1], prefix=OFF).tokens["2"]


def test_a_reset_frees_all_ranks_and_the_next_prompt_is_new(stage: Stage, tiny: ModuleType) -> None:
    prompt = words(40)
    turns: list[Turn] = [[greedy("1", prompt)], [RESET]]
    played = stage.play(tiny.llama(), tiny.stages(6, [3]), *turns, ahead=1)
    assert (played.entries, played.num_bytes) == ([set(), set()], [0, 0])
    played = stage.play(tiny.llama(), tiny.stages(6, [3]), *turns, [greedy("2", prompt)], ahead=1)
    assert played.cached == {"1": 0, "2": 0}


def of_tokens(*budgets: int) -> KvBudget:
    """Ranks with room for so many tokens."""
    return KvBudget(
        ranks=tuple(
            RankKv(rank=at, host="h", budget_bytes=tokens, fixed_bytes=0, per_token=((0, 1),))
            for at, tokens in enumerate(budgets)
        )
    )


def test_a_small_rank_evicts_for_all_and_running_rows_come_first(stage: Stage, tiny: ModuleType) -> None:
    """Rank 1 has room for eight blocks of 256 tokens, four of them for prefixes."""
    placement = tiny.stages(6, [3])
    kv = of_tokens(100_000, 8 * 256)
    prompts = [words(40, seed=i) for i in range(5)]
    turns: list[Turn] = [[greedy(f"{i}", prompt)] for i, prompt in enumerate(prompts)]
    turns += [[greedy("old", (*prompts[0], 5)), greedy("new", (*prompts[4], 5))]]
    many: Turn = [greedy(f"many {i}", words(20, seed=20 + i), 20) for i in range(4)]
    played = stage.play(tiny.llama(), placement, *turns, many, kv=kv, ahead=1)
    assert (played.cached["old"], played.cached["new"]) == (0, 40)
    assert played.entries[0] == played.entries[1]
    assert played.num_evicted >= 5
    assert played.num_preempted == 0
    assert played.tokens == stage.play(tiny.llama(), placement, *turns, many, prefix=OFF).tokens


@pytest.mark.long
def test_rows_that_have_to_leave_come_back_with_the_same_answers(
    stage: Stage, tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "GROWTH_TOKENS", 16)  # both are let in, and both grow into a second block
    placement = tiny.slices(6, [1, 1])
    turn: Turn = [greedy(f"{i}", words(150 + i, seed=i), 120) for i in range(2)]
    tight = stage.play(tiny.llama(), placement, turn, kv=of_tokens(3 * 256, 100_000), ahead=1)
    assert tight.num_preempted > 0
    assert tight.tokens == stage.play(tiny.llama(), placement, turn, prefix=OFF).tokens
    assert set(tight.cached.values()) == {0}
    assert tight.entries[0] == tight.entries[1]


@pytest.mark.parametrize("kind", ["llama", "lfm2", "gemma3_text", "mamba2", "deepseek_v3"])
def test_models_whose_caches_can_always_be_cut(tiny: ModuleType, kind: str) -> None:
    config = tiny.llama() if kind == "llama" else tiny.CONFIGS[kind]
    assert can_always_cut(tiny.build(config).model) == (kind in ("llama", "deepseek_v3"))


BROKEN = ("phi3small",)
"""Its plain forward corrupts the heap of this config."""


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_architecture_answers_alike_with_and_without_a_kept_prefix(
    stage: Stage, tiny: ModuleType
) -> None:
    differing: dict[str, str] = {}
    num_compared = 0
    first = words(40)
    turns: list[Turn] = [[greedy("1", first)], [greedy("2", (*first, *words(9, seed=3)))]]
    for kind, config in tiny.CONFIGS.items():
        if kind in BROKEN:
            continue
        try:
            placement = tiny.whole(len(tiny.build(config).layers))
            cold = stage.play(config, placement, *turns, prefix=OFF)
        except Exception:  # mlx-lm cannot run or batch it, kept prefix or not
            continue
        num_compared += 1
        try:
            warm = stage.play(config, placement, *turns)
        except Exception as error:
            differing[kind] = f"{type(error).__name__}: {str(error)[:200]}"
            continue
        if warm.tokens != cold.tokens or warm.cached["2"] < 39:
            differing[kind] = f"{warm.cached} {warm.tokens} instead of {cold.tokens}"
    assert differing == {}
    assert num_compared > 100
