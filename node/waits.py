"""What the coordinator waits for, and what ends a wait: a verdict, a wish, or a helper that failed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any

from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.membership import ObservedClock, Verdict, VerdictKind, judge
from mlx_mesh.mesh.messages import Deadlines
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.roster import Roster

TICK_S = 0.25


class EpochBroken(Exception):
    """This epoch cannot go on; the verdict says whether another one may be tried."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(str(verdict))
        self.verdict = verdict


class Stopped(Exception):
    """Somebody asked for the end."""


class Waits:
    """The mesh's clock, and the one place where its flow of control sleeps. `changed` wakes it."""

    def __init__(self, roster: Roster, deadlines: Deadlines, owed_s: Callable[[], float]) -> None:
        """`owed_s`: since when some request waits for tokens, see Desk.owed_s."""
        self._roster = roster
        self._deadlines = deadlines
        self._owed_s = owed_s
        self._clock = ObservedClock(time.monotonic(), TICK_S)
        self._helpers: list[asyncio.Task[Any]] = []
        self._helper_error: BaseException | None = None
        self._front_refusal = ""
        self._is_hurried = False
        self.changed = asyncio.Event()
        self.stop_reason: str | None = None
        self.stop_code = ExitCode.OK

    # ------------------------------------------------------------ what ends waits

    def stop(self, reason: str, *, hurry: bool, is_failure: bool) -> None:
        """See Coordinator.stop."""
        self.stop_code = ExitCode.FAILED if is_failure else self.stop_code
        self.stop_reason = self.stop_reason or reason
        self._is_hurried = self._is_hurried or hurry
        self.changed.set()

    @property
    def is_hurried(self) -> bool:
        return self._is_hurried

    def fail(self, error: BaseException) -> None:
        """Something that the mesh cannot do without ended with this."""
        self._helper_error = self._helper_error or error
        self.changed.set()

    def refuse_front(self, error: str) -> None:
        """The front end cannot serve the model that was switched to: this epoch ends."""
        self._front_refusal = error
        self.changed.set()

    def check(self) -> None:
        """Raise what must end the wait: EpochBroken, Stopped, or what a helper ended with."""
        if self._helper_error is not None:
            raise self._helper_error
        if self._front_refusal:
            refusal, self._front_refusal = self._front_refusal, ""
            host = self._roster.host_of(0)
            raise EpochBroken(Verdict(None, host, Phase.LOADING, refusal, retryable=False))
        epoch = self._roster.epoch
        if self.stop_reason is not None and (self._is_hurried or epoch.ready_at is None):
            raise Stopped
        if epoch.is_open and (verdict := self._judge() or self._divergence()) is not None:
            raise EpochBroken(verdict)

    def _judge(self) -> Verdict | None:
        now = self.now()
        ranks, agents = self._roster.rank_views(now), self._roster.agent_views(now)
        return judge(ranks, agents, self._deadlines, self._owed_s())

    def _divergence(self) -> Verdict | None:
        found = self._roster.epoch.divergence
        if found is None:
            return None
        phase, host = self._roster.ranks[found.odd].phase, self._roster.host_of(found.odd)
        return Verdict(found.odd, host, phase, str(found), kind=VerdictKind.DIVERGED)

    # ------------------------------------------------------------ the clock

    def now(self) -> float:
        return self._clock.read(time.monotonic())

    def tick(self) -> float:
        """Each TICK_S; returns for how long this host did not run, 0 mostly."""
        return self._clock.tick(time.monotonic())

    def age(self, at: float) -> float:
        return max(0.0, self.now() - at)

    def timer(self, seconds: float) -> Callable[[], float | None]:
        """Seconds left of a limit that starts now."""
        until = self.now() + seconds
        return lambda: until - self.now()

    # ------------------------------------------------------------ waiting

    async def wait(
        self,
        done: Callable[[], bool],
        limit_s: Callable[[], float | None],
        late: Callable[[], Verdict | MeshError],
    ) -> None:
        """Until `done`; a rank or host that breaks meanwhile, or `limit_s` (left, from now) at 0, ends the
        epoch. `late` gives what to raise: a verdict on the epoch, or the mesh's end."""
        while True:
            self.check()
            if done():
                return
            left = limit_s()
            if left is not None and left <= 0:
                end = late()
                raise EpochBroken(end) if isinstance(end, Verdict) else end
            await self.pause(TICK_S if left is None else min(left, TICK_S))

    async def wait_for_ever(self, done: Callable[[], bool]) -> None:
        """Like `wait`, without a limit."""
        await self.wait(done, lambda: None, _never_late)

    async def settle(self, done: Callable[[], bool], limit_s: float) -> None:
        """Wait without judging anybody; the end of the mesh does not depend on it."""
        left = self.timer(limit_s)
        while not done() and (left() or 0) > 0:
            await self.pause(TICK_S)

    async def pause(self, seconds: float) -> None:
        """Until something changed, but no longer than this."""
        self.changed.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.changed.wait()

    # ------------------------------------------------------------ helper tasks

    def help(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run this beside; when it fails, so does the mesh."""
        task = asyncio.create_task(work, name=name)
        task.add_done_callback(self._helper_done)
        self._helpers.append(task)

    def _helper_done(self, task: asyncio.Task[Any]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.fail(error)

    async def end_helpers(self) -> None:
        for helper in reversed(self._helpers):
            helper.cancel()
        await asyncio.gather(*self._helpers, return_exceptions=True)


def _never_late() -> Verdict:
    raise AssertionError("a wait without a limit is never late")
