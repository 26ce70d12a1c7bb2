"""What an engine tells its agent: phases, failures, and a heartbeat from a thread of its own."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from mlx_mesh.mesh.divergence import CHECKPOINT_STEPS, RollingDigest
from mlx_mesh.mesh.messages import (
    EngineFailed,
    EngineReport,
    Heartbeat,
    NeighbourLink,
    PhaseReached,
    Progress,
    StepDigest,
)
from mlx_mesh.mesh.prefix_settings import PrefixCounters
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.engine.failure import EXIT_AGENT_GONE, EngineError
from mlx_mesh.node.engine.pace import Pace
from mlx_mesh.node.pipe import BlockingPipe

MAX_CHECKPOINTS = 256
"""Between two heartbeats: more than any rank computes."""


class MemoryReading(msgspec.Struct, frozen=True):
    """Bytes that MLX holds in this process."""

    active_bytes: int = 0
    peak_bytes: int = 0
    cache_bytes: int = 0


def read_memory(mx: Any) -> MemoryReading:
    """MLX's own counters; safe from any thread."""
    return MemoryReading(mx.get_active_memory(), mx.get_peak_memory(), mx.get_cache_memory())


class Reporter:
    """The engine's voice, and the counters that a heartbeat shows.

    The counters are plain attributes: the main thread writes them, the heartbeat thread reads them, and a
    reading that is one step old does no harm. Any send ends the process when the agent is gone.
    """

    def __init__(self, pipe: BlockingPipe[Any], clock: Callable[[], float] = time.monotonic) -> None:
        self._pipe = pipe
        self._clock = clock
        self._phase_began = clock()
        self.phase = Phase.STARTING
        self.step = 0
        self.layer = 0
        self.busy_since: float | None = None
        self.reads_media = False
        self.num_sequences = 0
        self.num_waiting = 0
        self.kv_tokens = self.kv_longest = self.num_preempted = 0
        self.prefix = PrefixCounters()
        self.expected_s = -1.0
        self.steps_s = 0.0
        self.is_paranoid = False
        self._pace = Pace()
        self._num_prompt_tokens = 0
        self._history = RollingDigest()
        self._checkpoints: deque[tuple[int, str]] = deque(maxlen=MAX_CHECKPOINTS)
        self.read_memory: Callable[[], MemoryReading] = MemoryReading

    def send(self, report: EngineReport) -> None:
        """Hand one report to the agent."""
        try:
            self._pipe.send(report)
        except OSError:
            os._exit(EXIT_AGENT_GONE)

    def enter(self, phase: Phase) -> None:
        """A phase begins; the next PhaseReached counts its seconds from here."""
        self.phase = phase
        self._phase_began = self._clock()

    def reached(
        self,
        phase: Phase,
        *,
        plan_endpoint: str = "",
        link: NeighbourLink | None = None,
        weights_bytes: int = 0,
        detail: str = "",
        plan_digest: str = "",
        prefixes: tuple[str, ...] = (),
    ) -> None:
        """A phase is done."""
        self.phase = phase
        self.send(
            PhaseReached(
                phase=phase,
                seconds=self._clock() - self._phase_began,
                plan_endpoint=plan_endpoint,
                link=link,
                weights_bytes=weights_bytes,
                detail=detail,
                plan_digest=plan_digest,
                prefixes=prefixes,
            )
        )

    def progress(self, done: int, total: int) -> None:
        """Loading went on."""
        self.layer = done
        self.send(Progress(phase=self.phase, done=done, total=total))

    def entered_layer(self, layer: int) -> None:
        """A layer's forward was entered."""
        self.layer = layer

    def compiled_grammar(self) -> None:
        """Nothing is stuck while grammars are compiled, though no step begins: this shows as progress."""
        self.layer += 1

    def begin_media(self) -> None:
        """A prompt's pictures are read now: no step, and with a limit of its own."""
        self.reads_media = True
        self.busy_since = self._clock()

    def end_media(self) -> None:
        """They are read; this shows as progress, too."""
        self.busy_since = None
        self.reads_media = False
        self.layer += 1

    def begin_step(self, num_prompt_tokens: int = 0) -> None:
        """A step begins that reads at most so many prompt tokens."""
        self._num_prompt_tokens = num_prompt_tokens
        self.expected_s = self._pace.expect(num_prompt_tokens)
        self.busy_since = self._clock()

    def end_step(
        self, step: int, num_sequences: int, num_waiting: int, kv_tokens: int = 0, kv_longest: int = 0
    ) -> None:
        took_s = self._clock() - (self.busy_since if self.busy_since is not None else self._clock())
        self.busy_since = None
        self.step = step
        self.steps_s += took_s
        self.num_sequences = num_sequences
        self.num_waiting = num_waiting
        self.kv_tokens = kv_tokens
        self.kv_longest = kv_longest
        if self.phase is Phase.READY:  # the warm-up compiles: no measure of anything
            self._pace.learn(self._num_prompt_tokens, took_s)

    def note_prefixes(self, num_entries: int, num_bytes: int) -> None:
        """What this rank keeps of prefixes; the leader says more, see `prefix`."""
        limit_bytes = self.prefix.limit_bytes
        self.prefix = PrefixCounters(num_entries=num_entries, num_bytes=num_bytes, limit_bytes=limit_bytes)

    def note_tokens(self, step: int, tokens: list[tuple[str, int]]) -> None:
        """What the step gave, for the comparison with the other ranks."""
        digest = self._history.add(step, tokens)
        if self.is_paranoid:
            self.send(StepDigest(step=step, digest=digest))
        elif step % CHECKPOINT_STEPS == 0:
            self._checkpoints.append((step, digest))

    def failed(self, error: EngineError) -> None:
        """The last report."""
        self.send(
            EngineFailed(phase=self.phase, kind=error.kind, message=str(error), lost_ranks=error.lost_ranks)
        )
        self.phase = Phase.FAILED

    def heartbeat(self) -> Heartbeat:
        """A reading of the counters."""
        since = self.busy_since
        digests = []
        while self._checkpoints:
            digests.append(self._checkpoints.popleft())
        memory = self.read_memory()
        return Heartbeat(
            phase=self.phase,
            step=self.step,
            layer=self.layer,
            busy=since is not None,
            busy_s=0.0 if since is None else self._clock() - since,
            num_sequences=self.num_sequences,
            num_waiting=self.num_waiting,
            memory_bytes=memory.active_bytes,
            peak_memory_bytes=memory.peak_bytes,
            cache_bytes=memory.cache_bytes,
            expected_s=self.expected_s,
            reads_media=self.reads_media,
            steps_s=self.steps_s,
            kv_tokens=self.kv_tokens,
            kv_longest=self.kv_longest,
            num_preempted=self.num_preempted,
            digests=tuple(digests),
            prefix=self.prefix,
        )


class HeartbeatThread:
    """Sends a heartbeat each interval until stopped.

    No heartbeat comes while `mx.distributed.init` runs: it holds the GIL for as long as it waits for peers.
    """

    def __init__(self, reporter: Reporter, interval_s: float) -> None:
        self._reporter = reporter
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._reporter.send(self._reporter.heartbeat())
