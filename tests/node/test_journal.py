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
    Media,
    Readiness,
    RequestFailed,
    ResetPrefixes,
    SamplingParams,
    Submit,
    TokenChunk,
)
from mlx_mesh.node import desk
from mlx_mesh.node.desk import Desk
from mlx_mesh.node.journal import Journal


def request(request_id: str = "a", max_tokens: int = 10, **more: Any) -> GenerateRequest:
    return GenerateRequest(id=request_id, prompt_ids=(1, 2), max_tokens=max_tokens, **more)


def tokens(*ids: int, request_id: str = "a", reason: Any = None) -> TokenChunk:
    return TokenChunk(id=request_id, token_ids=ids, finish_reason=reason)


# ---------------------------------------------------------------- journal


def test_only_requests_that_are_wanted_and_under_no_suspicion_may_go_elsewhere() -> None:
    journal = Journal()
    for request_id in ("suspect", "cancelled", "waits", "had no step"):
        journal.open(request(request_id), 0.0)
    journal.admissions()
    assert journal.blameless() == ()  # an engine has them
    journal.note_admitted(["suspect", "cancelled"])
    journal.cancel("cancelled")
    journal.epoch_ended(by_itself=True)
    assert journal.blameless() == ("waits", "had no step")


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
    journal.epoch_ended(by_itself=False)
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
    assert journal.overdue(61.0, 60.0) == {"old": 60.0}


def test_a_request_with_a_deadline_of_its_own_is_overdue_by_that_one() -> None:
    journal = Journal()
    journal.open(request("patient"), 0.0)
    journal.open(request("hurried", max_time_s=2.5), 0.0)
    journal.open(request("endless", max_time_s=1000.0), 0.0)
    assert journal.overdue(2.5, 60.0) == {}
    assert journal.overdue(3.0, 60.0) == {"hurried": 2.5}
    assert journal.overdue(61.0, 60.0) == {"patient": 60.0, "hurried": 2.5, "endless": 60.0}


# ---------------------------------------------------------------- suspects


def running(*names: str) -> Journal:
    """A journal whose requests all take part in steps."""
    journal = Journal()
    for name in names:
        journal.open(request(name), 0.0)
    journal.admissions()
    journal.note_admitted(names)
    return journal


def admitted(journal: Journal) -> list[str]:
    names = [again.id for again in journal.admissions()[0]]
    journal.note_admitted(names)
    return names


def test_a_rank_that_was_killed_from_outside_makes_no_request_a_suspect() -> None:
    journal = running("a", "b")
    assert journal.epoch_ended(by_itself=False) == () and journal.num_suspects == 0
    assert admitted(journal) == ["a", "b"]


def test_a_request_that_no_step_had_is_no_suspect() -> None:
    journal = running("a")
    journal.open(request("waiting"), 0.0)
    journal.admissions()
    journal.epoch_ended(by_itself=True)
    assert admitted(journal) == ["a"] and journal.num_suspects == 1


def test_suspects_have_the_engine_for_themselves_one_after_the_other() -> None:
    journal = running("a", "b")
    journal.epoch_ended(by_itself=True)
    journal.open(request("new"), 0.0)
    assert admitted(journal) == ["a"] and admitted(journal) == []
    journal.record(tokens(1, 2, request_id="a"))  # past the point where the engine ended
    assert admitted(journal) == []  # `a` still runs, and `b` needs to be alone
    journal.record(tokens(reason="stop", request_id="a"))
    assert admitted(journal) == ["b"]
    journal.record(tokens(1, 2, request_id="b"))
    assert admitted(journal) == ["new"] and journal.num_suspects == 0


def test_a_suspect_that_ends_an_engine_alone_is_convicted_and_the_others_go_on() -> None:
    journal = running("bad", "good")
    assert journal.epoch_ended(by_itself=True) == ()
    assert admitted(journal) == ["bad"]
    assert journal.epoch_ended(by_itself=True) == ("bad",)
    assert admitted(journal) == ["good"]
    journal.record(tokens(1, 2, request_id="good"))
    assert journal.num_suspects == 0


def test_a_suspect_whose_rank_is_killed_from_outside_is_not_convicted() -> None:
    journal = running("a", "b")
    journal.epoch_ended(by_itself=True)
    assert admitted(journal) == ["a"]
    assert journal.epoch_ended(by_itself=False) == ()
    assert admitted(journal) == ["a"]


def test_a_request_suspected_twice_is_alone_to_its_end() -> None:
    journal = running("a", "b")
    for _ in range(2):
        journal.epoch_ended(by_itself=True)
        while names := admitted(journal):
            for name in names:
                journal.record(tokens(1, 2, request_id=name))
                if name == "a" and len(names) == 1:
                    continue
        if not journal.num_suspects:
            journal.note_admitted(["a", "b"])
    assert journal.num_suspects == 2
    journal.record(tokens(3, 4, request_id="a"))
    assert admitted(journal) == []
    journal.record(tokens(reason="stop", request_id="a"))
    assert admitted(journal) == ["b"]


def test_a_request_without_progress_over_many_epochs_becomes_a_suspect() -> None:
    journal = running("hungry")
    for _ in range(3):
        assert journal.num_suspects == 0
        assert journal.epoch_ended(by_itself=False, was_killed=True) == ()
        assert admitted(journal) == ["hungry"]
    assert journal.num_suspects == 1
    assert journal.epoch_ended(by_itself=False) == (), "an engine was frozen, say"
    assert admitted(journal) == ["hungry"]
    assert journal.epoch_ended(by_itself=False, was_killed=True) == ("hungry",)


def test_hosts_that_are_lost_and_engines_that_are_frozen_make_nobody_a_suspect() -> None:
    journal = running("patient")
    for _ in range(10):
        assert journal.epoch_ended(by_itself=False) == ()
        assert admitted(journal) == ["patient"] and journal.num_suspects == 0


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
    bench.desk.epoch_ended(by_itself=False)
    bench.submit("b")  # waits
    bench.commands.clear()
    assert bench.desk.open(2, 100) == 2
    assert [(c.request.id, c.request.sent_ids) for c in bench.commands] == [("a", (5,)), ("b", ())]


def test_a_reset_is_handed_to_the_engine_that_leads_now(bench: Bench) -> None:
    refused = bench.desk.reset_prefixes("r1")
    assert (refused.id, refused.error) == ("r1", "not_ready")
    assert not bench.commands
    bench.desk.open(3, 100)
    taken = bench.desk.reset_prefixes("r2")
    assert (taken.id, taken.error, taken.epoch) == ("r2", "", 3)
    assert bench.commands == [ResetPrefixes()]


def test_the_client_hears_once_that_it_has_its_place_and_how_much_was_kept(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit("a")
    bench.desk.note_admitted(("a", "gone"), (40, 3))
    assert bench.sent[-1] == Chunk(chunk=TokenChunk(id="a", cached_tokens=40))
    num_sent = len(bench.sent)
    bench.desk.epoch_ended(by_itself=False)
    bench.desk.open(1, 100)
    bench.desk.note_admitted(("a",), (0,))
    assert len(bench.sent) == num_sent


def test_of_a_prompt_with_pictures_the_client_hears_its_length_once_that_is_known(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit("a")
    num_sent = len(bench.sent)
    bench.desk.note_admitted(("a",))  # its pictures are being read
    assert len(bench.sent) == num_sent
    bench.desk.note_admitted(("a",), (61,), (62,))
    assert bench.sent[num_sent:] == [Chunk(chunk=TokenChunk(id="a", cached_tokens=61, prompt_tokens=62))]


def test_a_request_that_ends_engines_fails_alone_and_says_so(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit("bad")
    bench.submit("good")
    bench.desk.note_admitted(("bad", "good"))
    assert bench.desk.epoch_ended(by_itself=True) == 0
    bench.desk.open(2, 100)
    bench.desk.note_admitted(("bad",))
    assert bench.commands[-1] == Submit(request=request("bad"))
    assert bench.desk.epoch_ended(by_itself=True) == 1
    failed = bench.sent[-1]
    assert isinstance(failed, Failed) and (failed.id, failed.code) == ("bad", "request_ends_engine")
    bench.desk.open(3, 100)
    assert bench.commands[-1] == Submit(request=request("good"))


def test_whoever_waited_for_a_suspect_goes_on_when_it_is_through(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit("a")
    bench.desk.note_admitted(("a",))
    bench.desk.epoch_ended(by_itself=True)
    bench.desk.open(2, 100)
    bench.submit("b")
    assert bench.commands[-1] == Submit(request=request("a"))
    bench.desk.take((tokens(1, 2),))
    assert bench.commands[-1] == Submit(request=request("b"))


def test_a_request_that_waits_for_a_suspect_is_cancelled_without_the_engine(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.submit("a")
    bench.desk.note_admitted(("a",))
    bench.desk.epoch_ended(by_itself=True)
    bench.desk.open(2, 100)
    bench.submit("b")
    bench.desk.hear(Cancel(id="b"))
    assert bench.sent[-1] == Chunk(chunk=tokens(reason="cancelled", request_id="b"))
    assert not any(isinstance(command, Cancel) for command in bench.commands)


def test_a_request_past_its_own_deadline_is_cancelled_everywhere(bench: Bench) -> None:
    bench.desk.open(1, 100)
    bench.desk.hear(Submit(request=request(max_time_s=2.0)))
    bench.now = 2.5
    bench.desk.expire()
    failed = bench.sent[-1]
    assert isinstance(failed, Failed) and failed.code == "timeout" and "max_time_s = 2 s" in failed.message
    assert bench.commands[-1] == Cancel(id="a")


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


def test_pictures_of_open_requests_are_bounded_together_and_text_is_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk, "MAX_MEDIA_BYTES", 5)
    bench.desk.open(1, 100)
    pictures = Media(text="", images=(b"123", b"45"))
    bench.desk.hear(Submit(request=request("first", media=pictures)))
    bench.desk.hear(Submit(request=request("second", media=pictures)))
    bench.submit("text")
    assert [(e.id, e.code) for e in bench.sent if isinstance(e, Failed)] == [("second", "queue_full")]
    bench.desk.take((tokens(reason="stop", request_id="first"),))
    bench.desk.hear(Submit(request=request("third", media=pictures)))
    assert len([e for e in bench.sent if isinstance(e, Failed)]) == 1


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
