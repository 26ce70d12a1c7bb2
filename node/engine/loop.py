"""The generation loop of one rank: step plans in, one BatchGenerator step each.

Every rank runs the same generator over its own shard and applies the same plans at the same steps. The
generator decides by counts and lengths only, so equal plans give equal schedules and the collectives meet.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import mlx.core as mx
import msgspec
from mlx_lm.generate import BatchGenerator, StopSequences

from mlx_mesh.mesh.messages import (
    Admission,
    Cancel,
    EngineCommand,
    GenerateRequest,
    RequestFailed,
    ResetPrefixes,
    StepPlan,
    StopEngine,
    Submit,
    TokenChunk,
    Tokens,
)
from mlx_mesh.node.engine.exchanges import DataExchange
from mlx_mesh.node.engine.failure import EngineError
from mlx_mesh.node.engine.feature_wire import decode_features, encode_features
from mlx_mesh.node.engine.features import Features
from mlx_mesh.node.engine.grammar import GrammarError, GrammarReady, Grammars, RowGrammar
from mlx_mesh.node.engine.pictures import PictureError, Pictures
from mlx_mesh.node.engine.prefix_disk import Loaded
from mlx_mesh.node.engine.prefix_planner import Stored
from mlx_mesh.node.engine.prefix_rows import RowPrefixes
from mlx_mesh.node.engine.prefix_saving import Saving
from mlx_mesh.node.engine.prefix_store import PrefixStore, can_always_cut
from mlx_mesh.node.engine.report import Reporter
from mlx_mesh.node.engine.row_media import reads_alone
from mlx_mesh.node.engine.sampler import FollowerSampler, LeaderSampler, RowProcessor
from mlx_mesh.node.engine.scheduler import Held, Produced, Scheduler
from mlx_mesh.node.engine.shard import NewCaches
from mlx_mesh.node.engine.whole_prompts import WholePrompts

RequestOf = Callable[[str], GenerateRequest]

READ_AHEAD = 2
"""Prompts whose pictures are read while they wait for a row: what becomes of pictures is large."""

OWN_FEATURES = b"here"
"""In place of features where no other rank reads them."""

MAX_PREFILL_ROWS = 8
"""Prompts computed together (mlx-lm's default)."""


class CommandSource(Protocol):
    """See commands.Commands."""

    def next(self) -> EngineCommand | GrammarReady: ...
    def poll(self) -> EngineCommand | GrammarReady | None: ...
    def put(self, ready: GrammarReady) -> None: ...


class PlanSink(Protocol):
    """See plans.PlanPublisher."""

    def publish(self, plan: StepPlan) -> None: ...


class PlanSource(Protocol):
    """See plans.PlanReceiver."""

    def next(self) -> StepPlan: ...


class NoFollowers:
    """The plan sink of a mesh of one rank."""

    def publish(self, plan: StepPlan) -> None:
        """Nobody listens."""


class Generation:
    """One rank's rows: a BatchGenerator that only step plans change."""

    def __init__(
        self,
        model: Any,
        exchange: DataExchange,
        *,
        max_sequences: int,
        prefill_step_size: int,
        is_leader: bool,
        new_caches: NewCaches | None = None,
    ) -> None:
        """`new_caches` makes the caches of a new row; None = the model's own."""
        self._exchange = exchange
        self.can_always_cut = can_always_cut(model)
        self._sampler = LeaderSampler(exchange) if is_leader else FollowerSampler(exchange)
        self._generator = BatchGenerator(
            WholePrompts(model) if reads_alone(model) else model,
            sampler=self._sampler,
            completion_batch_size=max_sequences,
            prefill_batch_size=1 if reads_alone(model) else min(MAX_PREFILL_ROWS, max_sequences),
            prefill_step_size=prefill_step_size,
        )
        self._new_caches = new_caches
        self._uids: dict[str, int] = {}
        self._ids: dict[int, str] = {}
        self._processors: dict[str, RowProcessor] = {}
        self._prefill_step_size = prefill_step_size
        self._prompt_left: dict[str, int] = {}  # upper bounds: the generator says nothing while it prefills
        self._lengths: dict[str, int] = {}
        self.grammars: dict[str, RowGrammar] = {}  # on the leader, of open requests: a row may come back
        self.features: dict[str, Features] = {}  # likewise, of prompts with pictures
        self._prefixes = RowPrefixes(self._generator)

    def prompt_tokens_after(self, plan: StepPlan) -> int:
        """The most prompt tokens that the step of `plan` may read."""
        new = [len(one.prompt_ids) - one.num_reused for one in plan.admit if not one.features]
        left = [*self._prompt_left.values(), *new]
        media = sum(len(one.prompt_ids) for one in plan.admit if one.features)  # may be read in one piece
        return media + sum(min(tokens, self._prefill_step_size) for tokens in left)

    @property
    def kv_tokens(self) -> int:
        """Tokens in the caches of all rows."""
        return sum(self._lengths.values())

    @property
    def longest_row(self) -> int:
        """Tokens of the longest row."""
        return max(self._lengths.values(), default=0)

    @property
    def num_rows(self) -> int:
        return len(self._uids)

    @property
    def prefixes(self) -> PrefixStore:
        """The caches that outlive their rows."""
        return self._prefixes.store

    def take_stored(self) -> list[Stored]:
        """What was kept since the last call."""
        return self._prefixes.take_stored()

    @property
    def vocab_size(self) -> int:
        """Width of the model's output on the leader, 0 before the first step."""
        return self._sampler.vocab_size if isinstance(self._sampler, LeaderSampler) else 0

    def apply(self, plan: StepPlan, request_of: RequestOf | None = None) -> None:
        """Change the rows as planned. `request_of`: on the leader, the whole request of an admission."""
        # A request that finished by itself after the plan was made is gone on all ranks alike.
        gone = [request_id for request_id in plan.cancel if request_id in self._uids]
        if gone:
            self._prefixes.keep_rows([self._uids[one] for one in gone if one not in plan.leave])
            self._generator.remove([self._forget(request_id) for request_id in gone])
        for admission in plan.admit:
            processors: list[RowProcessor] = []
            if request_of is not None and isinstance(self._sampler, LeaderSampler):
                request, grammar = request_of(admission.id), self.grammars.get(admission.id)
                if grammar is not None:
                    grammar.restart(request.sent_ids)
                processors = self._sampler.processors(request, grammar)
            uid = self._prefixes.insert(
                admission,
                self._features_of(admission),
                max_tokens=[admission.max_tokens],
                caches=[self._new_caches()] if self._new_caches is not None else None,
                logits_processors=[processors],
                stop_sequences=[StopSequences([(i,) for i in admission.stop_token_ids])],
            )
            self._uids[admission.id] = uid
            self._lengths[admission.id] = len(admission.prompt_ids)
            self._prompt_left[admission.id] = len(admission.prompt_ids) - admission.num_reused
            self._ids[uid] = admission.id
            if processors:
                self._processors[admission.id] = processors[0]
        for save in plan.save:
            self._prefixes.save(save)
        for entry in plan.evict:  # after the admissions: they may begin with one of these
            self._prefixes.evict(entry)

    def _features_of(self, admission: Admission) -> Features | None:
        if not admission.features:
            return None
        own = self.features.get(admission.id)
        return own if own is not None else decode_features(admission.features)

    def forget_request(self, request_id: str) -> None:
        """The request is over: its row will not come back."""
        self.grammars.pop(request_id, None)
        self.features.pop(request_id, None)

    @property
    def stream(self) -> Any:
        """Where everything of this rank is computed."""
        return self._generator.stream

    def step(self) -> list[Produced]:
        """One generator step; the new token of each row that has one. With no row left afterwards nothing is
        under way on this rank, so an idle mesh has no open collective."""
        progress, responses = self._generator.next()
        self._prefixes.keep_checkpoints(progress)
        produced = []
        for response in responses:
            request_id = self._ids[response.uid]
            self._prompt_left.pop(request_id, None)
            self._lengths[request_id] += 1
            processor = self._processors.get(request_id)
            logprobs = processor.take_logprobs(response.token) if processor is not None else None
            failure = processor.failure if processor is not None else ""
            produced.append(Produced(request_id, response.token, response.finish_reason, logprobs, failure))
            if response.finish_reason is not None:
                self._prefixes.keep_finished(response)
                self._forget(request_id)
        if not self._uids:
            self.settle()
        if self._prefixes.saving is not None:
            self._prefixes.saving.step_ended(is_idle=not self._uids)
        return produced

    def settle(self) -> None:
        """Finish the step that the generator began ahead of need."""
        mx.synchronize(self._generator.stream)
        self._exchange.settle()

    def begin_with(self, loaded: Sequence[Loaded], saving: Saving | None) -> list[Stored]:
        """Before any plan: what was read from files, and where to write others."""
        self._prefixes.saving = saving
        return self._prefixes.begin_with(loaded)

    def close(self) -> None:
        self.settle()
        if self._prefixes.saving is not None:
            self._prefixes.saving.close()
        self._generator.close()

    def _forget(self, request_id: str) -> int:
        uid = self._uids.pop(request_id)
        del self._ids[uid]
        self._prefixes.forget(uid)
        self._processors.pop(request_id, None)
        self._prompt_left.pop(request_id, None)
        self._lengths.pop(request_id, None)
        return uid


def compute(
    generation: Generation, plan: StepPlan, reporter: Reporter, request_of: RequestOf | None = None
) -> list[Produced]:
    """Apply a plan, run its step and note what it gave. The same on every rank."""
    reporter.begin_step(generation.prompt_tokens_after(plan))
    generation.apply(plan, request_of)
    produced = generation.step()
    reporter.note_tokens(plan.step, [(row.id, row.token) for row in produced])
    return produced


class Leader:
    """Rank 0's loop: commands in, plans to all, tokens out."""

    def __init__(
        self,
        generation: Generation,
        scheduler: Scheduler,
        plans: PlanSink,
        reporter: Reporter,
        *,
        plans_ahead: int,
        grammars: Grammars | None = None,
        pictures: Pictures | None = None,
    ) -> None:
        """`plans_ahead`: how many plans the followers get before this rank computes the step in hand. A
        pipeline needs one for each later stage: the first ones go on with the next chunk meanwhile.
        `grammars`, `pictures`: for requests that have some; None = there are none."""
        self._generation = generation
        self._scheduler = scheduler
        self._plans = plans
        self._reporter = reporter
        self._plans_ahead = plans_ahead
        self._published: deque[StepPlan] = deque()
        self._grammars = grammars
        self._pictures = pictures
        self._unread: deque[GenerateRequest] = deque()  # prompts whose pictures are still files

    def run(self, commands: CommandSource) -> None:
        """Generate until StopEngine; then the followers have their stop plan."""
        while True:
            is_idle = not (self._scheduler.has_work or self._published or self._may_read)
            if self._is_told_to_stop(commands, commands.next() if is_idle else commands.poll()):
                return self.stop()
            if self._may_read:  # one at a time: the others' next tokens come in between
                self._catch_up()  # or the followers would wait inside a step for as long as the towers run
                self._read_pictures(self._unread.popleft(), commands)
                if self._is_told_to_stop(commands, commands.poll()):  # or cancelled, which is no row then
                    return self.stop()
            self._advance()

    def _is_told_to_stop(self, commands: CommandSource, command: EngineCommand | GrammarReady | None) -> bool:
        """Take `command` and all that are there; true at a StopEngine."""
        while command is not None:
            if isinstance(command, StopEngine):
                return True
            self._take(command, commands)
            command = commands.poll()
        return False

    def _catch_up(self) -> None:
        """Do the steps that the followers know of."""
        while self._published:
            self._compute(self._published.popleft())

    @property
    def _may_read(self) -> bool:
        """There is a prompt to read, and few others wait for a row, or for their grammar, with what became of
        their pictures in memory."""
        has_row = self._scheduler.runs
        return bool(self._unread) and sum(not has_row(one) for one in self._generation.features) < READ_AHEAD

    def warm_up(self, request: GenerateRequest) -> None:
        """Run one request to its end through the same steps, without telling anyone."""
        self._answer(self._scheduler.submit(request))
        while self._scheduler.has_work or self._published:
            self._advance(is_silent=True)
        self._scheduler.vocab_size = self._generation.vocab_size

    def stop(self) -> None:
        """Do the steps that the followers know of, then have everyone leave at the same one."""
        self._catch_up()
        self._plans.publish(self._scheduler.stop_plan())
        self._generation.close()
        if self._grammars is not None:
            self._grammars.close()

    def _take(self, command: EngineCommand | GrammarReady, commands: CommandSource) -> None:
        match command:
            case Submit(request=request) if request.media is not None or self._reads_whole(request):
                self._unread.append(request)
            case Submit(request=request):
                self._submit(request, commands)
            case GrammarReady(request=request):
                self._submit_with_grammar(request)
            case Cancel(id=request_id):
                self._cancel(request_id)
            case ResetPrefixes():
                self._scheduler.prefixes.clear()
            case _:
                raise EngineError("internal", f"{type(command).__name__} came to an engine that is ready.")

    def _submit(self, request: GenerateRequest, commands: CommandSource) -> None:
        if request.grammar and self._grammars is not None:
            ready = GrammarReady(request)
            self._grammars.begin(request, self._generation.vocab_size, lambda: commands.put(ready))
        else:
            self._submit_now(request)

    def _submit_now(self, request: GenerateRequest) -> None:
        features = self._generation.features.get(request.id)
        held = Held()
        if features is not None:
            reading = self._pictures.bytes_to_read(features) if self._pictures is not None else 0
            held = Held(features.nbytes, features.nbytes_after, reading)
        answer = self._scheduler.submit(request, held)
        if answer is not None:
            self._generation.forget_request(request.id)
        self._answer(answer)

    def _read_pictures(self, request: GenerateRequest, commands: CommandSource) -> None:
        """Turn a prompt with media into one that the scheduler knows how to admit; or one of text alone,
        where the model reads prompts in one piece."""
        # Said before the towers run: a file that ends engines is found by it.
        self._reporter.send(Tokens(step=self._reporter.step, chunks=(), admitted=(request.id,)))
        self._reporter.begin_media()
        try:
            if self._pictures is None:
                raise PictureError("this model takes text only.")
            with mx.stream(self._generation.stream):
                if request.media is not None:
                    ids, keys, features = self._pictures.read(request.media)
                else:
                    ids, keys = request.prompt_ids, ()
                    features = self._pictures.read_text(ids)
        except PictureError as error:
            failed = RequestFailed(id=request.id, code=error.code, message=str(error), param=error.param)
            self._reporter.send(failed)
            return
        finally:
            self._reporter.end_media()
        features = dataclasses.replace(features, keys=keys)
        self._generation.features[request.id] = features
        read = msgspec.structs.replace(
            request,
            prompt_ids=ids,
            prefix_keys=keys,
            media=None,
            skip_prefix_cache=request.skip_prefix_cache or features.is_whole,
        )
        self._submit(read, commands)

    def _reads_whole(self, request: GenerateRequest) -> bool:
        """A prompt that the scheduler refuses anyway is not looked at before."""
        ids = request.prompt_ids
        is_good = bool(ids) and 0 <= min(ids) <= max(ids) < (self._scheduler.vocab_size or 1)
        return self._pictures is not None and self._pictures.reads_whole and is_good

    def _submit_with_grammar(self, request: GenerateRequest) -> None:
        assert self._grammars is not None
        self._reporter.compiled_grammar()
        try:
            grammar = self._grammars.take(request.id)
        except GrammarError as error:
            self._generation.forget_request(request.id)
            self._reporter.send(RequestFailed(id=request.id, code="invalid_grammar", message=str(error)))
            return
        if grammar is None:
            return  # cancelled meanwhile
        self._generation.grammars[request.id] = grammar
        self._submit_now(request)

    def _cancel(self, request_id: str) -> None:
        unread = [request for request in self._unread if request.id == request_id]
        if unread or (self._grammars is not None and self._grammars.drop(request_id)):
            self._unread = deque(request for request in self._unread if request.id != request_id)
            self._generation.forget_request(request_id)
            self._answer(TokenChunk(id=request_id, finish_reason="cancelled"))
            return
        answer = self._scheduler.cancel(request_id)
        if answer is not None:  # it waited; what a row has stays until the row ends
            self._generation.forget_request(request_id)
        self._answer(answer)

    def _advance(self, is_silent: bool = False) -> None:
        while self._scheduler.has_work and len(self._published) <= self._num_ahead():
            plan = self._with_features(self._scheduler.next_plan(time.monotonic()))
            if plan.admit and not is_silent:  # before any rank computes them: one may never come back
                admitted = tuple(admission.id for admission in plan.admit)
                cached = tuple(map(self._scheduler.num_cached, admitted))
                prompts = tuple(map(self._scheduler.num_prompt, admitted))
                self._reporter.send(
                    Tokens(
                        step=self._reporter.step,
                        chunks=(),
                        admitted=admitted,
                        cached=cached,
                        prompts=prompts if any(prompts) else (),
                    )
                )
            self._plans.publish(plan)
            self._published.append(plan)
        if self._published:
            self._compute(self._published.popleft(), is_silent)

    def _with_features(self, plan: StepPlan) -> StepPlan:
        """The plan with what the followers need of pictures."""
        known = self._generation.features
        if not any(admission.id in known for admission in plan.admit):
            return plan
        is_alone = isinstance(self._plans, NoFollowers)
        admit = []
        for one in plan.admit:
            if one.id in known:
                data = OWN_FEATURES if is_alone else encode_features(known[one.id])
                one = msgspec.structs.replace(one, features=data)
            admit.append(one)
        return msgspec.structs.replace(plan, admit=tuple(admit))

    def _num_ahead(self) -> int:
        """Of a prompt the first stages of a pipeline have the next chunks under way meanwhile. A generated
        token must come around first, so more would only delay cancellations."""
        return self._plans_ahead if self._scheduler.is_reading else min(self._plans_ahead, 1)

    def _compute(self, plan: StepPlan, is_silent: bool = False) -> None:
        produced = compute(self._generation, plan, self._reporter, self._scheduler.request)
        for row in produced:
            if row.failure and (failed := self._scheduler.fail(row)) is not None:
                self._reporter.send(failed)
        chunks = self._scheduler.applied(plan)
        chunks += self._scheduler.produced(produced, time.monotonic())
        self._scheduler.stored(self._generation.take_stored())
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._generation.forget_request(chunk.id)
        self._reporter.num_preempted = self._scheduler.num_preempted
        store = self._generation.prefixes
        self._reporter.prefix = self._scheduler.prefixes.counters(len(store), store.num_bytes)
        self._reporter.end_step(
            plan.step,
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            self._generation.kv_tokens,
            self._generation.longest_row,
        )
        if chunks and not is_silent:
            self._reporter.send(Tokens(step=plan.step, chunks=tuple(chunks)))

    def _answer(self, answer: RequestFailed | TokenChunk | None) -> None:
        match answer:
            case RequestFailed():
                self._reporter.send(answer)
            case TokenChunk():
                self._reporter.send(Tokens(step=self._reporter.step, chunks=(answer,)))
            case None:
                pass


class Follower:
    """Any other rank's loop: plans in, nothing out."""

    def __init__(self, generation: Generation, plans: PlanSource, reporter: Reporter) -> None:
        self._generation = generation
        self._plans = plans
        self._reporter = reporter

    def run(self) -> None:
        """Follow until the stop plan."""
        while self._follow():
            pass

    def warm_up(self) -> None:
        """Follow until the leader's one warm-up request is through."""
        began = False
        while not began or self._generation.num_rows:
            if not self._follow():
                raise EngineError("internal", "The leader stopped during the warm-up.")
            began = began or self._generation.num_rows > 0

    def _follow(self) -> bool:
        plan = self._plans.next()
        if plan.stop:
            self._generation.close()
            return False
        compute(self._generation, plan, self._reporter)
        generation = self._generation
        generation.take_stored()
        self._reporter.note_prefixes(len(generation.prefixes), generation.prefixes.num_bytes)
        self._reporter.end_step(
            plan.step, generation.num_rows, 0, generation.kv_tokens, generation.longest_row
        )
        return True
