"""Rows under a grammar: in a batch, resumed, cancelled while it is compiled, and given up alone."""

from __future__ import annotations

import json
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from mlx_lm.utils import load_model

from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.messages import (
    Cancel,
    EngineCommand,
    EngineReport,
    GenerateRequest,
    RequestFailed,
    SamplingParams,
    StopEngine,
    Submit,
    Tokens,
)
from mlx_mesh.node.engine import grammar as grammar_module
from mlx_mesh.node.engine.exchanges import SoloExchange
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.grammar import GrammarError, GrammarReady, Grammars, RowGrammar
from mlx_mesh.node.engine.loop import Generation, Leader, NoFollowers
from mlx_mesh.node.engine.report import Reporter
from mlx_mesh.node.engine.scheduler import Scheduler
from mlx_mesh.node.pipe import BlockingPipe

END = 2
THE_END = "the end of the reports"
VOCAB = 320
FIRST_BYTE = 3  # the tiny model's ids: three special tokens, then the bytes in their alphabet's order
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}
GRAMMAR = json.dumps(
    {"grammars": [{"json_schema": {**SCHEMA, "x-guidance": {"whitespace_flexible": False}}}]}
)


def request(request_id: str, grammar: str = GRAMMAR, **fields: Any) -> GenerateRequest:
    prompt = tuple(FIRST_BYTE + ord(char) for char in request_id)
    given = {"max_tokens": 80, "sampling": SamplingParams(temperature=0), "stop_token_ids": (END,), **fields}
    return GenerateRequest(id=request_id, prompt_ids=prompt, grammar=grammar, **given)


class Commands:
    """Given commands, those that come meanwhile, and StopEngine when nothing is left to wait for."""

    def __init__(self, *commands: EngineCommand, num_ready: int) -> None:
        self._queue: queue.SimpleQueue[EngineCommand | GrammarReady] = queue.SimpleQueue()
        for command in commands:
            self._queue.put(command)
        self._num_ready = num_ready

    def next(self) -> EngineCommand | GrammarReady:
        if self._queue.empty() and self._num_ready == 0:
            return StopEngine()
        command = self._queue.get(timeout=30)
        self._num_ready -= isinstance(command, GrammarReady)
        return command

    def poll(self) -> EngineCommand | GrammarReady | None:
        return None if self._queue.empty() else self.next()

    def put(self, ready: GrammarReady) -> None:
        self._queue.put(ready)


class Engine:
    """A leader of one rank over the tiny model, and what it reported."""

    def __init__(self, folder: Path, sock: socket.socket, agent: socket.socket) -> None:
        self.model, _ = load_model(folder)
        self.folder = folder
        self._sock, self._agent = sock, BlockingPipe(agent, msgspec.msgpack.Decoder(EngineReport))

    def run(
        self,
        *commands: EngineCommand,
        num_ready: int | None = None,
        kv: KvBudget | None = None,
        plans_ahead: int = 0,
    ) -> list[Any]:
        generation = Generation(
            self.model, SoloExchange(), max_sequences=8, prefill_step_size=512, is_leader=True
        )
        reporter = Reporter(BlockingPipe(self._sock, msgspec.msgpack.Decoder(EngineCommand)))
        leader = Leader(
            generation,
            Scheduler(1, max_sequences=8, vocab_size=VOCAB, kv=kv),
            NoFollowers(),
            reporter,
            plans_ahead=plans_ahead,
            grammars=Grammars(str(self.folder)),
        )
        leader.warm_up(request("warm-up", "", max_tokens=1))
        reports: list[Any] = []
        listener = threading.Thread(target=self._listen, args=(reports,), daemon=True)
        listener.start()  # a socket holds only so many reports
        with_grammar = [one for one in commands if isinstance(one, Submit) and one.request.grammar]
        leader.run(Commands(*commands, num_ready=len(with_grammar) if num_ready is None else num_ready))
        assert not generation.grammars, "of requests that are over"
        self.num_preempted = reporter.num_preempted
        reporter.failed(EngineError("internal", THE_END))
        listener.join(30)
        return reports

    def _listen(self, reports: list[Any]) -> None:
        while getattr(report := self._agent.receive(), "message", "") != THE_END:
            reports.append(report)

    def tokens(self, *requests: GenerateRequest, **how: Any) -> dict[str, tuple[list[int], str]]:
        """Of each request what was generated, and how it ended."""
        answers: dict[str, tuple[list[int], str]] = {one.id: ([], "") for one in requests}
        for report in self.run(*[Submit(request=one) for one in requests], **how):
            assert not isinstance(report, RequestFailed), report
            for chunk in report.chunks if isinstance(report, Tokens) else ():
                ids, end = answers[chunk.id]
                answers[chunk.id] = ([*ids, *chunk.token_ids], chunk.finish_reason or end)
        return answers


@pytest.fixture
def engine(tiny_llama: Path) -> Iterator[Engine]:
    ours, agents = socket.socketpair()
    yield Engine(tiny_llama, ours, agents)
    ours.close()
    agents.close()


@pytest.fixture(scope="session")
def text_of(tiny_llama: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(tiny_llama / "tokenizer.json")).decode


def is_valid(text: str) -> bool:
    value = json.loads(text)
    return (
        set(value) == {"name", "ok"}
        and isinstance(value["ok"], bool)
        and len(value["name"].encode("utf-16-le")) <= 24
    )


def test_each_answer_matches_beside_plain_neighbours_and_is_what_it_is_alone(
    engine: Engine, text_of: Any
) -> None:
    sampled = SamplingParams(temperature=1.0, seed=5)
    with_grammar = [request(name) for name in "abc"] + [request("d", sampling=sampled)]
    plain = [request("p", "", max_tokens=30), request("q", "", max_tokens=30, sampling=sampled)]
    together = engine.tokens(*with_grammar, *plain)
    for one in with_grammar:
        ids, end = together[one.id]
        assert end == "stop" and is_valid(text_of(ids)), text_of(ids)
    for one in (*with_grammar, *plain):
        assert engine.tokens(one)[one.id] == together[one.id]
    assert together["d"][0] != engine.tokens(request("d"))["d"][0], "the seed matters"


def test_an_answer_goes_on_where_it_broke_off(engine: Engine) -> None:
    whole, _ = engine.tokens(request("a", sampling=SamplingParams(temperature=1.0, seed=9)))["a"]
    for num_sent in (1, 9, len(whole)):
        resumed = request(
            "a", sampling=SamplingParams(temperature=1.0, seed=9), sent_ids=tuple(whole[:num_sent])
        )
        assert engine.tokens(resumed)["a"] == (whole[num_sent:], "stop")


def test_logprobs_are_the_models_own(engine: Engine) -> None:
    reports = engine.run(Submit(request=request("a", logprobs=2)))
    chunks = [chunk for report in reports if isinstance(report, Tokens) for chunk in report.chunks]
    assert any(chunk.logprobs[0].top[0][0] != chunk.token_ids[0] for chunk in chunks if chunk.logprobs)


@pytest.mark.parametrize(
    ("bad", "code", "words"),
    [
        (request("bad", "start: nobody"), "invalid_grammar", "unknown name"),
        (request("bad", sent_ids=(FIRST_BYTE + ord("x"),)), "invalid_grammar", "does not fit"),
    ],
)
def test_a_grammar_that_cannot_be_fails_its_request_alone(
    engine: Engine, bad: GenerateRequest, code: str, words: str
) -> None:
    reports = engine.run(Submit(request=bad), Submit(request=request("good")))
    (failed,) = (report for report in reports if isinstance(report, RequestFailed))
    assert (failed.id, failed.code) == ("bad", code) and words in failed.message
    ends = [
        c.id for report in reports if isinstance(report, Tokens) for c in report.chunks if c.finish_reason
    ]
    assert ends == ["good"]


def test_a_grammar_that_breaks_off_later_fails_its_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = RowGrammar.advance

    def breaks(self: RowGrammar, ids: Any) -> None:
        usual(self, ids)
        self.num_seen = getattr(self, "num_seen", 0) + len(ids)  # type: ignore[attr-defined]
        if self.num_seen == 4:  # type: ignore[attr-defined]
            self.failure = "broken for the test"

    monkeypatch.setattr(RowGrammar, "advance", breaks)
    reports = engine.run(Submit(request=request("bad")), Submit(request=request("plain", "", max_tokens=12)))
    (failed,) = (report for report in reports if isinstance(report, RequestFailed))
    assert (failed.id, failed.code, failed.message) == ("bad", "grammar_failed", "broken for the test")
    chunks = [c for report in reports if isinstance(report, Tokens) for c in report.chunks]
    assert sum(len(c.token_ids) for c in chunks if c.id == "bad") == 3, "none that the grammar did not see"
    assert [c.finish_reason for c in chunks if c.id == "plain" and c.finish_reason] in (["length"], ["stop"])


def test_a_request_can_be_cancelled_while_its_grammar_is_compiled(engine: Engine) -> None:
    reports = engine.run(Submit(request=request("a")), Cancel(id="a"))
    (chunk,) = (chunk for report in reports if isinstance(report, Tokens) for chunk in report.chunks)
    assert (chunk.id, chunk.finish_reason) == ("a", "cancelled")


def test_a_row_that_leaves_to_make_room_comes_back_with_its_grammar(engine: Engine) -> None:
    """Two rows that together outgrow four blocks of 256 tokens, and alone do not."""
    grammar = "start: /[a-z]{330}/"
    prompts = {name: (FIRST_BYTE + ord(name),) * 200 for name in "ab"}
    requests = [
        msgspec.structs.replace(request(name, grammar, max_tokens=500), prompt_ids=prompt)
        for name, prompt in prompts.items()
    ]
    alone = {one.id: engine.tokens(one)[one.id] for one in requests}
    one_byte_a_token = RankKv(rank=0, host="h", budget_bytes=1030, fixed_bytes=0, per_token=((0, 1),))
    kv = KvBudget(ranks=(one_byte_a_token,))
    assert engine.tokens(*requests, kv=kv, plans_ahead=2) == alone
    assert engine.num_preempted > 0 and all(end == "stop" for _, end in alone.values())


class CancelSoon(Commands):
    """Cancels `a` when its admission is planned and not yet applied."""

    num_looks = -1  # since its grammar was ready

    def poll(self) -> EngineCommand | GrammarReady | None:
        command = super().poll()
        self.num_looks += isinstance(command, GrammarReady) or (command is None and self.num_looks >= 0)
        return Cancel(id="a") if command is None and self.num_looks == 2 else command


def test_a_cancel_between_a_plan_and_its_step_ends_only_its_request(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "Commands", CancelSoon)
    plain = request("p", "", max_tokens=40, stop_token_ids=())
    reports = engine.run(Submit(request=plain), Submit(request=request("a")), plans_ahead=2)
    chunks = [chunk for report in reports if isinstance(report, Tokens) for chunk in report.chunks]
    ends = {chunk.id: chunk.finish_reason for chunk in chunks if chunk.finish_reason}
    assert ends == {"a": "cancelled", "p": "length"}
    assert sum(len(chunk.token_ids) for chunk in chunks if chunk.id == "p") == 40


def test_grammars_are_compiled_one_by_one_and_a_cancelled_one_not_at_all(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, ready = [], threading.Event(), threading.Event()

    def compile_slowly(self: Grammars, grammar: str, *_: Any) -> Any:
        begun.append(grammar)
        assert go_on.wait(20)
        raise GrammarError("told")

    monkeypatch.setattr(Grammars, "_compile", compile_slowly)
    grammars = Grammars(str(tiny_llama))
    grammars.begin(request("a", "first"), VOCAB, ready.set)
    grammars.begin(request("b", "second"), VOCAB, lambda: None)
    assert grammars.drop("b") and grammars.take("b") is None
    go_on.set()
    assert ready.wait(20)
    with pytest.raises(GrammarError, match="told"):
        grammars.take("a")
    grammars.close()
    assert begun == ["first"]


def test_whatever_the_library_raises_fails_the_request_alone(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Panic(BaseException):
        pass

    def panics(*_: Any) -> Any:
        raise Panic("index out of bounds")

    monkeypatch.setattr(grammar_module, "LLMatcher", panics)
    reports = engine.run(Submit(request=request("a")))
    (failed,) = (report for report in reports if isinstance(report, RequestFailed))
    assert failed.code == "invalid_grammar" and "index out of bounds" in failed.message


def test_a_compiled_grammar_is_progress(engine: Engine) -> None:
    """Otherwise a leader that only compiles would be taken for stuck."""
    moved: list[int] = []
    usual = Reporter.compiled_grammar

    def note(self: Reporter) -> None:
        before = self.layer
        usual(self)
        moved.append(self.layer - before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Reporter, "compiled_grammar", note)
        engine.run(
            Submit(request=request("a", "start: nobody")), Submit(request=request("b", "start: nobody"))
        )
    assert moved == [1, 1]
