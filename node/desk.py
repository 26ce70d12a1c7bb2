"""Between the proxy and the leader's engine: who may ask, what is open, and what survives an epoch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.messages import (
    Cancel,
    Chunk,
    Drain,
    EngineCommand,
    Failed,
    GenerateRequest,
    NodeReply,
    ProxyEvent,
    ProxyRequest,
    Readiness,
    RequestFailed,
    ResetPrefixes,
    Submit,
    TokenChunk,
)
from mlx_mesh.node.journal import Entry, Journal

RETRY_AFTER_S = 5

MAX_MEDIA_BYTES = 512 * 1024 * 1024
"""Pictures of open requests are kept until their end, so that a recovery can read them again; with so many
bytes of them open, text alone is taken."""

DOWN_RETRY_AFTER_S = 30
"""When a host has to come back first."""


class Desk:
    """Takes requests from the proxy, keeps their journal, and hands them to whatever engine leads now."""

    def __init__(
        self,
        *,
        send: Callable[[ProxyEvent], None],
        command: Callable[[EngineCommand], None],
        now: Callable[[], float],
        world_size: int,
        max_open: int,
        request_s: float,
        pressure: Callable[[], str] = lambda: "",
    ) -> None:
        """`command` goes to the leader's engine; `max_open` bounds running and waiting requests together;
        `pressure`: which host is short of memory, in words."""
        self._send = send
        self._command = command
        self._now = now
        self._max_open = max_open
        self._request_s = request_s
        self._pressure = pressure
        self._owed_since: float | None = None
        self._is_waiting_room = False  # requests that come while no engine leads wait for the next one
        self.is_draining = False
        self._closed_by = ("", "")  # no new request is taken for now: code and why
        self.num_resumed = self.num_cancelled = self.num_expired = 0
        self.num_refused: Counter[str] = Counter()  # by code
        self.journal = Journal()
        self.readiness = Readiness(
            ready=False,
            reason="starting",
            world_size=world_size,
            context_length=0,
            epoch=0,
        )

    @property
    def is_ready(self) -> bool:
        return self.readiness.ready

    @property
    def owed_s(self) -> float:
        """Since when some request waits for tokens of this epoch; 0 = none does."""
        if not len(self.journal) or self._owed_since is None:
            return 0.0
        return max(0.0, self._now() - self._owed_since)

    # ------------------------------------------------------------ epochs

    def open(
        self,
        epoch: int,
        context_length: int,
        kv: KvBudget | None = None,
        *,
        world_size: int = 0,
        lineup: str = "",
        media: tuple[str, ...] = (),
        media_refusals: dict[str, str] | None = None,
        alone_reason: str = "",
        whole_reason: str = "",
    ) -> int:
        """All ranks of `epoch` are ready: admit what is open and take new requests. Returns how many were
        open. `world_size` 0: as before; the others: see Readiness."""
        self._owed_since = self._now()
        self._is_waiting_room = True
        self._announce(
            Readiness(
                ready=True,
                reason="",
                world_size=world_size or self.readiness.world_size,
                context_length=context_length,
                epoch=epoch,
                kv=kv or KvBudget(),
                lineup=lineup,
                media=media,
                media_refusals=media_refusals or {},
                alone_reason=alone_reason,
                whole_reason=whole_reason,
            )
        )
        self._admit()
        return len(self.journal)

    def _admit(self) -> None:
        """Hand over what the engine may have now."""
        if not self.is_ready:
            return
        admit, ended = self.journal.admissions()
        for chunk in ended:
            self._send(Chunk(chunk=chunk))
        for request in admit:
            self.num_resumed += bool(request.sent_ids)
            self._command(Submit(request=request))

    def epoch_left(self) -> None:
        """No engine leads any more, because other hosts shall serve: nobody is to blame."""
        self.journal.epoch_left()

    def epoch_ended(self, *, by_itself: bool, was_killed: bool = False) -> int:
        """No engine leads any more, see Journal.epoch_ended. Requests that are to blame end here; returns how
        many."""
        convicted = self.journal.epoch_ended(by_itself=by_itself, was_killed=was_killed)
        for request_id in convicted:
            message = (
                "An engine ended while it computed this request, and again when the request was alone in it. "
                "The other requests go on; sending this one again would end the next engine."
            )
            self._send(Failed(id=request_id, code="request_ends_engine", message=message))
        return len(convicted)

    def pause(self, reason: str, code: str = "") -> None:
        """No engine leads now. Open requests stay in the journal. `code`: see Readiness."""
        self._announce(
            msgspec.structs.replace(self.readiness, ready=False, reason=reason, lineup="", code=code)
        )

    def close(self, code: str, why: str) -> None:
        """Refuse new requests with this code and these words, until `reopen`."""
        self._closed_by = (code, why)

    def reopen(self) -> bool:
        """Returns whether it was closed."""
        was_closed, self._closed_by = bool(self._closed_by[0]), ("", "")
        return was_closed

    def go_down(self, reason: str) -> None:
        """Nobody knows when there will be an engine again: open requests end, and none is kept meanwhile."""
        self.pause(reason)
        self._is_waiting_room = False
        self.fail_all("not_ready", f"The mesh is {reason}", DOWN_RETRY_AFTER_S)

    def drain(self) -> None:
        """Take no new request; open ones go on."""
        self.is_draining = True
        self._send(Drain())

    def fail_all(self, code: str, message: str, retry_after_s: int = 0) -> int:
        """End every open request with an error; returns how many there were."""
        ids = self.journal.drain()
        for request_id in ids:
            self._send(Failed(id=request_id, code=code, message=message, retry_after_s=retry_after_s))
        return len(ids)

    def lost_proxy(self) -> None:
        """The proxy is gone and its clients with it."""
        for request_id in self.journal.drain():
            if self.is_ready:
                self._command(Cancel(id=request_id))

    def expire(self) -> None:
        """End requests that are open for too long."""
        for request_id, limit_s in self.journal.overdue(self._now(), self._request_s).items():
            self.journal.close(request_id)
            self.num_expired += 1
            if self.is_ready:
                self._command(Cancel(id=request_id))
            name = "request_s" if limit_s == self._request_s else "max_time_s"
            message = f"The request was not finished within {name} = {limit_s:g} s."
            self._send(Failed(id=request_id, code="timeout", message=message))

    def _announce(self, readiness: Readiness) -> None:
        if readiness != self.readiness:
            self.readiness = readiness
            self._send(readiness)

    # ------------------------------------------------------------ the engine's side

    def note_admitted(
        self, request_ids: tuple[str, ...], cached: tuple[int, ...] = (), prompts: tuple[int, ...] = ()
    ) -> None:
        """These take part in the steps to come, and begin with so many `cached` tokens of their prompts, of
        which only the engine may know the lengths, `prompts`. Clients hear it once `cached` is known."""
        self.journal.note_admitted(request_ids)
        for request_id, num_cached, num_prompt in zip(
            request_ids, cached, prompts or [0] * len(cached), strict=False
        ):
            if self.journal.is_new(request_id):  # one that comes back said it before
                chunk = TokenChunk(id=request_id, cached_tokens=num_cached, prompt_tokens=num_prompt)
                self._send(Chunk(chunk=chunk))

    def take(self, chunks: tuple[TokenChunk, ...]) -> bool:
        """Pass on what a step produced; True when it had tokens (the step was real work)."""
        for chunk in chunks:
            if self.journal.record(chunk):
                self._send(Chunk(chunk=chunk))
        if self.journal.has_waiting:
            self._admit()
        return any(chunk.token_ids for chunk in chunks)

    def take_failure(self, failed: RequestFailed) -> None:
        """One request cannot go on; the others do."""
        if self.journal.close(failed.id):
            self.num_refused[failed.code] += 1
            self._send(Failed(id=failed.id, code=failed.code, message=failed.message, param=failed.param))
        self._admit()

    # ------------------------------------------------------------ the proxy's side

    def hear(self, request: ProxyRequest) -> None:
        match request:
            case Submit(request=generate):
                self._submit(generate)
            case Cancel(id=request_id):
                self._cancel(request_id)
            case _:  # of all replicas together, or of the embedder
                pass

    def reset_prefixes(self, query_id: str) -> NodeReply:
        """Drop what is kept of prompts."""
        epoch = self.readiness.epoch
        if not self.is_ready:
            message = f"The mesh is not ready: {self.readiness.reason}."
            return NodeReply(id=query_id, error="not_ready", message=message, epoch=epoch)
        self._command(ResetPrefixes())
        return NodeReply(id=query_id, message="All ranks drop what they keep.", epoch=epoch)

    def _submit(self, request: GenerateRequest) -> None:
        refusal = self._refusal(request)
        if refusal is not None:
            code, message, retry_after_s = refusal
            self.num_refused[code] += 1
            self._send(Failed(id=request.id, code=code, message=message, retry_after_s=retry_after_s))
            return
        if not len(self.journal):
            self._owed_since = self._now()
        self.journal.open(request, self._now())
        self._admit()

    @property
    def is_open(self) -> bool:
        """A new request would be taken."""
        return self._closed() is None

    @property
    def will_serve(self) -> bool:
        """An engine leads, or one is on its way."""
        return self.is_ready or self._is_waiting_room

    def adopt(self, entry: Entry) -> None:
        """Go on with a request of another desk, however many are open here."""
        if not len(self.journal):
            self._owed_since = self._now()
        self.journal.adopt(entry)
        self._admit()

    def _refusal(self, request: GenerateRequest) -> tuple[str, str, int] | None:
        """Code, message and seconds to wait, for a request that cannot be taken."""
        if request.id in self.journal:
            return "duplicate_request", f"The request id {request.id} is in use.", 0
        closed = self._closed()
        if closed is None and request.media is not None and self.journal.media_bytes >= MAX_MEDIA_BYTES:
            return (
                "queue_full",
                f"The open requests hold {MAX_MEDIA_BYTES} bytes of pictures or more. Try again later.",
                RETRY_AFTER_S,
            )
        return closed

    def _closed(self) -> tuple[str, str, int] | None:
        """The same of any request."""
        if self.is_draining:
            return "draining", "The mesh is shutting down.", RETRY_AFTER_S
        code, why = self._closed_by
        if code:
            return code, why, RETRY_AFTER_S if code == "switching_model" else 0
        if not self.is_ready and not self._is_waiting_room:
            return "not_ready", f"The mesh is not ready: {self.readiness.reason}.", RETRY_AFTER_S
        if short := self._pressure():
            message = f"A host is short of memory ({short}), so no new request is taken now. Try again later."
            return "memory_pressure", message, RETRY_AFTER_S
        if len(self.journal) >= self._max_open:
            return (
                "queue_full",
                f"{len(self.journal)} requests are open, as many as this mesh takes. Try again later.",
                RETRY_AFTER_S,
            )
        return None

    def _cancel(self, request_id: str) -> None:
        if not self.journal.cancel(request_id):
            return  # it ended meanwhile
        self.num_cancelled += 1
        if self.is_ready and self.journal.is_submitted(request_id):
            self._command(Cancel(id=request_id))
        else:
            self.journal.close(request_id)
            self._send(Chunk(chunk=TokenChunk(id=request_id, finish_reason="cancelled")))
