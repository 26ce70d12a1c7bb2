"""Conversations: the id that a client may give, and what its answer's headers say of kept prefixes.

An id selects no cache: any prompt begins with the longest prefix that is kept. It names the conversation in
the answer, and lets us say whether one that is known here could go on from what was kept of it.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from mlx_mesh.proxy.assembler import Tally
from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.schemas.chat import ChatRequest

DEFAULT_ID = "default"
"""Of requests that name no conversation."""

MAX_KNOWN = 10_000
"""Conversations that are remembered; the least recently used are forgotten first."""

_REQUEST_HEADER = "x-conversation-id"
_ID = re.compile(r"[\x21-\x7e]{1,256}")  # as it can stand in a header


def conversation_id(request: Request, body: ChatRequest) -> str:
    """'' when none is given, or the name of those that have none. The order is Kamiwaza's, and OpenAI's
    metadata after it. Raises ApiError 400."""
    metadata: dict[str, Any] = body.metadata or {}
    given = {
        "conversation": body.conversation,
        "conversation_id": body.conversation_id,
        _REQUEST_HEADER: request.headers.get(_REQUEST_HEADER),
        "metadata.conversation_id": metadata.get("conversation_id"),
    }
    for param, value in given.items():
        if value is None:
            continue
        if not isinstance(value, str) or not _ID.fullmatch(value):
            raise invalid(
                f"Invalid '{param}': 1 to 256 visible ASCII characters, without spaces.", param=param
            )
        return "" if value == DEFAULT_ID else value
    return ""


@dataclass(slots=True)
class _Known:
    num_open: int = 0


@dataclass(frozen=True, slots=True)
class Conversation:
    """One request's conversation, as it stood when the request came."""

    id: str
    is_enabled: bool = True  # prefixes are kept at all
    is_skipped: bool = False  # the request wants none
    is_reset: bool = False  # it wants to begin anew
    was_known: bool = False
    was_busy: bool = False  # another request of it was open

    def headers(self, tally: Tally | None) -> dict[str, str]:
        """`tally`: of the first sequence once it is admitted, None while it waits for a place."""
        headers = {"x-conv-id": self.id, "x-conv-kv": self._state(tally)}
        if tally is not None:
            headers["x-conv-cached-tokens"] = str(tally.cached_tokens)
            headers["x-conv-processing-tokens"] = str(tally.prompt_tokens - tally.cached_tokens)
        return headers

    def _state(self, tally: Tally | None) -> str:
        if not self.is_enabled:
            return "disabled"
        if self.is_skipped:
            return "skipped"
        if self.is_reset:
            return "reset"
        if tally is None:
            return "unknown"
        if tally.cached_tokens:
            return "hit"
        if self.was_busy:
            return "busy"
        return "reset" if self.was_known else "fresh"


class Conversations:
    """Those that this server has seen."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, _Known] = OrderedDict()

    def begin(self, given: str, body: ChatRequest, *, is_enabled: bool) -> Conversation:
        """A request of the conversation, '' = of none; `end` it."""
        name = given or DEFAULT_ID
        known = self._known.pop(name, None)
        conversation = Conversation(
            name,
            is_enabled=is_enabled,
            is_skipped=bool(body.skip_prefix_cache),
            is_reset=bool(body.reset_conversation),
            # Requests without a name have nothing to do with each other.
            was_known=known is not None and bool(given),
            was_busy=known is not None and known.num_open > 0 and bool(given),
        )
        known = known or _Known()
        known.num_open += 1
        self._known[name] = known
        while len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)
        return conversation

    def end(self, conversation: Conversation) -> None:
        known = self._known.get(conversation.id)
        if known is not None:
            known.num_open = max(0, known.num_open - 1)  # it may have been forgotten meanwhile
