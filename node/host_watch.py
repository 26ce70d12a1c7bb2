"""Keeps this host awake while its agent lives, and notices what happens to it: sleep, and links that change.

On macOS a `caffeinate` bound to the agent's process holds idle sleep off; a closed lid and a battery that
runs low win over it, so sleep is looked for as well: a clock that stands during sleep falls behind one that
does not. What was noticed goes to the log, and with the heartbeat into `status`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from mlx_mesh.mesh.host_events import link_events, sleep_event
from mlx_mesh.mesh.interfaces import Interface
from mlx_mesh.node.interfaces import glance_at_interfaces, own_interfaces
from mlx_mesh.node.system import find_program, is_mac

CLOCK_TICK_S = 1.0
LINK_TICK_S = 15.0
"""A glance at the interfaces each time; a whole look, which on a Mac is seconds of system_profiler, only when
the glance is another one."""

MAX_EVENTS = 5

CAFFEINATE = ("caffeinate", "-i", "-m", "-s", "-w")


class HostCondition(msgspec.Struct, frozen=True, kw_only=True):
    """`awake`: what holds the host awake, in words; '' = nothing has to, or can. `events`: the latest, with
    their time, oldest first."""

    awake: str = ""
    events: tuple[str, ...] = ()


class HostWatch:
    """`start` and `stop` once each, in one loop."""

    def __init__(
        self,
        note: Callable[[str], None],
        *,
        look: Callable[[], Sequence[Interface]] = own_interfaces,
        glance: Callable[[], object] = glance_at_interfaces,
        clocks: Callable[[], tuple[float, float]] | None = None,
        link_tick_s: float = LINK_TICK_S,
        clock_tick_s: float = CLOCK_TICK_S,
    ) -> None:
        """`look` and `glance` are asked in a thread; `clocks`: seconds by a clock that stands while the
        machine sleeps, and by one that goes on."""
        self._note = note
        self._look, self._glance = look, glance
        self._clocks = clocks or read_clocks
        self._link_tick_s, self._clock_tick_s = link_tick_s, clock_tick_s
        self._events: deque[str] = deque(maxlen=MAX_EVENTS)
        self._caffeinate: asyncio.subprocess.Process | None = None
        self._awake = ""
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def condition(self) -> HostCondition:
        return HostCondition(awake=self._awake, events=tuple(self._events))

    async def start(self) -> None:
        if is_mac():
            await self._hold_awake()
        self._tasks += [
            asyncio.create_task(self._watch_clocks(), name="host clocks"),
            asyncio.create_task(self._watch_links(), name="host links"),
        ]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._caffeinate is not None:
            with contextlib.suppress(ProcessLookupError):
                self._caffeinate.terminate()
            await self._caffeinate.wait()

    def tell(self, event: str) -> None:
        self._note(event)
        self._events.append(f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}: {event}")

    # ------------------------------------------------------------ staying awake

    async def _hold_awake(self) -> None:
        program = find_program(CAFFEINATE[0])
        if program is None:
            self.tell("this Mac is not held awake: there is no caffeinate")
            return
        self._caffeinate = await asyncio.create_subprocess_exec(
            program,
            *CAFFEINATE[1:],
            str(os.getpid()),  # it ends with us, however we end
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        self._awake = f"by caffeinate (pid {self._caffeinate.pid})"
        self._note(f"held awake {self._awake}; a closed lid or an empty battery wins over it")
        self._tasks.append(asyncio.create_task(self._await_caffeinate(), name="caffeinate"))

    async def _await_caffeinate(self) -> None:
        assert self._caffeinate is not None
        status = await self._caffeinate.wait()
        self._awake = ""
        self.tell(f"this Mac is no longer held awake: caffeinate ended with status {status}")

    # ------------------------------------------------------------ noticing

    async def _watch_clocks(self) -> None:
        before = self._clocks()
        while True:
            await asyncio.sleep(self._clock_tick_s)
            now = self._clocks()
            if event := sleep_event(now[0] - before[0], now[1] - before[1]):
                self.tell(event)
            before = now

    async def _watch_links(self) -> None:
        seen = await asyncio.to_thread(self._glance)  # first: what changes meanwhile is looked at again
        before = await asyncio.to_thread(self._look)
        while True:
            await asyncio.sleep(self._link_tick_s)
            glanced = await asyncio.to_thread(self._glance)
            if glanced == seen and before:
                continue
            now = await asyncio.to_thread(self._look)
            if not now:  # the system did not answer
                continue
            seen = glanced
            for event in link_events(before, now):
                self.tell(event)
            before = now


def read_clocks() -> tuple[float, float]:
    """One that stands while the machine sleeps, and one that goes on; neither is set by anybody."""
    if sys.platform == "darwin":
        return time.clock_gettime(time.CLOCK_UPTIME_RAW), time.clock_gettime(time.CLOCK_MONOTONIC_RAW)
    boot = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.monotonic(), time.clock_gettime(boot)
