"""Open requests and what was already sent of each, so that a request outlives an epoch. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from mlx_mesh.mesh.messages import FinishReason, GenerateRequest, TokenChunk


@dataclass(slots=True)
class Entry:
    """One open request."""

    request: GenerateRequest  # as the proxy submitted it
    opened_at: float
    sent_ids: list[int] = field(default_factory=list)
    is_cancelled: bool = False
    num_admissions: int = 0

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
        return True

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
        """What a new epoch has to admit, oldest first, and the last chunks of requests that need no engine
        any more (cancelled, or all tokens were sent before the end was). The latter are closed here."""
        admit: list[GenerateRequest] = []
        ended: list[TokenChunk] = []
        for entry in list(self._entries.values()):
            request = entry.request
            sent = (*request.sent_ids, *entry.sent_ids)
            reason: FinishReason | None = None
            if entry.is_cancelled:
                reason = "cancelled"
            elif len(sent) >= request.max_tokens:
                reason = "length"
            if reason is None:
                entry.num_admissions += 1
                admit.append(msgspec.structs.replace(request, sent_ids=sent))
            else:
                del self._entries[request.id]
                ended.append(TokenChunk(id=request.id, finish_reason=reason))
        return admit, ended

    def overdue(self, now: float, limit_s: float) -> tuple[str, ...]:
        """Requests that are open for longer than `limit_s`, oldest first."""
        late = []
        for request_id, entry in self._entries.items():
            if now - entry.opened_at <= limit_s:
                break
            late.append(request_id)
        return tuple(late)

    def drain(self) -> tuple[str, ...]:
        """Close everything; returns the ids."""
        ids = self.ids()
        self._entries.clear()
        return ids
