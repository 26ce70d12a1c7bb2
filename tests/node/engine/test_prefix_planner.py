"""Whatever is asked for, cancelled and evicted: plans name only prefixes that every rank has at that step."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.messages import Admission, GenerateRequest, StepPlan
from mlx_mesh.mesh.prefix_index import MIN_TOKENS, packed
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.node.engine import prefix_planner
from mlx_mesh.node.engine.prefix_planner import PrefixPlanner, Stored
from mlx_mesh.node.engine.scheduler import Produced, Scheduler

CHUNK = 32


@dataclass
class Row:
    admission: Admission
    tokens: list[int]
    left: int
    edges: list[int]


@dataclass
class FakeRank:
    """The rows and entries of a rank that does what plans say; a row's next token is its length."""

    can_cut: bool
    rows: dict[str, Row] = field(default_factory=dict)
    entries: dict[int, list[int]] = field(default_factory=dict)
    stored: list[Stored] = field(default_factory=list)

    def do(self, plan: StepPlan) -> list[Produced]:
        self.stored = []
        for request_id in plan.cancel:
            row = self.rows.pop(request_id, None)
            if row is not None and request_id not in plan.leave and row.tokens:
                self.keep(row.admission.entry, row.tokens)
        for admission in plan.admit:
            beginning = self.beginning(admission) if admission.num_reused else []
            assert beginning == list(admission.prompt_ids[: admission.num_reused])
            assert admission.num_reused < len(admission.prompt_ids)
            points = [point for point, _ in admission.checkpoints]
            assert points == sorted(set(points))
            edges = [*points, len(admission.prompt_ids) - 1]
            self.rows[admission.id] = Row(admission, beginning, admission.max_tokens, edges)
        for entry in plan.evict:
            self.entries.pop(entry, None)
        produced = []
        for request_id, row in list(self.rows.items()):
            prompt = row.admission.prompt_ids
            if len(row.tokens) < len(prompt) - 1:
                edge = next(edge for edge in row.edges if edge > len(row.tokens))
                row.tokens += prompt[len(row.tokens) : min(edge, len(row.tokens) + CHUNK)]
                for point, entry in row.admission.checkpoints:
                    if point == len(row.tokens):
                        self.keep(entry, row.tokens)
                continue
            if len(row.tokens) < len(prompt):
                row.tokens.append(prompt[-1])
            token = 1000 + len(row.tokens)
            row.tokens.append(token)
            row.left -= 1
            produced.append(Produced(request_id, token, None if row.left else "length"))
            if not row.left:
                del self.rows[request_id]
                self.keep(row.admission.entry, row.tokens)
        return produced

    def keep(self, entry: int, tokens: list[int]) -> None:
        if entry and len(tokens) >= MIN_TOKENS:
            self.entries[entry] = list(tokens)
            self.stored.append(Stored(entry, tuple(tokens), self.can_cut, len(tokens)))

    def beginning(self, admission: Admission) -> list[int]:
        tokens = self.entries.get(admission.reuse)
        if tokens is None:
            (tokens,) = [row.tokens for row in self.rows.values() if row.admission.entry == admission.reuse]
        assert self.can_cut or len(tokens) == admission.num_reused
        return list(tokens[: admission.num_reused])


def of_tokens(tokens: int) -> KvBudget:
    rank = RankKv(rank=0, host="h", budget_bytes=tokens, fixed_bytes=0, per_token=((0, 1),))
    return KvBudget(ranks=(rank,))


prompts = st.lists(st.integers(0, 1), max_size=6).map(
    lambda turns: (*(token for turn in turns for token in range(100 * turn, 100 * turn + 30)), 7)
)
requests = st.tuples(prompts, st.integers(1, 300), st.sampled_from(["", "salt"]), st.integers(0, 40))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(requests, min_size=1, max_size=12), st.booleans(), st.integers(0, 2), st.sampled_from([3, 6, 99])
)
def test_plans_reuse_only_what_is_there_and_everybody_is_answered(
    asked: list[tuple[Any, ...]], can_cut: bool, ahead: int, blocks: int
) -> None:
    kv = of_tokens(blocks * 256)
    planner = PrefixPlanner(PrefixSettings(), kv, can_cut=can_cut)
    scheduler = Scheduler(1, max_sequences=3, context_length=700, kv=kv, prefixes=planner)
    rank = FakeRank(can_cut)
    published: deque[StepPlan] = deque()
    waiting = {f"{number}": one for number, one in enumerate(asked)}
    ended: set[str] = set()
    doomed: dict[str, int] = {}  # cancelled in this step
    step = 0
    while waiting or scheduler.has_work or published:
        step += 1
        assert step < 8000, "nothing moves any more"
        if waiting and step % 7 == 1:
            name = next(iter(waiting))
            prompt, max_tokens, salt, cancel_after = waiting.pop(name)
            request = GenerateRequest(id=name, prompt_ids=prompt, max_tokens=max_tokens, cache_salt=salt)
            assert scheduler.submit(request) is None
            if cancel_after % 3 == 0:
                doomed[name] = step + cancel_after
        for name in [name for name, at in doomed.items() if at <= step]:
            del doomed[name]
            if (chunk := scheduler.cancel(name)) is not None:
                ended.add(chunk.id)
        while scheduler.has_work and len(published) <= ahead:
            published.append(scheduler.next_plan(0.0))
        if not published:
            continue
        if step % 41 == 0:
            planner.clear()
        plan = published.popleft()
        produced = rank.do(plan)
        chunks = scheduler.applied(plan) + scheduler.produced(produced, 0.0)
        scheduler.stored(rank.stored)
        ended |= {chunk.id for chunk in chunks if chunk.finish_reason is not None}
    assert ended == {f"{number}" for number in range(len(asked))}
    assert sum(len(tokens) for tokens in rank.entries.values()) <= blocks * 256
    assert not planner._rows
    assert not planner._salts  # nothing is remembered of rows that ended
    planner.clear()
    rank.do(scheduler.next_plan(0.0))
    assert rank.entries == {}


def test_a_request_waits_for_a_row_that_computes_its_prompt_and_lets_others_pass() -> None:
    planner = PrefixPlanner(PrefixSettings(), KvBudget(), can_cut=True)
    scheduler = Scheduler(1, max_sequences=8, prefixes=planner)
    shared, other = tuple(range(200)), tuple(range(500, 600))
    for name, prompt in {"first": shared, "second": (*shared, 7), "other": other}.items():
        assert scheduler.submit(GenerateRequest(id=name, prompt_ids=prompt, max_tokens=4)) is None
    plan = scheduler.next_plan(0.0)
    assert [admission.id for admission in plan.admit] == ["first", "other"]
    scheduler.applied(plan)
    assert scheduler.next_plan(0.0).admit == ()
    scheduler.produced([Produced("first", 5)], 0.0)
    (admission,) = scheduler.next_plan(0.0).admit
    assert (admission.id, admission.reuse, admission.num_reused) == ("second", plan.admit[0].entry, 200)


def test_a_reset_forgets_what_running_rows_have_and_keeps_nothing_of_them() -> None:
    planner = PrefixPlanner(PrefixSettings(), KvBudget(), can_cut=True)
    scheduler = Scheduler(1, max_sequences=8, prefixes=planner)
    shared = tuple(range(200))
    scheduler.submit(GenerateRequest(id="first", prompt_ids=shared, max_tokens=4))
    (first,) = scheduler.next_plan(0.0).admit
    scheduler.produced([Produced("first", 5)], 0.0)
    planner.clear()
    scheduler.submit(GenerateRequest(id="second", prompt_ids=(*shared, 7), max_tokens=4))
    (second,) = scheduler.next_plan(0.0).admit
    assert (second.reuse, second.num_reused) == (0, 0)
    planner.clear()  # while it is computed: nobody waits for it
    scheduler.submit(GenerateRequest(id="third", prompt_ids=(*shared, 8), max_tokens=4))
    (third,) = scheduler.next_plan(0.0).admit
    assert third.reuse == 0
    scheduler.produced([Produced("first", 6, "length")], 0.0)
    scheduler.stored([Stored(first.entry, (*shared, 5, 6), True, 1)])
    assert scheduler.next_plan(0.0).evict == (first.entry,)
    scheduler.produced([Produced("third", 5, "length")], 0.0)
    scheduler.stored([Stored(third.entry, (*shared, 8, 5), True, 1)])
    assert planner.find(GenerateRequest(id="x", prompt_ids=shared, max_tokens=1), shared) is not None


def test_the_prompt_of_a_request_that_waits_is_packed_once_and_forgotten_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[int] = []

    def counting(tokens: Any) -> bytes:
        seen.append(len(tokens))
        return packed(tokens)

    monkeypatch.setattr(prefix_planner, "packed", counting)
    planner = PrefixPlanner(PrefixSettings(), KvBudget(), can_cut=True)
    scheduler = Scheduler(1, max_sequences=8, prefixes=planner)
    shared = tuple(range(200))
    for name in ("first", "second", "third"):
        scheduler.submit(GenerateRequest(id=name, prompt_ids=(*shared, len(name)), max_tokens=4))
    for _ in range(5):
        scheduler.next_plan(0.0)
    assert len(seen) == 3
    scheduler.cancel("third")
    scheduler.produced([Produced("first", 5)], 0.0)
    scheduler.next_plan(0.0)
    assert not planner._waiting and len(seen) == 3


def test_kept_prefixes_leave_room_for_the_copy_of_a_row_that_ends() -> None:
    kv = of_tokens(6 * 256)
    planner = PrefixPlanner(PrefixSettings(max_bytes=512), kv, can_cut=True)
    planner.begin_with([Stored(1, tuple(range(5000, 5500)), True, 512)])
    scheduler = Scheduler(1, max_sequences=3, kv=kv, prefixes=planner)
    scheduler.submit(GenerateRequest(id="a", prompt_ids=tuple(range(100)), max_tokens=400))
    scheduler.next_plan(0.0)
    assert planner.taken == [512], "a row of two blocks, its copy, and what is kept"
    scheduler._running["a"].length = 510  # it grows into its third block
    assert scheduler.next_plan(0.0).evict == (1,)


def test_nobody_waits_for_a_row_that_computes_much_else() -> None:
    planner = PrefixPlanner(PrefixSettings(), KvBudget(), can_cut=True)
    scheduler = Scheduler(1, max_sequences=8, prefixes=planner)
    shared = tuple(range(200))
    for name, prompt in {"long": (*shared, *range(900, 1300)), "short": (*shared, 7)}.items():
        assert scheduler.submit(GenerateRequest(id=name, prompt_ids=prompt, max_tokens=4)) is None
    assert [admission.id for admission in scheduler.next_plan(0.0).admit] == ["long", "short"]


def test_a_prompt_that_is_larger_than_what_may_be_kept_leaves_nothing() -> None:
    planner = PrefixPlanner(PrefixSettings(), of_tokens(1024), can_cut=True)
    scheduler = Scheduler(1, max_sequences=8, prefixes=planner)
    small, large = tuple(range(500)), tuple(range(1000, 1600))
    for name, prompt in {"small": small, "large": large, "large too": (*large, 7)}.items():
        assert scheduler.submit(GenerateRequest(id=name, prompt_ids=prompt, max_tokens=4)) is None
    plan = scheduler.next_plan(0.0)
    assert [bool(admission.entry) for admission in plan.admit] == [True, False, False]
    scheduler.produced([Produced("large", 5)], 0.0)
    assert planner.find(GenerateRequest(id="x", prompt_ids=large, max_tokens=1), large) is None


def test_an_epoch_counts_hits_misses_and_tokens() -> None:
    planner = PrefixPlanner(PrefixSettings(), KvBudget(), can_cut=True)
    request = GenerateRequest(id="a", prompt_ids=tuple(range(50)), max_tokens=1)
    part = planner.admit(request, request.prompt_ids)
    planner.ended("a")
    planner.stored([Stored(part.entry, request.prompt_ids, True, 10)])
    assert planner.admit(request, request.prompt_ids).num_reused == 49
    counters = planner.counters(1, 10)
    assert (counters.num_hits, counters.num_misses, counters.num_tokens, counters.num_stored) == (1, 1, 49, 1)
    assert planner.clear() == 1
    assert planner.take_evictions() == (part.entry,)
