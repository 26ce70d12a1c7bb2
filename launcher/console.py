"""The only place that prints while a mesh comes up and runs: the plan, one progress line per rank, logs with
their prefix, the banner. On a terminal the progress lines are redrawn in place; elsewhere each change is a
line of its own."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import TextIO

import rich.console
import rich.live
import rich.text

from mlx_mesh.launcher.text import harmless, table
from mlx_mesh.mesh.log_lines import json_line
from mlx_mesh.mesh.placement import PlanRow, format_bytes
from mlx_mesh.mesh.types import Phase, Placement

NUM_PLAIN_PARTS = 4  # without a terminal, loading is told in quarters


class Console:
    """Prints to one stream. Not thread-safe: the supervisor's thread owns it."""

    def __init__(
        self, stream: TextIO | None = None, is_terminal: bool | None = None, *, is_json: bool = False
    ) -> None:
        """`is_json`: each line is an object, and nothing is redrawn."""
        is_terminal = False if is_json else is_terminal
        self._is_json = is_json
        self._stream = stream if stream is not None else sys.stdout
        self._rich = rich.console.Console(
            file=self._stream, highlight=False, markup=False, emoji=False, force_terminal=is_terminal
        )
        self._live: rich.live.Live | None = None
        self._progress: dict[int, str] = {}
        self._told: dict[int, str] = {}

    def say(self, text: str) -> None:
        """One or more plain lines."""
        if self._is_json:
            self._write_json(text)
            return
        if self._live is not None:
            self._live.console.print(rich.text.Text(text))
        else:
            self._stream.write(text + "\n")
            self._stream.flush()

    def warn(self, text: str) -> None:
        if self._is_json:
            self._write_json(text, level="warning")
            return
        self.say(f"warning: {text}")

    def _write_json(self, text: str, *, level: str = "info", who: str = "launcher", host: str = "") -> None:
        rank = int(who) if who.isdecimal() else None
        component = who if rank is None else "engine"
        for line in filter(str.strip, text.splitlines()):
            made = json_line(line.strip(), component=component, level=level, rank=rank, host=host)
            self._stream.write(made + "\n")
        self._stream.flush()

    def plan(self, placement: Placement, rows: Sequence[PlanRow], model: str, backend: str) -> None:
        """What goes where, before anything is loaded."""
        self.say(
            f"Plan: {model}, {placement.world_size} rank{'s' if placement.world_size > 1 else ''}, "
            f"sharding {placement.sharding}, backend {backend}"
        )
        headers = ["rank", "host", "part", "weights", "KV", "working", "limit", "free"]
        cells = [
            [
                str(row.rank),
                row.host,
                row.part,
                format_bytes(row.weights_bytes),
                format_bytes(row.kv_bytes),
                format_bytes(row.working_bytes),
                format_bytes(row.limit_bytes),
                format_bytes(row.margin_bytes),
            ]
            for row in rows
        ]
        for line in table(headers, cells):
            self.say(f"  {line}")
        for reason in placement.reasons:
            self.say(f"  {reason}")

    def progress(self, rank: int, host: str, phase: Phase, done: int, total: int, detail: str) -> None:
        """The one line of a rank."""
        count = f" {done}/{total}" if total else ""
        text = harmless(f"{prefix(str(rank), host)} {phase}{count}{f': {detail}' if detail else ''}")
        if self._rich.is_terminal:
            self._progress[rank] = text
            self._draw()
            return
        part = f"{phase} {done * NUM_PLAIN_PARTS // total if total else ''} {detail}"
        if self._told.get(rank) != part:
            self._told[rank] = part
            self.say(text)

    def transfer(self, key: int, host: str, what: str, done: int, total: int, detail: str = "") -> None:
        """The one line of a host that reads, sends for or receives a model; bytes."""
        share = f" ({done * 100 // total} %)" if total else ""
        text = f"[{host}] {what} {done / 1e6:.1f} of {total / 1e6:.1f} MB{share}"
        text += f", {detail}" if detail else ""
        if self._rich.is_terminal:
            self._progress[key] = harmless(text)
            self._draw()
            return
        part = f"{what} {done * NUM_PLAIN_PARTS // total if total else ''}"
        if self._told.get(key) != part:
            self._told[key] = part
            self.say(harmless(text))

    def log(self, who: str, host: str, line: str) -> None:
        """A line that a rank, an agent or a remote shell said."""
        if self._is_json:
            self._write_json(harmless(line), who=who, host=host)
            return
        self.say(f"{prefix(who, host)} {harmless(line)}")

    def ready(self, name: str, url: str, summary: str, hints: Sequence[str]) -> None:
        """The banner."""
        self.finish_progress()
        self.say(f"\n{name} is ready: {url}/v1  ({summary})")
        for hint in hints:
            self.say(f"  {hint}")

    def finish_progress(self) -> None:
        """Leave the progress lines as they are and print below them."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(BrokenPipeError):
                live.stop()
        self._progress.clear()
        self._told.clear()

    def _draw(self) -> None:
        lines = rich.text.Text("\n".join(text for _, text in sorted(self._progress.items())))
        if self._live is None:
            self._live = rich.live.Live(
                console=self._rich, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
            )
            self._live.start()
        self._live.update(lines, refresh=True)


def prefix(who: str, host: str) -> str:
    """`[rank host]`; `who` is a rank, or `agent` for what is no rank's."""
    return f"[{who} {host}]"
