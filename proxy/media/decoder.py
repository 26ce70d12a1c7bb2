"""Audio and video decoded in processes of their own, few at a time, each within a deadline."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
from dataclasses import dataclass, field

import msgspec

from mlx_mesh.proxy.errors import RETRY_AFTER_S, ApiError
from mlx_mesh.proxy.media.decoding import LENGTH, READY, Outcome, Task
from mlx_mesh.proxy.media.limits import DECODE_DEADLINE_S, DECODE_TURN_S, MAX_TOTAL_BYTES, NUM_DECODERS

_log = logging.getLogger(__name__)

_CHILD = (sys.executable, "-I", "-m", "mlx_mesh.proxy.media.decode_child")
_MAX_OUTCOME_BYTES = MAX_TOTAL_BYTES + 1024 * 1024
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "LC_ALL": "C"}  # of ours it needs nothing, and keys may be in it


def can_decode() -> bool:
    """Whether PyAV is installed, which the extra `vision` brings, and Pillow for frames."""
    return all(importlib.util.find_spec(name) is not None for name in ("av", "PIL"))


@dataclass(slots=True)
class Decoder:
    """`command`: the program that decodes one file."""

    command: tuple[str, ...] = _CHILD
    deadline_s: float = DECODE_DEADLINE_S
    turn_s: float = DECODE_TURN_S
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(NUM_DECODERS))

    async def decode(self, task: Task, data: bytes) -> Outcome:
        """Never raises for what is in the file. Raises ApiError 503 when its turn does not come."""
        try:
            async with asyncio.timeout(self.turn_s):
                await self._turns.acquire()
        except TimeoutError:
            raise ApiError(
                503,
                f"Other files are being decoded; this one's turn did not come within {self.turn_s:g} s.",
                code="decode_timeout",
                retry_after_s=RETRY_AFTER_S,
            ) from None
        try:
            return await self._ask(task, data)
        finally:
            self._turns.release()

    async def _ask(self, task: Task, data: bytes) -> Outcome:
        child = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd="/",
            env=_ENVIRONMENT,
        )
        try:
            async with asyncio.timeout(self.deadline_s):
                answer = await _talk(child, task, data)
        except TimeoutError:
            return Outcome(
                problem=f"takes longer than {self.deadline_s:g} s to decode (DECODE_DEADLINE_S)",
                code="too_long",
            )
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            # What is left in the pipes, or asyncio would wait for their end for ever.
            _, words = await child.communicate()
        if not answer.startswith(READY):
            if (
                child.returncode is not None and child.returncode < 0
            ):  # from outside: systems short of memory do
                raise ApiError(
                    503,
                    f"The process that decodes a file was ended by signal {-child.returncode} before it had "
                    "looked at it; try again.",
                    code="decoder_killed",
                    retry_after_s=RETRY_AFTER_S,
                )
            said = words.decode("utf-8", "replace").strip().splitlines()
            _log.error("no file can be decoded: %s", said[-1] if said else f"status {child.returncode}")
            raise ApiError(500, "No file can be decoded; the server's log says why.", code="decoder_failed")
        if child.returncode != 0:
            return Outcome(problem="is broken: it ended the process that decoded it")
        try:
            return msgspec.msgpack.decode(answer[len(READY) :], type=Outcome)
        except msgspec.MsgspecError:
            return Outcome(problem="is broken: the process that decoded it said nothing that can be read")


async def _talk(child: asyncio.subprocess.Process, task: Task, data: bytes) -> bytes:
    """All that it says, up to a bound. It is told and heard at once: it may speak before it has listened."""
    assert child.stdout is not None
    telling = asyncio.create_task(_tell(child, task, data))
    try:
        answer = bytearray()
        while len(answer) <= _MAX_OUTCOME_BYTES and (more := await child.stdout.read(1 << 20)):
            answer += more
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
    if len(answer) <= _MAX_OUTCOME_BYTES:
        await child.wait()
    return bytes(answer)


async def _tell(child: asyncio.subprocess.Process, task: Task, data: bytes) -> None:
    assert child.stdin is not None
    asked = msgspec.msgpack.encode(task)
    with contextlib.suppress(ConnectionError):  # it is gone; its status says so
        child.stdin.write(LENGTH.pack(len(asked)) + asked + LENGTH.pack(len(data)))
        child.stdin.write(data)
        await child.stdin.drain()
        child.stdin.close()
