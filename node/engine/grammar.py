"""Output that must match a grammar: which tokens may come next, by llguidance. On the leader only.

The grammar's state is a function of the generated ids, so a request that is admitted again after a recovery
replays the ids that its client has and goes on where it was. Nothing here touches a model; compiling runs in
a thread, because a large grammar takes seconds and other requests must not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from mlx_mesh.mesh.messages import GenerateRequest

TOKENIZER_FILE = "tokenizer.json"


class GrammarError(Exception):
    """The grammar cannot be used with this model, or the tokens broke it; the message says how."""


STACK_BYTES = 64 * 1024 * 1024
"""Of the compiling thread: it recurses as deep as the grammar is. The front end tried it with much less."""


def _deep_thread() -> ThreadPoolExecutor:
    usual = threading.stack_size(STACK_BYTES)
    try:
        executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        executor.submit(int).result()  # the thread begins with its first work
        return executor
    finally:
        threading.stack_size(usual)


@dataclass(frozen=True, slots=True)
class GrammarReady:
    """Comes back to the engine's main thread when the request's grammar is compiled, or cannot be."""

    request: GenerateRequest


class Grammars:
    """Compiles the grammars of one model. `folder`: the model's, with its tokenizer.json."""

    def __init__(self, folder: str) -> None:
        self._path = Path(folder) / TOKENIZER_FILE
        self._compiled: dict[str, Future[RowGrammar]] = {}
        self._thread = _deep_thread()
        # Reading a vocabulary takes up to a second: kept for the ids that end a text, which hardly ever vary.
        self._tokenizer = lru_cache(maxsize=4)(self._read_tokenizer)

    def begin(self, request: GenerateRequest, vocab_size: int, then: Callable[[], None]) -> None:
        """Compile the request's grammar in the thread, then call `then` there."""
        ends = tuple(request.stop_token_ids)
        ids = request.sent_ids
        future = self._thread.submit(self._compile, request.grammar, ends, vocab_size, ids)
        self._compiled[request.id] = future
        future.add_done_callback(lambda _: then())

    def take(self, request_id: str) -> RowGrammar | None:
        """What `begin` made of a request, once. Raises GrammarError when the grammar cannot be used; None
        for a request that has none under way."""
        future = self._compiled.pop(request_id, None)
        return None if future is None or future.cancelled() else future.result()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def drop(self, request_id: str) -> bool:
        """Forget a request; whether there was one."""
        future = self._compiled.pop(request_id, None)
        if future is not None:
            future.cancel()  # when its turn has not come yet
        return future is not None

    def _compile(
        self, grammar: str, end_ids: tuple[int, ...], vocab_size: int, sent_ids: Sequence[int]
    ) -> RowGrammar:
        try:
            matcher = LLMatcher(self._tokenizer(end_ids, vocab_size), grammar)
        except GrammarError:
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarError(f"The grammar cannot be used: {error}") from error
        if matcher.is_error():
            raise GrammarError(f"The grammar cannot be used: {matcher.get_error()}")
        row = RowGrammar(matcher, end_ids, vocab_size)
        row.restart(sent_ids)
        if row.failure:
            raise GrammarError(row.failure)
        return row

    def _read_tokenizer(self, end_ids: tuple[int, ...], vocab_size: int) -> LLTokenizer:
        try:
            text = self._path.read_text(encoding="utf-8")
            return LLTokenizer(text, n_vocab=vocab_size, eos_token=list(end_ids))
        except Exception as error:  # the library raises anything for a tokenizer that it does not read
            raise GrammarError(
                f"A grammar needs the model's {TOKENIZER_FILE}; {self._path} cannot be used: {error}"
            ) from error


class RowGrammar:
    """The state of one sequence: `advance` by what was generated, `allowed` for what may come next."""

    def __init__(self, matcher: LLMatcher, end_ids: Sequence[int], vocab_size: int) -> None:
        self._matcher = matcher
        self._end_ids = frozenset(end_ids)
        self._mask = np.zeros((vocab_size + 31) // 32, np.uint32)
        self._vocab_size = vocab_size
        self.failure = ""  # why the grammar cannot go on; the tokens since then are not to be given out

    def restart(self, sent_ids: Sequence[int]) -> None:
        """The row begins (again) behind these: it may have left its batch to make room, and what it computed
        ahead then does not count."""
        self.failure = ""
        self._matcher.reset()
        self.advance(sent_ids)

    def advance(self, ids: Sequence[int]) -> None:
        """These were generated. One that ends the text ends the sequence too, so nothing after it counts."""
        for token_id in ids:
            if self.failure or token_id in self._end_ids:
                return
            if not self._matcher.consume_token(token_id):
                reason = self._matcher.get_error() or "it is complete"
                self.failure = f"Token {token_id} does not fit the grammar: {reason}"

    def allowed(self) -> NDArray[np.bool_]:
        """(vocab_size,): which tokens may come next; those that end a text only where the grammar may end.
        At least one is True: a grammar that allows none has failed, and all are."""
        if not self.failure:
            self._matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if self._matcher.is_error():
                self.failure = f"The grammar cannot go on: {self._matcher.get_error()}"
            elif not self._mask.any():
                self.failure = "The grammar allows no token of this model here."
        if self.failure:
            return np.ones(self._vocab_size, np.bool_)
        bits = np.unpackbits(self._mask.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)
