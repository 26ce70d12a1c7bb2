"""Is a grammar one that can be used? Asked of a child process, which a bad one may end or keep busy."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import sys
from collections import OrderedDict

from mlx_mesh.proxy.errors import RETRY_AFTER_S, ApiError

MAX_GRAMMAR_CHARS = 512 * 1024

CHECK_S = 5.0
"""For one grammar. An engine needs about as long for it, and must not be taken for stuck meanwhile."""

TURN_S = 30.0
"""For a request's turn: few are looked at together."""

NUM_TOGETHER = 2
NUM_KEPT = 1024

_CHILD = [sys.executable, "-I", "-m", "mlx_mesh.proxy.grammar_child"]


class GrammarChecker:
    """Remembers what it found out: clients use the same few schemas again and again."""

    def __init__(self) -> None:
        self._turns = asyncio.Semaphore(NUM_TOGETHER)
        self._found: OrderedDict[bytes, str] = OrderedDict()

    async def problem_of(self, grammar: str) -> str:
        """'' or, in words, what is wrong with it. Raises ApiError 503 when its turn does not come."""
        if len(grammar) > MAX_GRAMMAR_CHARS:
            return f"it is too large: {len(grammar)} characters, the limit is {MAX_GRAMMAR_CHARS}."
        key = hashlib.sha256(grammar.encode()).digest()
        if key not in self._found:
            try:
                async with asyncio.timeout(TURN_S):
                    await self._turns.acquire()
            except TimeoutError:
                raise ApiError(
                    503,
                    f"Other grammars are being looked at; this one's turn did not come within {TURN_S:g} s.",
                    code="grammar_check_timeout",
                    retry_after_s=RETRY_AFTER_S,
                ) from None
            try:
                self._found[key] = await _ask_child(grammar)
            finally:
                self._turns.release()
            if len(self._found) > NUM_KEPT:
                self._found.popitem(last=False)
        self._found.move_to_end(key)
        return self._found[key]


async def _ask_child(grammar: str) -> str:
    child = await asyncio.create_subprocess_exec(
        *_CHILD,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        cwd="/",
    )
    try:
        async with asyncio.timeout(CHECK_S):
            problem, _ = await child.communicate(grammar.encode())
    except TimeoutError:
        return f"it takes longer than {CHECK_S:g} s to compile; make it simpler."
    finally:
        with contextlib.suppress(ProcessLookupError):
            child.kill()
        await child.wait()
    if child.returncode != 0:
        return "it is nested too deeply; make it simpler."
    return problem.decode("utf-8", "replace")
