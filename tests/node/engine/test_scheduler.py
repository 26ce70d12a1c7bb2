"""What the leader decides for each step."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_mesh.mesh.messages import (
    GenerateRequest,
    RequestFailed,
    SamplingParams,
    StepPlan,
    TokenChunk,
    TokenLogprobs,
)
from mlx_mesh.node.engine.scheduler import Produced, Scheduler


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
