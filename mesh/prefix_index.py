"""Which prefixes have their caches kept, and which prompt may begin with one. Pure; the leader alone has it.

An entry is a number under which every rank keeps its own part of the cache of some tokens. Any number of
requests may begin with an entry at the same time: nobody changes it. Rows that still run may be begun with,
too, where a cache can be cut back to the common part; their bytes count as running and not here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

MIN_TOKENS = 16
"""A shorter prefix is computed faster than it is looked after."""

MAX_ENTRIES = 4096
"""All of them are looked at for each prompt: some milliseconds."""


@dataclass(frozen=True, slots=True)
class Hit:
    """The first `num_tokens` tokens of a prompt are in the cache of `entry`."""

    entry: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Entry:
    tokens: bytes  # 4 for each, so that comparing is one call
    salt: str
    bytes_by_rank: tuple[int, ...]
    can_cut: bool  # usable for any prefix of its tokens, not only for all of them
    is_row: bool  # of a row that runs


def packed(tokens: Iterable[int]) -> bytes:
    """Token ids in 4 bytes each."""
    return array("I", tokens).tobytes()


def common_length(a: bytes, b: bytes) -> int:
    """Tokens that two packed sequences begin with alike."""
    shorter = min(len(a), len(b)) // 4
    if a[: 4 * shorter] == b[: 4 * shorter]:
        return shorter
    same, differ = 0, shorter  # the first `same` tokens are equal, the first `differ` are not
    while differ - same > 1:
        middle = (same + differ) // 2
        if a[4 * same : 4 * middle] == b[4 * same : 4 * middle]:
            same = middle
        else:
            differ = middle
    return same


class PrefixIndex:
    """All entries, least recently used first."""

    def __init__(self, limits: Sequence[int]) -> None:
        """`limits`: the most bytes of all entries on each rank."""
        self._limits = tuple(limits)
        self._entries: dict[int, _Entry] = {}
        self.used = [0] * len(self._limits)  # bytes by rank

    def __len__(self) -> int:
        """Entries that are stored."""
        return sum(not entry.is_row for entry in self._entries.values())

    def __contains__(self, entry: int) -> bool:
        return entry in self._entries

    def find(self, tokens: Sequence[int] | bytes, salt: str = "") -> Hit | None:
        """The longest prefix of a prompt, which may be packed already, that some entry has; at least one
        token of the prompt is left to compute. Of equal ones the newest."""
        prompt = tokens if isinstance(tokens, bytes) else packed(tokens)
        most = len(prompt) // 4 - 1
        best: Hit | None = None
        beginning = prompt[: 4 * MIN_TOKENS]
        for number, entry in self._entries.items():
            if entry.salt != salt or not entry.tokens.startswith(beginning):
                continue
            length = common_length(entry.tokens, prompt)
            if entry.can_cut:
                length = min(length, most)
            elif length < len(entry.tokens) // 4 or length > most:
                continue
            if length >= MIN_TOKENS and (best is None or length >= best.num_tokens):
                best = Hit(number, length)
        return best

    def longest_known(self, tokens: Sequence[int], salt: str = "") -> int:
        """Tokens of the prompt that some entry begins with, whether its cache can be used for them or not."""
        prompt = packed(tokens)
        return max(
            (common_length(e.tokens, prompt) for e in self._entries.values() if e.salt == salt), default=0
        )

    def stored_with(self, tokens: Sequence[int], salt: str = "") -> int | None:
        """A stored entry whose cache is that of these tokens, or can be cut back to it."""
        wanted = packed(tokens)
        for number, entry in self._entries.items():
            has_it = not entry.is_row and entry.salt == salt and entry.tokens.startswith(wanted)
            if has_it and (entry.can_cut or len(entry.tokens) == len(wanted)):
                return number
        return None

    def use(self, entry: int) -> None:
        """It is the most recently used one now."""
        self._entries[entry] = self._entries.pop(entry)

    def add_row(self, entry: int, tokens: Sequence[int], salt: str) -> None:
        """A row whose cache can be cut has all these tokens in it by now."""
        self._entries[entry] = _Entry(packed(tokens), salt, (0,) * len(self._limits), True, is_row=True)

    def remove(self, entry: int) -> None:
        """Forget it; nothing if it is not here."""
        old = self._entries.pop(entry, None)
        if old is not None:
            self._count(old, -1)

    def add(
        self, entry: int, tokens: Sequence[int], salt: str, bytes_by_rank: tuple[int, ...], *, can_cut: bool
    ) -> list[int]:
        """Every rank has this now. Returns the entries that must go: those that it makes superfluous, or
        itself when it is superfluous, then the least recently used ones until no rank keeps more than its
        limit and there are no more than MAX_ENTRIES; it may be among them."""
        self.remove(entry)
        new = _Entry(packed(tokens), salt, bytes_by_rank, can_cut, is_row=False)
        for number, old in self._entries.items():
            if old.can_cut and self._replaces(old, new):
                self.use(number)
                return [entry]
        gone = [number for number, old in self._entries.items() if self._replaces(new, old)]
        for number in gone:
            self.remove(number)
        self._entries[entry] = new
        self._count(new, +1)
        return gone + self.evict(
            lambda used: (
                len(self._entries) <= MAX_ENTRIES
                and all(u <= limit for u, limit in zip(used, self._limits, strict=True))
            )
        )

    def evict(self, fits: Callable[[Sequence[int]], bool]) -> list[int]:
        """Forget the least recently used entries until `fits(bytes by rank)`; returns them."""
        gone = []
        for number in [number for number, entry in self._entries.items() if not entry.is_row]:
            if fits(self.used):
                break
            self.remove(number)
            gone.append(number)
        return gone

    def clear(self) -> list[int]:
        """Forget all that is stored; returns it."""
        return self.evict(lambda _: False)

    def _replaces(self, new: _Entry, old: _Entry) -> bool:
        if old.is_row or new.is_row or old.salt != new.salt:
            return False
        if new.can_cut:
            return new.tokens.startswith(old.tokens)
        return not old.can_cut and new.tokens == old.tokens

    def _count(self, entry: _Entry, sign: int) -> None:
        for rank, size in enumerate(entry.bytes_by_rank):
            self.used[rank] += sign * size
