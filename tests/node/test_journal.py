"""Open requests: what was sent, what is admitted again, and who may ask at all."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_mesh.mesh.messages import (
    Cancel,
    Chunk,
    Drain,
    Failed,
    GenerateRequest,
    MeshStatus,
    Readiness,
    RequestFailed,
    SamplingParams,
    StatusQuery,
    StatusReply,
    Submit,
    TokenChunk,
)
from mlx_mesh.mesh.types import Backend, Sharding
from mlx_mesh.node.desk import Desk
from mlx_mesh.node.journal import Journal

STATUS = MeshStatus(
    name="m",
    model="m",
    world_size=1,
    sharding=Sharding.NONE,
    backend=Backend.NONE,
    epoch=1,
    epoch_cause="start",
    ready=True,
    reason="",
    placement=None,
    ranks=(),
    num_running=0,
    num_waiting=0,
    num_open=0,
    uptime_s=0.0,
    versions=None,
    context_length=0,
)


def request(request_id: str = "a", max_tokens: int = 10, **more: Any) -> GenerateRequest:
    return GenerateRequest(id=request_id, prompt_ids=(1, 2), max_tokens=max_tokens, **more)


def tokens(*ids: int, request_id: str = "a", reason: Any = None) -> TokenChunk:
    return TokenChunk(id=request_id, token_ids=ids, finish_reason=reason)


# ---------------------------------------------------------------- journal


def test_a_request_is_admitted_again_with_what_was_sent_and_all_its_settings() -> None:
    journal = Journal()
    sampling = SamplingParams(temperature=0.7, seed=5, logit_bias={3: 1.0})
    original = request(sampling=sampling, stop_token_ids=(2,), logprobs=3)
    journal.open(original, 0.0)
    assert journal.record(tokens(7)) and journal.record(tokens(8, 9))
    [again], ended = journal.admissions()
    assert again.sent_ids == (7, 8, 9) and ended == []
    assert (again.prompt_ids, again.max_tokens, again.sampling) == ((1, 2), 10, sampling)
    assert (again.stop_token_ids, again.logprobs) == ((2,), 3)


def test_a_second_recovery_counts_nothing_twice() -> None:
    journal = Journal()
    journal.open(request(), 0.0)
    journal.record(tokens(7))
    journal.admissions()
    journal.record(tokens(8))
    [again], _ = journal.admissions()
    assert again.sent_ids == (7, 8)


def test_requests_are_admitted_again_in_the_order_of_their_arrival() -> None:
    journal = Journal()
    for name in "cab":
        journal.open(request(name), 0.0)
    assert [again.id for again in journal.admissions()[0]] == ["c", "a", "b"]


def test_a_finished_request_is_forgotten_and_takes_no_more_tokens() -> None:
    journal = Journal()
    journal.open(request(), 0.0)
    assert journal.record(tokens(reason="stop"))
    assert len(journal) == 0 and not journal.record(tokens(1)) and journal.admissions() == ([], [])


def test_a_request_that_had_all_its_tokens_needs_no_engine_to_end() -> None:
    journal = Journal()
    journal.open(request(max_tokens=2), 0.0)
    journal.record(tokens(1, 2))
    assert journal.admissions() == ([], [TokenChunk(id="a", finish_reason="length")])
    assert len(journal) == 0


def test_a_cancelled_request_is_not_admitted_again() -> None:
    journal = Journal()
    journal.open(request(), 0.0)
    assert journal.cancel("a") and not journal.cancel("b")
    assert journal.admissions() == ([], [TokenChunk(id="a", finish_reason="cancelled")])


def test_an_id_is_used_once_at_a_time() -> None:
    journal = Journal()
    journal.open(request(), 0.0)
    with pytest.raises(ValueError, match="in use"):
        journal.open(request(), 0.0)


def test_only_old_requests_are_overdue() -> None:
    journal = Journal()
    journal.open(request("old"), 0.0)
    journal.open(request("new"), 50.0)
    assert journal.overdue(61.0, 60.0) == ("old",)


# ---------------------------------------------------------------- desk


class Bench:
    """A desk without a mesh."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.commands: list[Any] = []
        self.now = 0.0
        self.desk = Desk(
            send=self.sent.append,
            command=self.commands.append,
            status=lambda: STATUS,
            now=lambda: self.now,
            world_size=2,
            max_open=2,
            request_s=60.0,
        )

    def submit(self, request_id: str = "a") -> None:
        self.desk.hear(Submit(request=request(request_id)))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_before_the_first_ready_requests_are_refused_with_a_hint_to_come_back(bench: Bench) -> None:
    bench.submit()
    [failed] = bench.sent
    assert isinstance(failed, Failed) and failed.code == "not_ready" and failed.retry_after_s > 0
    assert bench.commands == []


def test_a_request_goes_to_the_engine_and_its_tokens_to_the_proxy(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit()
    assert bench.commands == [Submit(request=request())]
    assert bench.desk.take((tokens(5),))
    assert bench.sent[-1] == Chunk(chunk=tokens(5))


def test_tokens_of_a_request_that_is_not_open_go_nowhere(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.desk.take((tokens(5, request_id="gone"),))
    assert not any(isinstance(event, Chunk) for event in bench.sent)


def test_a_step_without_tokens_is_no_completed_step(bench: Bench) -> None:
    assert not bench.desk.take((tokens(reason="cancelled"),))


def test_the_next_epoch_gets_the_open_requests_with_what_was_sent(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit()
    bench.desk.take((tokens(5),))
    bench.desk.pause("recovering")
    bench.submit("b")  # waits
    bench.commands.clear()
    assert bench.desk.open(2, 100) == 2
    assert [(c.request.id, c.request.sent_ids) for c in bench.commands] == [("a", (5,)), ("b", ())]


def test_readiness_is_told_once_per_change(bench: Bench) -> None:
    bench.desk.pause("loading")
    bench.desk.pause("loading")
    bench.desk.open(1, 100)
    assert [(e.ready, e.reason) for e in bench.sent if isinstance(e, Readiness)] == [
        (False, "loading"),
        (True, ""),
    ]


def test_a_full_desk_refuses(bench: Bench) -> None:
    bench.desk.open(1, 100)
    for name in "abc":
        bench.submit(name)
    assert [e.code for e in bench.sent if isinstance(e, Failed)] == ["queue_full"]


def test_a_duplicate_id_is_refused_and_the_first_goes_on(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit()
    bench.submit()
    assert [e.code for e in bench.sent if isinstance(e, Failed)] == ["duplicate_request"]
    assert "a" in bench.desk.journal


def test_a_draining_desk_lets_open_requests_go_on(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit()
    bench.desk.drain()
    assert Drain() in bench.sent
    bench.submit("b")
    assert bench.sent[-1].code == "draining"
    bench.desk.take((tokens(5),))
    assert bench.sent[-1] == Chunk(chunk=tokens(5))


def test_a_cancel_goes_to_the_engine_while_there_is_one(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit()
    bench.desk.hear(Cancel(id="a"))
    assert bench.commands[-1] == Cancel(id="a")
    bench.desk.pause("recovering")
    bench.submit("b")
    bench.desk.hear(Cancel(id="b"))
    assert bench.sent[-1] == Chunk(chunk=TokenChunk(id="b", finish_reason="cancelled"))
    assert "b" not in bench.desk.journal


def test_a_late_cancel_changes_nothing(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.desk.hear(Cancel(id="never"))
    assert bench.commands == []


def test_a_request_that_the_engine_refuses_ends_alone(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit()
    bench.submit("b")
    bench.desk.take_failure(RequestFailed(id="a", code="context_length_exceeded", message="too long"))
    assert bench.sent[-1] == Failed(id="a", code="context_length_exceeded", message="too long")
    assert "b" in bench.desk.journal


def test_an_overdue_request_is_ended_on_both_sides(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit()
    bench.now = 61.0
    bench.desk.expire()
    assert bench.commands[-1] == Cancel(id="a") and bench.sent[-1].code == "timeout"


def test_owed_time_counts_from_the_first_open_request_or_the_epoch(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.now = 100.0
    assert bench.desk.owed_s == 0.0
    bench.submit()
    bench.now = 103.0
    assert bench.desk.owed_s == 3.0
    bench.desk.open(2, 100)
    bench.now = 104.0
    assert bench.desk.owed_s == 1.0


def test_the_status_query_gets_its_id_back(bench: Bench) -> None:
    bench.desk.hear(StatusQuery(id="7"))
    assert bench.sent == [StatusReply(id="7", status=STATUS)]
