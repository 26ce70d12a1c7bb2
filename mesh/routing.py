"""Which replica gets a request: the one with most of its prompt in its caches, unless it is too busy. Pure.

What a replica's engines really keep is known to them alone; what was sent there is known here, and that is
what they compute and keep. A replica that begins anew has nothing, so all about it is forgotten.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

BLOCK_TOKENS = 64
"""Prompts are compared in blocks of so many tokens."""

MAX_BLOCKS = 65_536
"""Remembered per replica; the least recently used are forgotten first. 4 million tokens of prompts."""

MAX_CONVERSATIONS = 10_000

SLACK = 2
"""A common prefix, such as one system prompt for all, draws a request only to a replica that has at most so
many more open requests than the least busy one. A named conversation stays where it is."""

Why = Literal["conversation", "prefix", "load"]


@dataclass(frozen=True, slots=True)
class Load:
    """How busy a replica is. `num_places`: sequences that it decodes together; one that is not ready has
    requests wait for its next epoch."""

    num_open: int
    num_places: int
    is_ready: bool = True


@dataclass(frozen=True, slots=True)
class Prompt:
    """What is looked at of a request."""

    ids: tuple[int, ...]
    conversation: str = ""  # '' = it belongs to none that is known
    salt: str = ""
    keeps: bool = True  # it leaves something in the caches, and uses what is there


@dataclass(slots=True)
class _Known:
    blocks: OrderedDict[int, None] = field(default_factory=OrderedDict)
    chosen_at: int = 0


class Router:
    """Remembers what went where."""

    def __init__(self, num_replicas: int) -> None:
        self._known = [_Known() for _ in range(num_replicas)]
        self._conversations: OrderedDict[str, int] = OrderedDict()
        self._num_chosen = 0
        self.counts: Counter[tuple[int, Why]] = Counter()
        """Requests so far, by replica and why it got them."""

    def choose(self, prompt: Prompt, loads: Sequence[Load | None]) -> int:
        """The replica for this request, which is remembered to have it. None of `loads`: it takes nothing
        now. When none does it is the first, whose refusal says why."""
        hashes = _hashes_of(prompt) if prompt.keeps else []
        replica, why = self._choose(prompt, hashes, loads)
        self.counts[replica, why] += 1
        self._note(replica, prompt, hashes)
        return replica

    def forget(self, replica: int) -> None:
        """Its caches are empty now."""
        self._known[replica].blocks.clear()
        for name in [name for name, at in self._conversations.items() if at == replica]:
            del self._conversations[name]

    def forget_all(self) -> None:
        for replica in range(len(self._known)):
            self.forget(replica)

    def _choose(self, prompt: Prompt, hashes: Sequence[int], loads: Sequence[Load | None]) -> tuple[int, Why]:
        able = {at: load for at, load in enumerate(loads) if load is not None}
        if any(load.is_ready for load in able.values()):
            able = {at: load for at, load in able.items() if load.is_ready}
        if not able:
            return 0, "load"
        least = min(load.num_open for load in able.values())
        home = self._conversations.get(prompt.conversation) if prompt.conversation else None
        if home in able and (able[home].num_open < able[home].num_places or able[home].num_open == least):
            return home, "conversation"
        near = {at: load for at, load in able.items() if load.num_open <= least + SLACK}
        matches = {at: self._num_known(at, hashes) for at in near}
        if longest := max(matches.values()):
            able = {at: able[at] for at, matched in matches.items() if matched == longest}
        best = min(able, key=lambda at: (able[at].num_open, self._known[at].chosen_at))
        return best, "prefix" if longest else "load"

    def _num_known(self, replica: int, hashes: Sequence[int]) -> int:
        """Leading blocks that this replica has had."""
        blocks, count = self._known[replica].blocks, 0
        for one in hashes:
            if one not in blocks:
                break
            count += 1
        return count

    def _note(self, replica: int, prompt: Prompt, hashes: Sequence[int]) -> None:
        known = self._known[replica]
        self._num_chosen += 1
        known.chosen_at = self._num_chosen
        for one in reversed(hashes):  # the beginning, which most have in common, is forgotten last
            known.blocks[one] = None
            known.blocks.move_to_end(one)
        while len(known.blocks) > MAX_BLOCKS:
            known.blocks.popitem(last=False)
        if prompt.conversation:
            self._conversations[prompt.conversation] = replica
            self._conversations.move_to_end(prompt.conversation)
            while len(self._conversations) > MAX_CONVERSATIONS:
                self._conversations.popitem(last=False)


def _hashes_of(prompt: Prompt) -> list[int]:
    """One for each whole block, of all tokens up to its end."""
    last, hashes = hash(prompt.salt), []
    for end in range(BLOCK_TOKENS, len(prompt.ids) + 1, BLOCK_TOKENS):
        last = hash((last, prompt.ids[end - BLOCK_TOKENS : end]))
        hashes.append(last)
    return hashes
