"""What the leader decides for each step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mesh.mesh.kv_budget import BLOCK_TOKENS, KvBudget, RankKv
from mlx_mesh.mesh.messages import (
    GenerateRequest,
    RequestFailed,
    SamplingParams,
    StepPlan,
    TokenChunk,
    TokenLogprobs,
)
from mlx_mesh.node.engine.scheduler import AHEAD_TOKENS, Held, Produced, Scheduler


def scheduler(max_sequences: int = 2, context_length: int = 100) -> Scheduler:
    return Scheduler(7, max_sequences=max_sequences, context_length=context_length)


def request(request_id: str, **other: Any) -> GenerateRequest:
    fields: dict[str, Any] = {"id": request_id, "prompt_ids": (1, 2, 3), "max_tokens": 5}
    return GenerateRequest(**(fields | other))


def admitted(plan: StepPlan) -> list[str]:
    return [admission.id for admission in plan.admit]


def test_plans_count_steps_from_one_and_carry_the_epoch() -> None:
    it = scheduler()
    it.submit(request("a"))
    plans = [it.next_plan(0), it.next_plan(0), it.stop_plan()]
    assert [(plan.epoch, plan.step, plan.stop) for plan in plans] == [
        (7, 1, False),
        (7, 2, False),
        (7, 3, True),
    ]


def test_requests_are_admitted_in_order_and_only_as_many_as_fit() -> None:
    it = scheduler(max_sequences=2)
    for name in "abc":
        assert it.submit(request(name)) is None
    assert admitted(it.next_plan(0)) == ["a", "b"]
    assert (it.num_running, it.num_waiting) == (2, 1)
    assert admitted(it.next_plan(0)) == []
    it.produced([Produced("a", 9, "length")], 0)
    assert admitted(it.next_plan(0)) == ["c"]


def test_there_is_work_until_the_last_request_ends() -> None:
    it = scheduler()
    assert not it.has_work
    it.submit(request("a"))
    assert it.has_work
    it.next_plan(0)
    assert it.has_work
    it.produced([Produced("a", 9, "stop")], 0)
    assert not it.has_work


def test_an_admission_is_prompt_and_sent_tokens_and_what_is_left_of_max_tokens() -> None:
    it = scheduler()
    it.submit(request("a", sent_ids=(8, 9), stop_token_ids=(2,)))
    (admission,) = it.next_plan(0).admit
    assert admission.prompt_ids == (1, 2, 3, 8, 9)
    assert admission.max_tokens == 3
    assert admission.stop_token_ids == (2,)


def test_a_resumed_request_that_had_all_its_tokens_just_ends() -> None:
    it = scheduler()
    answer = it.submit(request("a", sent_ids=(1, 2, 3, 4, 5)))
    assert answer == TokenChunk(id="a", finish_reason="length")
    assert not it.has_work


def test_the_context_bounds_the_answer() -> None:
    it = scheduler(context_length=10)
    it.submit(request("a", max_tokens=50))
    assert it.next_plan(0).admit[0].max_tokens == 7


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (request("a", prompt_ids=()), "empty_prompt"),
        (request("a", max_tokens=0), "invalid_max_tokens"),
        (request("a", prompt_ids=(1,) * 100), "context_length_exceeded"),
        (request("a", prompt_ids=(1, 320)), "invalid_token"),
        (request("a", prompt_ids=(1, -1)), "invalid_token"),
        (request("a", sent_ids=(320,)), "invalid_token"),
        (request("a", sampling=SamplingParams(logit_bias={320: 1.0})), "invalid_token"),
    ],
)
def test_a_request_that_no_rank_could_run_fails_alone_before_any_plan(
    bad: GenerateRequest, code: str
) -> None:
    it = scheduler()
    it.vocab_size = 320
    it.submit(request("good"))
    failure = it.submit(bad)
    assert isinstance(failure, RequestFailed)
    assert (failure.id, failure.code) == ("a", code)
    assert admitted(it.next_plan(0)) == ["good"]


def test_an_open_request_cannot_be_submitted_again() -> None:
    it = scheduler()
    it.submit(request("a"))
    assert isinstance(it.submit(request("a")), RequestFailed)
    it.next_plan(0)
    assert isinstance(it.submit(request("a")), RequestFailed)


def test_tokens_become_chunks_and_the_end_of_text_id_does_not() -> None:
    it = scheduler()
    it.submit(request("a"))
    it.submit(request("b", logprobs=0))
    it.next_plan(10.0)
    logprobs = TokenLogprobs(logprob=-0.5)
    first = it.produced([Produced("a", 50), Produced("b", 60, None, logprobs)], 12.5)
    assert first == [
        TokenChunk(id="a", token_ids=(50,), prefill_s=2.5),
        TokenChunk(id="b", token_ids=(60,), logprobs=(logprobs,), prefill_s=2.5),
    ]
    last = it.produced([Produced("a", 51, "length"), Produced("b", 2, "stop", logprobs)], 13.0)
    assert last == [
        TokenChunk(id="a", token_ids=(51,), finish_reason="length"),
        TokenChunk(id="b", finish_reason="stop"),
    ]


def test_cancelling_a_waiting_request_ends_it_at_once() -> None:
    it = scheduler(max_sequences=1)
    it.submit(request("a"))
    it.submit(request("b"))
    it.next_plan(0)
    assert it.cancel("b") == TokenChunk(id="b", finish_reason="cancelled")
    assert it.next_plan(0).cancel == ()


def test_cancelling_a_running_request_goes_through_a_plan_and_frees_its_place_there() -> None:
    it = scheduler(max_sequences=1)
    it.submit(request("a"))
    it.next_plan(0)
    it.submit(request("b"))
    assert it.cancel("a") is None
    assert it.cancel("a") is None  # twice is once
    plan = it.next_plan(0)
    assert plan.cancel == ("a",)
    assert admitted(plan) == ["b"]
    assert it.applied(plan) == [TokenChunk(id="a", finish_reason="cancelled")]
    assert it.num_running == 1


def test_no_token_of_a_cancelled_request_is_told() -> None:
    it = scheduler()
    it.submit(request("a"))
    it.next_plan(0)
    it.cancel("a")
    assert it.produced([Produced("a", 50)], 1) == []


def test_a_request_that_ends_by_itself_before_its_cancellation_ends_once() -> None:
    it = scheduler()
    it.submit(request("a"))
    it.next_plan(0)
    it.cancel("a")
    plan = it.next_plan(0)
    assert it.produced([Produced("a", 50, "length")], 1) == [TokenChunk(id="a", finish_reason="cancelled")]
    assert it.applied(plan) == []
    assert not it.has_work


def test_cancelling_what_is_not_open_is_no_error() -> None:
    it = scheduler()
    assert it.cancel("nobody") is None
    assert not it.has_work


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["submit", "cancel", "step"]), st.integers(0, 4)), max_size=40))
def test_whatever_happens_every_request_ends_once_and_rows_stay_within_bounds(
    events: list[tuple[str, int]],
) -> None:
    """Plays the generator: two plans ahead, three tokens a request."""
    it = scheduler(max_sequences=2)
    rows: dict[str, int] = {}
    published: list[StepPlan] = []
    ends: dict[str, int] = {}
    opened: set[str] = set()

    def tell(chunks: list[TokenChunk]) -> None:
        for chunk in chunks:
            if chunk.finish_reason is not None:
                ends[chunk.id] = ends.get(chunk.id, 0) + 1

    def step() -> None:
        while it.has_work and len(published) < 3:
            published.append(it.next_plan(0))
        if not published:
            return
        plan = published.pop(0)
        for request_id in plan.cancel:
            rows.pop(request_id, None)
        for admission in plan.admit:
            rows[admission.id] = admission.max_tokens
        assert len(rows) <= 2
        tell(it.applied(plan))
        produced = []
        for request_id in list(rows):
            rows[request_id] -= 1
            is_over = rows[request_id] == 0
            produced.append(Produced(request_id, 5, "length" if is_over else None))
            if is_over:
                del rows[request_id]
        tell(it.produced(produced, 0))

    for number, (event, which) in enumerate(events):
        if event == "submit":
            request_id = f"{which}-{number}"
            opened.add(request_id)
            assert it.submit(request(request_id, max_tokens=3)) is None
        elif event == "cancel":
            for request_id in [r for r in opened if r.startswith(f"{which}-")]:
                answer = it.cancel(request_id)
                tell([answer] if answer is not None else [])
        else:
            step()
    while it.has_work or published:
        step()
    assert ends == dict.fromkeys(opened, 1)
    assert rows == {}


# ---------------------------------------------------------------- memory


def of_blocks(blocks: int) -> KvBudget:
    """Room for so many blocks of tokens on rank 1; rank 0 has more."""
    ranks = [
        RankKv(rank=r, host=f"mac{r}", budget_bytes=b * BLOCK_TOKENS, fixed_bytes=0, per_token=((0, 1),))
        for r, b in ((0, 10 * blocks), (1, blocks))
    ]
    return KvBudget(ranks=tuple(ranks))


def with_memory(blocks: int, max_sequences: int = 32) -> Scheduler:
    return Scheduler(7, max_sequences=max_sequences, context_length=100_000, kv=of_blocks(blocks))


def long(request_id: str, num_prompt: int, max_tokens: int = 5, **other: Any) -> GenerateRequest:
    return request(request_id, prompt_ids=(1,) * num_prompt, max_tokens=max_tokens, **other)


def step(it: Scheduler, plan: StepPlan, *names: str) -> list[TokenChunk]:
    return it.applied(plan) + it.produced([Produced(name, 9) for name in names], 0)


def test_requests_wait_until_the_tightest_rank_has_room_for_them_and_their_growth() -> None:
    it = with_memory(blocks=5)
    for name in ("a", "b", "c"):
        it.submit(long(name, 200))
    assert admitted(it.next_plan(0)) == ["a", "b"], "two rows of two blocks each; three would be six"
    it.produced([Produced("a", 9, "length")], 0)
    assert admitted(it.next_plan(0)) == ["c"]


def test_nobody_overtakes_a_large_request() -> None:
    it = with_memory(blocks=4)
    for name, size in (("a", 200), ("large", 600), ("small", 10)):
        it.submit(long(name, size))
    assert admitted(it.next_plan(0)) == ["a"]
    it.produced([Produced("a", 9, "length")], 0)
    assert admitted(it.next_plan(0)) == ["large"], "alone it has its chance"


def test_what_can_never_fit_is_refused_with_numbers_and_the_answer_ends_within_memory() -> None:
    it = with_memory(blocks=2)
    refusal = it.submit(long("a", 512))
    assert isinstance(refusal, RequestFailed) and refusal.code == "kv_memory_exceeded"
    assert "rank 1 (mac1)" in refusal.message and "up to 512 tokens" in refusal.message
    assert it.submit(long("b", 500, max_tokens=1000)) is None
    assert it.next_plan(0).admit[0].max_tokens == 12
    resumed = it.submit(long("c", 500, max_tokens=1000, sent_ids=(1,) * 12))
    assert isinstance(resumed, RequestFailed), "it was open when the mesh had more memory"


def test_what_pictures_became_takes_memory_until_their_prompt_is_read() -> None:
    it = with_memory(blocks=6)
    it.submit(long("a", 200), Held(2 * BLOCK_TOKENS, 0))
    for name in ("b", "c"):
        it.submit(long(name, 200))
    plan = it.next_plan(0)
    assert admitted(plan) == ["a", "b"], "four blocks, and two for what a's pictures became"
    step(it, plan, "b")
    plan = it.next_plan(0)
    assert admitted(plan) == [], "a is not read yet"
    step(it, plan, "a", "b")
    plan = it.next_plan(0)
    assert admitted(plan) == ["c"]
    step(it, plan, "a", "b", "c")
    it.submit(long("d", 10), Held(3 * BLOCK_TOKENS, 0))
    it.submit(long("e", 10))
    for name in ("a", "b"):
        it.produced([Produced(name, 9, "length")], 0)
        assert admitted(it.next_plan(0)) == [], "c and d are four blocks, and d's pictures three"
    it.produced([Produced("c", 9, "length")], 0)
    assert admitted(it.next_plan(0)) == ["d"], "alone it has its chance"


def test_a_prompt_that_is_read_in_one_piece_waits_until_there_is_memory_for_that_beside_the_rows() -> None:
    it = with_memory(blocks=6)
    it.submit(long("a", 200))
    it.submit(long("b", 200), Held(reading=3 * BLOCK_TOKENS))
    plan = it.next_plan(0)
    assert admitted(plan) == ["a"], "two rows of two blocks each, and three for the forward"
    step(it, plan, "a")
    it.produced([Produced("a", 9, "length")], 0)
    it.submit(long("c", 200))
    plan = it.next_plan(0)
    assert admitted(plan) == ["b"], "alone it has room, and nobody may come while it is read"
    step(it, plan)
    assert admitted(it.next_plan(0)) == []
    it.produced([Produced("b", 9)], 0)
    assert admitted(it.next_plan(0)) == ["c"]


def test_a_row_whose_prompt_is_being_read_in_one_piece_makes_room_when_others_have_grown() -> None:
    it = with_memory(blocks=8)
    it.submit(long("a", 200, max_tokens=1000))
    it.submit(long("b", 100), Held(reading=4 * BLOCK_TOKENS))
    plan = it.next_plan(0)
    assert admitted(plan) == ["a", "b"]
    step(it, plan, "a")
    for _ in range(400):
        plan = it.next_plan(0)
        if plan.leave:
            break
        step(it, plan, "a")
    assert plan.leave == ("b",)


def test_a_prompt_that_can_never_be_read_in_one_piece_is_refused_with_numbers() -> None:
    it = with_memory(blocks=4)
    refusal = it.submit(long("a", 500), Held(reading=3 * BLOCK_TOKENS))
    assert isinstance(refusal, RequestFailed) and refusal.code == "kv_memory_exceeded"
    assert "the prompt of 500 tokens in one piece" in refusal.message
    assert "rank 1 (mac1)" in refusal.message and not it._held
    assert it.submit(long("b", 500, max_tokens=1000), Held(reading=2 * BLOCK_TOKENS)) is None
    (b,) = it.next_plan(0).admit
    assert b.max_tokens == 4 * BLOCK_TOKENS - 500, "what the forward needs is free again for the answer"


def test_pictures_that_leave_no_room_for_their_prompt_are_refused_with_numbers() -> None:
    it = with_memory(blocks=4)
    assert it.submit(long("a", 500, max_tokens=1000), Held(BLOCK_TOKENS, 0)) is None
    assert it.next_plan(0).admit[0].max_tokens == 3 * BLOCK_TOKENS - 500
    refusal = it.submit(long("b", 500), Held(3 * BLOCK_TOKENS, 0))
    assert isinstance(refusal, RequestFailed) and refusal.code == "kv_memory_exceeded"
    assert "and its pictures 0 MB, on rank 1 (mac1)" in refusal.message
    assert "up to 256 tokens" in refusal.message and "fewer or smaller pictures" in refusal.message
    assert not it._held.keys() & {"b"}


def test_rows_that_grew_too_large_together_let_the_oldest_go_on_and_come_back() -> None:
    it = with_memory(blocks=4)
    it.submit(long("old", 200, max_tokens=500))
    it.submit(long("new", 200, max_tokens=500, sent_ids=(7, 7)))
    plan = it.next_plan(0)
    assert admitted(plan) == ["old", "new"]
    num_new = 0
    while "new" not in (plan := it.next_plan(0)).cancel:
        assert step(it, plan, "old", "new")
        num_new += 1
    assert 512 - 202 - 2 * AHEAD_TOKENS < num_new < 512 - 202
    assert it.num_preempted == 1
    it.submit(long("later", 1))
    ahead = it.next_plan(0)
    assert admitted(ahead) == [], "it is not gone yet, and its place is not free for others before it"
    chunks = it.produced([Produced("old", 9), Produced("new", 8)], 0)
    assert [chunk.token_ids for chunk in chunks] == [(9,), (8,)], "tokens under way still count"
    assert it.applied(plan) == [], "its client hears nothing"
    assert (it.num_running, it.num_waiting) == (1, 2)
    it.produced([Produced("old", 9, "length")], 0)
    (again,) = it.next_plan(0).admit
    assert again.id == "new"
    assert again.prompt_ids == (1,) * 200 + (7, 7) + (9,) * num_new + (8,)
    assert again.max_tokens == 500 - 2 - num_new - 1


def test_a_row_that_makes_room_may_be_cancelled_or_end_before_it_leaves() -> None:
    for end in ("cancelled", "length"):
        it = with_memory(blocks=4)
        for name in ("old", "new"):
            it.submit(long(name, 250))
        plan = it.next_plan(0)
        while not (plan := it.next_plan(0)).cancel:
            step(it, plan, "old", "new")
        if end == "cancelled":
            it.cancel("new")
            (chunk,) = it.applied(plan)
        else:
            (chunk,) = it.produced([Produced("new", 9, "length")], 0)
            assert it.applied(plan) == []
        assert (chunk.id, chunk.finish_reason) == ("new", end)
        assert (it.num_running, it.num_waiting) == (1, 0)
        assert it.applied(it.next_plan(0)) == []


@settings(deadline=None, max_examples=40)
@given(
    blocks=st.integers(2, 9),
    sizes=st.lists(
        st.tuples(
            st.integers(1, 450),
            st.integers(1, 400),
            st.sampled_from([0, 0, 50, 300]),
            st.sampled_from([0, 0, 100, 500]),
        ),
        min_size=1,
        max_size=7,
    ),
    delay=st.integers(0, 3),
)
def test_memory_is_never_exceeded_and_every_request_gets_all_its_tokens_once(
    blocks: int, sizes: list[tuple[int, int, int, int]], delay: int
) -> None:
    """`sizes`: tokens of the prompt and of the answer, and bytes of what its pictures became, and of the
    forward that reads it in one piece. `delay`: plans that are under way, as in a pipeline."""
    it, kv = with_memory(blocks), of_blocks(blocks)
    got: dict[str, list[int]] = {}
    due: dict[str, int] = {}
    held: dict[str, Held] = {}
    for number, (num_prompt, max_tokens, num_bytes, reading) in enumerate(sizes):
        mine = held[str(number)] = Held(num_bytes, num_bytes // 2, reading)
        if it.submit(long(str(number), num_prompt, max_tokens), mine) is None:
            got[str(number)] = []
            longest = kv.longest_sequence(100_000, [num_bytes] * 2)
            assert longest is not None
            due[str(number)] = min(max_tokens, longest - num_prompt)
    rows: dict[str, list[int]] = {}  # tokens in caches, tokens left
    has_token: set[str] = set()
    published: list[StepPlan] = []
    for _ in range(sum(due.values()) + 100):
        while it.has_work and len(published) <= delay:
            published.append(it.next_plan(0))
        if not published:
            break
        plan = published.pop(0)
        for request_id in plan.cancel:
            rows.pop(request_id, None)
            has_token.discard(request_id)
        for new in plan.admit:
            rows[new.id] = [len(new.prompt_ids), new.max_tokens]
        longest = max((length for length, _ in rows.values()), default=0)
        taken = [
            sum(held[row].all for row in rows),
            sum(held[row].after if row in has_token else held[row].all for row in rows),
        ]
        reading = sum(held[row].reading for row in rows if row not in has_token)
        taken = [num_bytes + reading for num_bytes in taken]
        assert kv.short(len(rows), longest + 1, taken) is None or len(rows) <= 1
        produced = []
        for request_id, row in list(rows.items()):
            row[0], row[1] = row[0] + 1, row[1] - 1
            has_token.add(request_id)
            produced.append(Produced(request_id, len(got[request_id]), "length" if row[1] == 0 else None))
            if row[1] == 0:
                del rows[request_id]
        assert not any(chunk.finish_reason for chunk in it.applied(plan))
        for chunk in it.produced(produced, 0):
            got[chunk.id] += chunk.token_ids
    assert {request_id: len(tokens) for request_id, tokens in got.items()} == due
    assert all(tokens == list(range(len(tokens))) for tokens in got.values())
