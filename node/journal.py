"""Open requests and what was already sent of each, so that a request outlives an epoch. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from mlx_mesh.mesh.messages import FinishReason, GenerateRequest, TokenChunk

SUSPECTED_TOO_OFTEN = 2
"""A request that is a suspect for so many times is alone in the engine to its end."""

FRUITLESS_TOO_OFTEN = 3
"""So many epochs in a row that ended in its steps without a token of it make a request suspect, too."""


@dataclass(slots=True)
class Entry:
    """One open request."""

    request: GenerateRequest  # as the proxy submitted it
    opened_at: float
    sent_ids: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    num_admissions: int = 0
    is_submitted: bool = False  # an engine of this epoch has it
    took_part: bool = False  # a step of this epoch had it
    num_tokens_before: int = 0  # sent before this epoch
    num_fruitless: int = 0  # epochs in a row that it took part in, without a token of it
    num_suspected: int = 0
    is_suspect: bool = False
    num_sent_at_crash: int = 0

    @property
    def usage(self) -> tuple[int, int]:
        """(prompt tokens, generated tokens); a re-admission counts nothing twice."""
        return len(self.request.prompt_ids), len(self.request.sent_ids) + len(self.sent_ids)


class Journal:
    """All open requests, oldest first."""

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._entries

    def ids(self) -> tuple[str, ...]:
        return tuple(self._entries)

    @property
    def has_waiting(self) -> bool:
        """Some request is open that no engine has."""
        return any(not entry.is_submitted for entry in self._entries.values())

    @property
    def num_suspects(self) -> int:
        return sum(entry.is_suspect for entry in self._entries.values())

    @property
    def media_bytes(self) -> int:
        """Of the pictures of all open requests."""
        return sum(_media_bytes(entry.request) for entry in self._entries.values())

    def is_submitted(self, request_id: str) -> bool:
        """An engine of this epoch has it."""
        entry = self._entries.get(request_id)
        return entry is not None and entry.is_submitted

    def is_new(self, request_id: str) -> bool:
        """Nothing of it was sent yet, and it was handed to an engine once."""
        entry = self._entries.get(request_id)
        return entry is not None and not entry.sent_ids and entry.num_admissions == 1

    def open(self, request: GenerateRequest, now: float) -> None:
        """Take a request. Its id must be new (ValueError)."""
        if request.id in self._entries:
            raise ValueError(f"request id {request.id!r} is in use")
        self._entries[request.id] = Entry(request=request, opened_at=now)

    def record(self, chunk: TokenChunk) -> bool:
        """Note what is sent to the client now; a finish_reason closes the request. False = not open (it was
        cancelled or failed meanwhile): nothing must be sent."""
        entry = self._entries.get(chunk.id)
        if entry is None:
            return False
        entry.sent_ids.extend(chunk.token_ids)
        if chunk.finish_reason is not None:
            del self._entries[chunk.id]
        elif entry.is_suspect and entry.num_suspected < SUSPECTED_TOO_OFTEN:
            # It got past where the engine ended: whatever that was, it did not happen again.
            entry.is_suspect = len(entry.sent_ids) <= entry.num_sent_at_crash + 1
        return True

    def note_admitted(self, request_ids: Sequence[str]) -> None:
        """The steps to come have these in them."""
        for request_id in request_ids:
            if (entry := self._entries.get(request_id)) is not None:
                entry.took_part = True

    def epoch_ended(self, *, by_itself: bool, was_killed: bool = False) -> tuple[str, ...]:
        """No engine has any request now. `by_itself`: an engine ended on its own account, so the requests in
        its steps are suspects; `was_killed`: from outside, as a system that is short of memory does. A host
        that was lost, or an engine that was frozen, says nothing about requests. Returns those that are
        convicted, which are closed: they ended an engine while they were alone in it."""
        parts = [entry for entry in self._entries.values() if entry.took_part]
        for entry in parts:
            if len(entry.sent_ids) > entry.num_tokens_before:
                entry.num_fruitless = 0
            elif by_itself or was_killed:
                entry.num_fruitless += 1
        is_starved = was_killed and len(parts) == 1 and parts[0].num_fruitless > FRUITLESS_TOO_OFTEN
        convicted = [
            entry for entry in parts if len(parts) == 1 and entry.is_suspect and (by_itself or is_starved)
        ]
        for entry in convicted:
            del self._entries[entry.request.id]
        for entry in self._entries.values():
            is_hungry = was_killed and entry.num_fruitless >= FRUITLESS_TOO_OFTEN
            if entry.took_part and (by_itself or is_hungry):
                entry.is_suspect = True
                entry.num_suspected += 1
                entry.num_sent_at_crash = len(entry.sent_ids)
            entry.is_submitted = entry.took_part = False
            entry.num_tokens_before = len(entry.sent_ids)
        return tuple(entry.request.id for entry in convicted)

    def epoch_left(self) -> None:
        """No engine has any request now, and none is to blame for that."""
        for entry in self._entries.values():
            entry.is_submitted = entry.took_part = False
            entry.num_tokens_before = len(entry.sent_ids)

    def cancel(self, request_id: str) -> bool:
        """Note that nobody waits any more; it is not admitted again. False = not open."""
        entry = self._entries.get(request_id)
        if entry is None:
            return False
        entry.is_cancelled = True
        return True

    def close(self, request_id: str) -> bool:
        """Forget a request that ended without a last chunk. False = not open."""
        return self._entries.pop(request_id, None) is not None

    def admissions(self) -> tuple[list[GenerateRequest], list[TokenChunk]]:
        """What the engine has to admit now, oldest first, and the last chunks of requests that need no engine
        any more (cancelled, or all tokens were sent before the end was). The latter are closed here.

        While there is a suspect, one of them has the engine for itself and everyone else waits.
        """
        ended = [chunk for entry in list(self._entries.values()) if (chunk := self._end_of(entry))]
        entries = list(self._entries.values())
        if any(entry.is_suspect for entry in entries):
            if any(entry.is_submitted for entry in entries):
                return [], ended
            entries = [next(entry for entry in entries if entry.is_suspect)]
        return [_admit(entry) for entry in entries if not entry.is_submitted], ended

    def _end_of(self, entry: Entry) -> TokenChunk | None:
        """Of a request that no engine has: its last chunk, if it needs none."""
        request, reason = entry.request, None
        if entry.is_submitted:
            return None
        if entry.is_cancelled:
            reason = "cancelled"
        elif len(request.sent_ids) + len(entry.sent_ids) >= request.max_tokens > 0:
            reason = "length"
        if reason is None:
            return None
        del self._entries[request.id]
        return TokenChunk(id=request.id, finish_reason=cast("FinishReason", reason))

    def overdue(self, now: float, limit_s: float) -> dict[str, float]:
        """Requests that are open for longer than `limit_s` or their own limit, with the limit."""
        late = {}
        for request_id, entry in self._entries.items():
            own_s = min(limit_s, entry.request.max_time_s or limit_s)
            if now - entry.opened_at > own_s:
                late[request_id] = own_s
        return late

    def blameless(self) -> tuple[str, ...]:
        """Open requests that no engine has, that somebody waits for, and that are under no suspicion."""
        return tuple(
            request_id
            for request_id, entry in self._entries.items()
            if not (entry.is_submitted or entry.is_cancelled or entry.is_suspect)
        )

    def give(self, request_id: str) -> Entry:
        """Let another journal have a request that no engine has."""
        return self._entries.pop(request_id)

    def adopt(self, entry: Entry) -> None:
        """Go on with a request that another journal gave away."""
        self._entries[entry.request.id] = entry

    def drain(self) -> tuple[str, ...]:
        """Close everything; returns the ids."""
        ids = self.ids()
        self._entries.clear()
        return ids


def _admit(entry: Entry) -> GenerateRequest:
    entry.num_admissions += 1
    entry.is_submitted = True
    request = entry.request
    return msgspec.structs.replace(request, sent_ids=(*request.sent_ids, *entry.sent_ids))


def _media_bytes(request: GenerateRequest) -> int:
    return request.media.num_bytes if request.media is not None else 0
