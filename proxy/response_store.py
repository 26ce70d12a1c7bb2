"""Responses that may be asked for again or gone on with, in memory, bounded in number and bytes."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_mesh.proxy.media.item import items_of

MAX_RESPONSES = 1000
MAX_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """`turns`: the conversation up to and with this answer, without instructions. `items`: the input as it
    was given."""

    body: dict[str, Any]
    turns: list[dict[str, Any]]
    items: list[dict[str, Any]]


class ResponseStore:
    """The least recently used go first. A response that alone is over the limit is not kept."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._stored: OrderedDict[str, tuple[StoredResponse, int]] = OrderedDict()
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def put(self, response_id: str, response: StoredResponse) -> None:
        texts = msgspec.json.encode([response.body, response.turns, response.items], enc_hook=lambda _: None)
        num_bytes = len(texts) + sum(item.num_bytes for item in items_of(response.turns))
        self.remove(response_id)
        if num_bytes > self._max_bytes:
            return
        self._stored[response_id] = (response, num_bytes)
        self._num_bytes += num_bytes
        while len(self._stored) > self._max_responses or self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._stored)))

    def get(self, response_id: str) -> StoredResponse | None:
        found = self._stored.get(response_id)
        if found is None:
            return None
        self._stored.move_to_end(response_id)
        return found[0]

    def remove(self, response_id: str) -> bool:
        found = self._stored.pop(response_id, None)
        if found is not None:
            self._num_bytes -= found[1]
        return found is not None
