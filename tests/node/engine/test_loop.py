"""The order of things in a leader's and a follower's loop, without a model."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, cast

import mlx.core as mx
import msgspec
import pytest

from mlx_mesh.mesh.messages import (
    Cancel,
    EngineCommand,
    EngineReport,
    GenerateRequest,
    Media,
    RequestFailed,
    StepPlan,
    StopEngine,
    Submit,
    TokenChunk,
    Tokens,
    WarmUp,
)
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.features import Features
from mlx_mesh.node.engine.grammar import GrammarReady, RowGrammar
from mlx_mesh.node.engine.loop import READ_AHEAD, Follower, Generation, Leader
from mlx_mesh.node.engine.pictures import PictureError, Pictures, PromptTooLong
from mlx_mesh.node.engine.prefix_planner import Stored
from mlx_mesh.node.engine.prefix_store import PrefixStore
from mlx_mesh.node.engine.report import Reporter
from mlx_mesh.node.engine.scheduler import Held, Produced, Scheduler
from mlx_mesh.node.pipe import BlockingPipe


@dataclass
class CountingGeneration:
    """Rows that give the token 100 in every step until their max_tokens."""

    log: list[str]
    rows: dict[str, int] = field(default_factory=dict)
    grammars: dict[str, RowGrammar] = field(default_factory=dict)
    features: dict[str, Features] = field(default_factory=dict)
    vocab_size: int = 320
    kv_tokens: int = 0
    longest_row: int = 0
    prompt_steps: int = 0  # that each row takes before its first token
    steps_of: dict[str, int] = field(default_factory=dict)
    prefixes: PrefixStore = field(default_factory=PrefixStore)

    stream: Any = field(default_factory=lambda: mx.default_stream(mx.default_device()))

    def forget_request(self, request_id: str) -> None:
        self.grammars.pop(request_id, None)
        self.features.pop(request_id, None)

    def take_stored(self) -> list[Stored]:
        return []

    def prompt_tokens_after(self, plan: StepPlan) -> int:
        return sum(len(admission.prompt_ids) for admission in plan.admit)

    @property
    def num_rows(self) -> int:
        return len(self.rows)

    def apply(self, plan: StepPlan, request_of: Any = None) -> None:
        for request_id in plan.cancel:
            self.rows.pop(request_id, None)
        for admission in plan.admit:
            if request_of is not None:
                assert request_of(admission.id).id == admission.id
            self.rows[admission.id] = admission.max_tokens
            self.steps_of[admission.id] = 0
        self.log.append(f"apply {plan.step}")

    def step(self) -> list[Produced]:
        self.log.append("step")
        produced = []
        for request_id in list(self.rows):
            self.steps_of[request_id] += 1
            if self.steps_of[request_id] <= self.prompt_steps:
                continue
            self.rows[request_id] -= 1
            is_over = self.rows[request_id] == 0
            produced.append(Produced(request_id, 100, "length" if is_over else None))
            if is_over:
                del self.rows[request_id]
        return produced

    def close(self) -> None:
        self.log.append("close")


@dataclass
class Stage:
    """A leader with a log of what it did, in order."""

    log: list[str]
    leader: Leader
    generation: CountingGeneration
    scheduler: Scheduler
    agent: BlockingPipe[EngineReport]
    reporter: Reporter
    commands: list[EngineCommand] = field(default_factory=list)

    def next(self) -> EngineCommand:
        self.log.append("idle")
        return self.commands.pop(0)

    def poll(self) -> EngineCommand | None:
        """A StopEngine waits until everything else is done."""
        if self.commands and not isinstance(self.commands[0], StopEngine):
            return self.commands.pop(0)
        return None

    def put(self, ready: GrammarReady) -> None:
        raise AssertionError(f"no request here has a grammar: {ready}")

    def publish(self, plan: StepPlan) -> None:
        self.log.append("publish stop" if plan.stop else f"publish {plan.step}")

    def run(self, *commands: EngineCommand) -> list[str]:
        self.commands = list(commands)
        self.leader.run(self)
        return self.log


def make_stage(
    plans_ahead: int, engine: socket.socket, agent: socket.socket, *, max_sequences: int = 4
) -> Stage:
    log: list[str] = []
    generation = CountingGeneration(log)
    scheduler = Scheduler(1, max_sequences=max_sequences)
    reporter = Reporter(BlockingPipe(engine, msgspec.msgpack.Decoder(EngineCommand)))
    stage = Stage(
        log,
        cast(Leader, None),
        generation,
        scheduler,
        BlockingPipe(agent, msgspec.msgpack.Decoder(EngineReport)),
        reporter,
    )
    stage.leader = Leader(cast(Generation, generation), scheduler, stage, reporter, plans_ahead=plans_ahead)
    return stage


@pytest.fixture
def sockets() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    with ours, theirs:
        yield theirs, ours


def submit(request_id: str, max_tokens: int, prompt: tuple[int, ...] = (1, 2)) -> Submit:
    return Submit(request=GenerateRequest(id=request_id, prompt_ids=prompt, max_tokens=max_tokens))


def test_alone_each_plan_is_published_just_before_its_step(sockets: Any) -> None:
    log = make_stage(0, *sockets).run(submit("a", 2), StopEngine())
    assert log == [
        *("idle", "publish 1", "apply 1", "step"),
        *("publish 2", "apply 2", "step"),
        *("idle", "publish stop", "close"),
    ]


def test_followers_are_one_plan_ahead_and_steps_that_turned_out_empty_are_still_made(sockets: Any) -> None:
    log = make_stage(1, *sockets).run(submit("a", 2), StopEngine())
    assert log == [
        *("idle", "publish 1", "publish 2", "apply 1", "step"),
        *("publish 3", "apply 2", "step"),
        *("apply 3", "step"),
        *("idle", "publish stop", "close"),
    ]


def test_a_stop_in_the_middle_first_does_the_steps_that_followers_know_of(sockets: Any) -> None:
    stage = make_stage(2, *sockets)
    stage.commands = [submit("a", 100)]

    def poll() -> EngineCommand | None:
        return StopEngine() if "apply 1" in stage.log else None

    stage.poll = poll  # type: ignore[method-assign]
    stage.leader.run(stage)
    tail = stage.log[stage.log.index("apply 1") :]
    assert tail == ["apply 1", "step", "apply 2", "step", "apply 3", "step", "publish stop", "close"]


@pytest.mark.parametrize("plans_ahead", [0, 1, 2, 3])
@pytest.mark.parametrize("moment", ["queue", "prefill", "decode"])
def test_a_cancel_ends_a_row_after_the_plans_that_are_under_way(
    sockets: Any, plans_ahead: int, moment: str
) -> None:
    """No step more with one rank and one with more; while a pipeline reads a prompt, one less than its
    ranks."""
    engine, agent = sockets
    stage = make_stage(plans_ahead, engine, agent, max_sequences=1)
    generation = stage.generation
    generation.prompt_steps = 6
    steps_before: list[int] = []
    others = [submit("before", 30)] if moment == "queue" else []
    commands: list[EngineCommand] = [*others, submit("a", 100)]

    def poll() -> EngineCommand | None:
        if commands:
            return commands.pop(0)
        at = {"queue": generation.steps_of.get("before", 0), "prefill": 3, "decode": 9}[moment]
        is_there = at > 2 if moment == "queue" else generation.steps_of.get("a", 0) == at
        if not steps_before and is_there:
            steps_before.append(generation.steps_of.get("a", 0))
            return Cancel(id="a")
        return StopEngine() if steps_before and not generation.rows else None

    stage.poll = poll  # type: ignore[method-assign]
    stage.next = lambda: poll() or StopEngine()  # type: ignore[method-assign]
    stage.leader.run(stage)
    if moment == "queue":
        assert "a" not in generation.steps_of
        assert generation.steps_of["before"] == 36, "the row before it goes on"
    else:
        under_way = plans_ahead if moment == "prefill" else min(plans_ahead, 1)
        assert generation.steps_of["a"] - steps_before[0] == under_way
    ends: list[tuple[str, str]] = []
    while len(ends) < 1 + len(others):
        report = stage.agent.receive()
        assert isinstance(report, Tokens)
        ends += [(chunk.id, chunk.finish_reason) for chunk in report.chunks if chunk.finish_reason]
    assert sorted(ends) == [("a", "cancelled"), *[("before", "length") for _ in others]]


def test_every_token_and_every_refusal_is_told(sockets: Any) -> None:
    stage = make_stage(1, *sockets)
    stage.run(submit("a", 2), submit("bad", 2, ()), submit("b", 1), Cancel(id="nobody"), StopEngine())
    heard: list[tuple[str, int, str | None]] = []
    refused = []
    while len(heard) < 3:
        report = stage.agent.receive()
        if isinstance(report, RequestFailed):
            refused.append((report.id, report.code))
        assert isinstance(report, (Tokens, RequestFailed))
        if isinstance(report, Tokens):
            heard += [(c.id, len(c.token_ids), c.finish_reason) for c in report.chunks]
    assert refused == [("bad", "empty_prompt")]
    assert sorted(heard, key=str) == [("a", 1, "length"), ("a", 1, None), ("b", 1, "length")]


def test_the_warm_up_is_silent_and_teaches_the_vocabulary(sockets: Any) -> None:
    stage = make_stage(1, *sockets)
    stage.leader.warm_up(submit("warm-up", 1).request)
    assert "step" in stage.log
    assert stage.scheduler.vocab_size == 320
    stage.run(submit("a", 1), StopEngine())
    assert stage.agent.receive() == Tokens(step=2, chunks=(), admitted=("a",), cached=(0,))
    report = stage.agent.receive()
    assert isinstance(report, Tokens)
    assert report.chunks[0].id == "a"


def test_the_heartbeat_counts_steps(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    stage.run(submit("a", 3), StopEngine())
    beat = stage.reporter.heartbeat()
    assert (beat.step, beat.busy, beat.num_sequences) == (3, False, 0)


def test_a_command_of_bring_up_is_refused_once_ready(sockets: Any) -> None:
    with pytest.raises(EngineError, match="WarmUp came"):
        make_stage(0, *sockets).run(WarmUp())


@dataclass
class Plans:
    plans: list[StepPlan]

    def next(self) -> StepPlan:
        return self.plans.pop(0)


def test_a_follower_does_what_the_plans_say_until_the_stop(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    plans = Plans(
        [StepPlan(epoch=1, step=1), StepPlan(epoch=1, step=2), StepPlan(epoch=1, step=3, stop=True)]
    )
    Follower(cast(Generation, stage.generation), plans, stage.reporter).run()
    assert stage.log == ["apply 1", "step", "apply 2", "step", "close"]
    assert stage.reporter.heartbeat().step == 2


def test_a_followers_warm_up_ends_when_the_one_request_is_through(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    scheduler = Scheduler(1, max_sequences=1)
    scheduler.submit(submit("warm-up", 2).request)
    plans = Plans([scheduler.next_plan(0) for _ in range(4)])
    Follower(cast(Generation, stage.generation), plans, stage.reporter).warm_up()
    assert [plan.step for plan in plans.plans] == [3, 4]


def test_a_stop_during_a_followers_warm_up_is_an_error(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    plans = Plans([StepPlan(epoch=1, step=1, stop=True)])
    with pytest.raises(EngineError, match="during the warm-up"):
        Follower(cast(Generation, stage.generation), plans, stage.reporter).warm_up()


# ---------------------------------------------------------------- prompts with pictures


@dataclass
class ScriptedPictures:
    """A picture is five tokens; the file b"broken" is none."""

    log: list[str]
    meanwhile: Callable[[], None] = lambda: None
    reads_whole: bool = False

    def read_text(self, ids: tuple[int, ...]) -> Features:
        self.log.append("text")
        if len(ids) > 6:
            raise PromptTooLong("it is too long for one piece")
        return Features(len(ids), {"inputs_embeds": mx.zeros((1, len(ids), 2))}, is_whole=True)

    def bytes_to_read(self, features: Features) -> int:
        return 100 * features.length if features.is_whole else 0

    def read(self, media: Media) -> tuple[tuple[int, ...], tuple[int, ...], Features]:
        self.log.append("towers")
        self.meanwhile()
        if b"broken" in media.images:
            raise PictureError("it is broken")
        if b"long" in media.images:
            raise PromptTooLong("it is too long")
        ids = (7,) * 5
        return ids, (1 << 31,) * 5, Features(5, {"inputs_embeds": mx.zeros((1, 5, 2))})


def submit_picture(request_id: str, image: bytes, max_tokens: int = 2) -> Submit:
    media = Media(text="<image>", images=(image,))
    return Submit(request=GenerateRequest(id=request_id, prompt_ids=(9,), max_tokens=max_tokens, media=media))


def answers(stage: Stage) -> dict[str, list[str]]:
    """What came for each request, in order: "admitted", a finish reason, or a code."""
    told: dict[str, list[str]] = {}
    for report in received(stage):
        if isinstance(report, RequestFailed):
            told.setdefault(report.id, []).append(report.code)
        elif isinstance(report, Tokens):
            for request_id in report.admitted:
                told.setdefault(request_id, []).append("admitted")
            for chunk in report.chunks:
                if chunk.finish_reason:
                    told.setdefault(chunk.id, []).append(chunk.finish_reason)
    return told


def received(stage: Stage) -> list[EngineReport]:
    stage.reporter._pipe.close()
    found = []
    while (report := stage.agent.receive()) is not None:
        found.append(report)
    return found


def test_towers_run_between_steps_one_prompt_at_a_time(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    stage.leader._pictures = cast(Pictures, ScriptedPictures(stage.log))
    log = stage.run(submit("text", 4), submit_picture("a", b"1"), submit_picture("b", b"2"), StopEngine())
    assert log[:8] == ["idle", "towers", "publish 1", "apply 1", "step", "towers", "publish 2", "apply 2"]
    told = answers(stage)
    # Admitted before the towers see its files, so that files that end engines are found, and again to a row.
    assert told["a"] == told["b"] == ["admitted", "admitted", "length"]
    assert not stage.generation.features


def test_few_prompts_have_their_pictures_read_before_there_is_a_row_for_them(sockets: Any) -> None:
    stage = make_stage(0, *sockets, max_sequences=1)
    num_held = []

    class Counting(ScriptedPictures):
        def read(self, media: Media) -> tuple[tuple[int, ...], tuple[int, ...], Features]:
            num_held.append(len(stage.generation.features))
            return super().read(media)

    stage.leader._pictures = cast(Pictures, Counting(stage.log))
    stage.run(*(submit_picture(f"{at}", b"1", max_tokens=9) for at in range(6)), StopEngine())
    assert max(num_held) == READ_AHEAD  # one that runs, and one less that waits
    told = answers(stage)
    assert [told[f"{at}"][-1] for at in range(6)] == ["length"] * 6
    assert not stage.generation.features


def test_prompts_that_wait_for_their_grammar_hold_pictures_too_and_are_few(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    begun: list[GenerateRequest] = []
    num_held = []

    class Slow:
        """Compiles when there is nothing else to do."""

        def begin(self, request: GenerateRequest, vocab_size: int, then: Any) -> None:
            begun.append(request)
            num_held.append(sum(not stage.scheduler.runs(one) for one in stage.generation.features))

        def take(self, request_id: str) -> Any:
            return object()

        def close(self) -> None: ...

    def next_() -> Any:
        if stage.commands:
            return stage.commands.pop(0)
        return GrammarReady(begun.pop(0)) if begun else StopEngine()

    stage.leader._grammars = cast(Any, Slow())
    stage.leader._pictures = cast(Pictures, ScriptedPictures(stage.log))
    stage.next = next_  # type: ignore[method-assign]
    asked = [submit_picture(f"{at}", b"1") for at in range(6)]
    stage.run(*(Submit(request=msgspec.structs.replace(one.request, grammar="g")) for one in asked))
    assert max(num_held) == READ_AHEAD
    told = answers(stage)
    assert [told[f"{at}"][-1] for at in range(6)] == ["length"] * 6


@pytest.mark.parametrize("reads_whole", [False, True])
def test_text_is_embedded_by_the_leader_where_prompts_are_read_in_one_piece(
    sockets: Any, reads_whole: bool
) -> None:
    stage = make_stage(0, *sockets)
    stage.leader._scheduler.vocab_size = 100
    stage.leader._pictures = cast(Pictures, ScriptedPictures(stage.log, reads_whole=reads_whole))

    def ask(request_id: str, *ids: int) -> Submit:
        return Submit(request=GenerateRequest(id=request_id, prompt_ids=ids, max_tokens=2))

    submitted: list[GenerateRequest] = []
    needed: dict[str, int] = {}
    submit_now = stage.leader._scheduler.submit

    def noting(request: GenerateRequest, held: Held | None = None) -> RequestFailed | TokenChunk | None:
        submitted.append(request)
        needed[request.id] = (held or Held()).reading
        return submit_now(request, held or Held())

    stage.leader._scheduler.submit = noting  # type: ignore[method-assign]
    requests = ask("good", 1, 2), ask("unknown", 1, 100), ask("empty"), ask("long", *range(1, 9))
    log = stage.run(*requests, StopEngine())
    told = answers(stage)
    assert told["good"][-1] == "length"
    assert (told["unknown"], told["empty"]) == (["invalid_token"], ["empty_prompt"])
    assert told["long"][-1] == ("context_length_exceeded" if reads_whole else "length")
    assert log.count("text") == (2 if reads_whole else 0)
    (good,) = (request for request in submitted if request.id == "good")
    assert needed["good"] == (200 if reads_whole else 0)
    assert good.skip_prefix_cache is reads_whole, "it can neither begin with a prefix nor leave one"
    assert not stage.generation.features


def test_a_request_whose_pictures_are_unusable_or_cancelled_ends_alone(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    stage.leader._pictures = cast(Pictures, ScriptedPictures(stage.log))
    stage.run(
        submit_picture("bad", b"broken"),
        submit_picture("long", b"long"),
        submit_picture("gone", b"1"),
        Cancel(id="gone"),
        submit_picture("good", b"2"),
        StopEngine(),
    )
    told = answers(stage)
    assert told["bad"] == ["admitted", "invalid_image"]
    assert told["long"] == ["admitted", "context_length_exceeded"]
    assert told["gone"] == ["cancelled"]
    assert told["good"][-1] == "length"
    assert stage.log.count("towers") == 3


def test_a_cancel_while_the_towers_run_ends_the_request_before_its_first_token(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    pictures = ScriptedPictures(stage.log, lambda: stage.commands.insert(0, Cancel(id="gone")))
    stage.leader._pictures = cast(Pictures, pictures)
    stage.run(submit_picture("gone", b"1", max_tokens=50), StopEngine())
    told = answers(stage)
    assert told["gone"] == ["admitted", "cancelled"]
    assert stage.log == ["idle", "towers", "idle", "publish stop", "close"], "it never had a row"
    assert not stage.generation.features


def test_followers_are_in_no_step_while_the_towers_run_and_the_leader_says_what_it_does(sockets: Any) -> None:
    stage = make_stage(2, *sockets)
    beats = []
    pictures = ScriptedPictures(stage.log, lambda: beats.append(stage.reporter.heartbeat()))
    stage.leader._pictures = cast(Pictures, pictures)
    commands: list[EngineCommand] = [submit("text", 9), submit_picture("a", b"1")]

    def poll() -> EngineCommand | None:
        return commands.pop(0) if commands and stage.log.count("step") == 4 else None

    stage.poll = poll  # type: ignore[method-assign]
    stage.next = lambda: commands.pop(0) if commands else StopEngine()  # type: ignore[method-assign]
    stage.leader.run(stage)
    (at,) = (index for index, entry in enumerate(stage.log) if entry == "towers")
    before = [entry.split() for entry in stage.log[:at]]
    published = [words[1] for words in before if words[0] == "publish"]
    assert len(published) > 2 and published == [words[1] for words in before if words[0] == "apply"]
    assert [(beat.busy, beat.reads_media) for beat in beats] == [(True, True)]
    assert not stage.reporter.heartbeat().reads_media
    assert answers(stage)["a"][-1] == "length"


def test_a_stop_while_the_towers_run_begins_no_step(sockets: Any) -> None:
    stage = make_stage(1, *sockets)
    pictures = ScriptedPictures(stage.log, lambda: stage.commands.clear())
    stage.leader._pictures = cast(Pictures, pictures)
    stage.poll = lambda: StopEngine() if "towers" in stage.log else None  # type: ignore[method-assign]
    assert stage.run(submit_picture("a", b"1")) == ["idle", "towers", "publish stop", "close"]


def test_a_prompt_that_is_cancelled_while_it_waits_for_a_row_leaves_nothing_of_its_pictures(
    sockets: Any,
) -> None:
    stage = make_stage(0, *sockets, max_sequences=1)
    stage.leader._pictures = cast(Pictures, ScriptedPictures(stage.log))
    later: list[EngineCommand] = [StopEngine(), Cancel(id="waits")]
    held = []

    def poll() -> EngineCommand | None:
        if stage.commands:
            return stage.commands.pop(0)
        if len(later) == 2 and not stage.scheduler.runs("waits") and "waits" in stage.generation.features:
            return later.pop()
        held.append(set(stage.generation.features))
        return later.pop() if len(later) == 1 and not stage.scheduler.has_work else None

    stage.poll = poll  # type: ignore[method-assign]
    stage.commands = [submit_picture("runs", b"1", 6), submit_picture("waits", b"2", 6)]
    stage.next = lambda: poll() or later.pop()  # type: ignore[method-assign]
    stage.leader.run(stage)
    told = answers(stage)
    assert told["waits"] == ["admitted", "cancelled"]
    assert told["runs"][-1] == "length"
    assert {"runs"} in held and not stage.generation.features


def test_a_model_without_towers_refuses_pictures_and_goes_on(sockets: Any) -> None:
    stage = make_stage(0, *sockets)
    stage.run(submit_picture("picture", b"1"), submit("text", 2), StopEngine())
    told = answers(stage)
    assert told["picture"][-1] == "invalid_image"
    assert told["text"][-1] == "length"
