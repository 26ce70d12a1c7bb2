"""Stop strings, matched on text: nothing of a match, and nothing that may become one, is given out."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Feed text in pieces of any size; the result does not depend on where the pieces are cut.

    The match that completes first wins; of two that complete together the longer one.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty stop string would match everywhere"
        self._stops = tuple(dict.fromkeys(stops))
        self._held = ""
        self.matched: str | None = None

    @property
    def is_holding(self) -> bool:
        return bool(self._held)

    def add(self, text: str) -> str:
        """The text that may be given out now. After a match: what stood before it, then always ''."""
        if self.matched is not None:
            return ""
        buffer = self._held + text
        first = self._first_match(buffer)
        if first is not None:
            end, self.matched = first
            self._held = ""
            return buffer[: end - len(self.matched)]
        num_held = self._num_to_hold(buffer)
        self._held = buffer[len(buffer) - num_held :]
        return buffer[: len(buffer) - num_held]

    def finish(self) -> str:
        """No more text comes: what was held back and did not become a match."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, buffer: str) -> tuple[int, str] | None:
        found = [(at + len(stop), stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        return min(found, key=lambda match: (match[0], -len(match[1])), default=None)

    def _num_to_hold(self, buffer: str) -> int:
        """Length of the longest end of the buffer that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for size in range(min(longest, len(buffer)), 0, -1):
            tail = buffer[len(buffer) - size :]
            if any(stop.startswith(tail) for stop in self._stops):
                return size
        return 0
