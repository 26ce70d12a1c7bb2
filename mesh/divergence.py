"""Do all ranks still live in the same history? Digests in, the first difference out.

Every rank keeps a rolling digest of what each step gave: the rows in order and their tokens. Because it
rolls, one difference shows at every later step, so comparing now and then is enough to find it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

CHECKPOINT_STEPS = 16
"""Digests of every so many steps go out with the heartbeats."""

MAX_OPEN_STEPS = 4096
"""Steps for which some rank's digest is still awaited; the oldest are forgotten beyond that."""


class RollingDigest:
    """One rank's history."""

    def __init__(self) -> None:
        self.step = 0
        self.value = ""
        self._state = b""

    def add(self, step: int, tokens: Iterable[tuple[str, int]]) -> str:
        """Take in what `step` gave: request ids and tokens in row order; returns the digest so far."""
        text = "\n".join(f"{request_id} {token}" for request_id, token in tokens)
        body = b"%d\n%s" % (step, text.encode())
        self._state = hashlib.blake2b(self._state + body, digest_size=16).digest()
        self.step, self.value = step, self._state.hex()
        return self.value


@dataclass(frozen=True, slots=True)
class Divergence:
    """Ranks disagree. `odd` differs from most of them, or from the leader when there is no majority."""

    step: int
    odd: int
    digests: dict[int, str]

    def __str__(self) -> str:
        table = ", ".join(f"rank {rank}: {digest[:8]}" for rank, digest in sorted(self.digests.items()))
        return (
            f"the ranks have different histories at step {self.step} ({table}); its tokens or its "
            "rows are not those of the others"
        )


class DigestBook:
    """What the ranks of one epoch said."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._open: dict[int, dict[int, str]] = {}
        self.verified_step = 0
        """All ranks agree up to here."""

    def note(self, rank: int, step: int, digest: str) -> Divergence | None:
        """Take one digest in; the divergence when it completes a step on which ranks differ."""
        if step <= self.verified_step:
            return None
        said = self._open.setdefault(step, {})
        said[rank] = digest
        if len(said) == self._world_size:
            del self._open[step]
            if len(set(said.values())) > 1:
                return Divergence(step, _odd_one(said), said)
            self.verified_step = max(self.verified_step, step)
            self._open = {later: kept for later, kept in self._open.items() if later > step}
        elif len(self._open) > MAX_OPEN_STEPS:
            del self._open[min(self._open)]
        return None


def _odd_one(said: dict[int, str]) -> int:
    digests = list(said.values())
    most = max(digests, key=digests.count)
    if digests.count(most) * 2 <= len(digests):
        most = said[0]
    return next(rank for rank, digest in sorted(said.items()) if digest != most)
