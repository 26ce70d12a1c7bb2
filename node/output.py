"""What an agent says on stdout: framed events for the launcher, or plain lines for people.

A thread writes, behind a bounded queue: a launcher that does not read (a stalled SSH connection, a
terminal in flow control) must never stop the agent's loop, and with it the heartbeats.
"""

from __future__ import annotations

import os
import queue
import threading
from typing import Any

import msgspec

from mlx_mesh.mesh.log_lines import json_line
from mlx_mesh.mesh.messages import (
    AgentFailed,
    AgentListening,
    AgentStarted,
    AgentStopped,
    EpochEnded,
    LauncherEvent,
    LogLine,
    MeshDown,
    MeshReady,
    PlanChosen,
    RankProgress,
)

_QUEUE_LINES = 10_000
_FLUSH_S = 2.0


class Output:
    """Writes events and notes to a file descriptor, in order; drops (and counts) when nobody reads."""

    def __init__(self, marker: str, fd: int = 1, *, is_json: bool = False) -> None:
        """`is_json`: without a marker, each line is an object."""
        self._marker = marker
        self._is_json = is_json and not marker
        self._fd = fd
        self._queue: queue.Queue[bytes | None] = queue.Queue(maxsize=_QUEUE_LINES)
        self._thread = threading.Thread(target=self._write, name="output", daemon=True)
        self.num_dropped = 0

    def start(self) -> None:
        self._thread.start()

    def event(self, event: LauncherEvent) -> None:
        """One framed line, or its words when there is no marker."""
        if self._marker:
            self._put(f"{self._marker} ".encode() + msgspec.json.encode(event))
        elif self._is_json and isinstance(event, LogLine):
            self._put_json(event.line, component="engine", rank=event.rank, host=event.host)
        elif text := words(event):
            self.note(text)

    def note(self, text: str) -> None:
        """A line for people in either mode."""
        if self._is_json:
            self._put_json(text, component="agent")
        else:
            self._put(text.encode())

    def _put_json(self, text: str, **about: Any) -> None:
        for line in filter(str.strip, text.splitlines()):
            self._put(json_line(line.strip(), **about).encode())

    def close(self) -> None:
        """Wait (bounded) until everything is written."""
        try:
            self._queue.put(None, timeout=_FLUSH_S)
        except queue.Full:
            return
        self._thread.join(_FLUSH_S)

    def _put(self, line: bytes) -> None:
        try:
            self._queue.put_nowait(line + b"\n")
        except queue.Full:
            self.num_dropped += 1

    def _write(self) -> None:
        while (line := self._queue.get()) is not None:
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                self.num_dropped += 1  # the reader is gone; the end of stdin tells the agent


def words(event: LauncherEvent) -> str:
    """An event as a line for people; '' for one that needs none."""
    match event:
        case AgentListening():
            return f"coordinator listens on {event.coordinator} (pid {event.agent_pid})"
        case AgentStarted():
            return f"agent {event.host} started (pid {event.agent_pid})"
        case PlanChosen():
            shards = ", ".join(
                f"rank {shard.rank} on {shard.host}: layers {shard.start_layer}-{shard.end_layer - 1}"
                for shard in event.placement.shards
            )
            return f"plan: {event.placement.sharding} over {event.backend}: {shards}"
        case RankProgress():
            done = f" {event.done}/{event.total}" if event.total else ""
            detail = f" ({event.detail})" if event.detail else ""
            return f"[{event.rank} {event.host}] {event.phase}{done}{detail}"
        case LogLine():
            return f"[{event.rank} {event.host}] {event.line}"
        case MeshReady():
            again = "again " if event.restarted else ""
            lineup = f", {event.lineup}" if event.lineup else ""
            return f"ready {again}after {event.seconds:.1f} s: {event.url}{lineup}"
        case EpochEnded():
            what = "the mesh ends" if event.final else "starting the next one"
            return f"epoch {event.epoch} ended: {event.cause}; {what}"
        case MeshDown():
            return event.reason
        case AgentFailed():
            return f"error: {event.message}"
        case AgentStopped():
            return f"stopped: {event.reason}"
