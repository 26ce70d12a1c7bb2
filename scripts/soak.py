"""Mixed load for a long time: every answer right, and nothing of the mesh grows.

Clients ask for whole and streamed answers, greedy and seeded, and compare each with the undisturbed one;
others hang up in the middle, cancel by id, or set a deadline that ends their request. Memory, threads and
file descriptors of every process are read all along; the last third must not be above the second.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos import (
    ANSWER_S,
    ChaosError,
    Clients,
    Job,
    Mesh,
    ask,
    end_by_signals,
    make_jobs,
    make_model,
    tail,
)

READING_S = 2.0
MORE_MEMORY = 1.05
MORE_MEMORY_BYTES = 16e6
MORE_THREADS = 1
MORE_DESCRIPTORS = 4
_NAMES = {"mlx_mesh.proxy": "proxy", "mlx_mesh.node.engine": "engine", "mlx_mesh.launcher": "launcher"}


@dataclass
class Readings:
    """What each process had, again and again: (bytes, threads, descriptors)."""

    mesh: Mesh
    stopping: threading.Event = field(default_factory=threading.Event)
    taken: dict[str, list[tuple[int, int, int]]] = field(default_factory=lambda: defaultdict(list))

    def run(self) -> None:
        while not self.stopping.wait(READING_S):
            for pid, command in self.mesh.processes().items():
                name = next((name for word, name in _NAMES.items() if f"{word} " in command), "agent")
                try:
                    self.taken[f"{name} {pid}"].append(_usage(pid))
                except (OSError, ValueError):  # gone meanwhile
                    continue

    def report(self) -> tuple[list[str], list[str]]:
        """The table, and what grew."""
        lines = [f"{'process':20}{'MB':>16}{'threads':>12}{'descriptors':>14}   (second third -> last third)"]
        problems = []
        for name, readings in sorted(self.taken.items()):
            third = len(readings) // 3
            if not third:
                continue
            before, after = (
                [statistics.median(values) for values in zip(*part, strict=True)]
                for part in (readings[third : 2 * third], readings[2 * third :])
            )
            lines.append(
                f"{name:20}{before[0] / 1e6:>7.0f} -> {after[0] / 1e6:<5.0f}"
                f"{before[1]:>5.0f} -> {after[1]:<3.0f}{before[2]:>7.0f} -> {after[2]:<3.0f}"
            )
            limits = (
                before[0] * MORE_MEMORY + MORE_MEMORY_BYTES,
                before[1] + MORE_THREADS,
                before[2] + MORE_DESCRIPTORS,
            )
            for what, value, limit in zip(("memory", "threads", "descriptors"), after, limits, strict=True):
                if value > limit:
                    problems.append(f"{what} of {name} grew to {value:.0f} (limit {limit:.0f})")
        return lines, problems


def _usage(pid: int) -> tuple[int, int, int]:
    """Linux: resident bytes, threads, open descriptors."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    resident = int(fields["VmRSS"].split()[0]) * 1024 if "VmRSS" in fields else 0
    return resident, int(fields["Threads"]), len(list(Path(f"/proc/{pid}/fd").iterdir()))


@dataclass
class Leavers:
    """A client whose requests never come to their end."""

    port: int
    jobs: list[Job]
    seed: int
    stopping: threading.Event = field(default_factory=threading.Event)
    num_left: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    problems: list[str] = field(default_factory=list)
    numbers: Any = field(default_factory=itertools.count)

    def run(self) -> None:
        chooser = random.Random(self.seed)
        while not self.stopping.wait(chooser.uniform(0.0, 0.3)):
            how = chooser.choice(("disconnect", "cancel", "deadline"))
            try:
                self._leave(how, chooser)
                self.num_left[how] += 1
            except (OSError, http.client.HTTPException, ChaosError) as error:
                self.problems.append(f"{how}: {error!r}")

    def _leave(self, how: str, chooser: random.Random) -> None:
        body = {**json.loads(chooser.choice(self.jobs).body(stream=True)), "max_tokens": 1500}
        if how == "deadline":
            body["max_time_s"] = chooser.uniform(0.1, 1.0)
        request_id = f"soak-{next(self.numbers)}"
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
        try:
            headers = {"content-type": "application/json", "x-request-id": request_id}
            connection.request("POST", "/v1/completions", json.dumps(body), headers)
            response = connection.getresponse()
            if response.status not in (200, 504):
                raise ChaosError(f"status {response.status}: {response.read()[:200]!r}")
            if how == "disconnect":
                response.read(chooser.randrange(1, 2000))
                return
            if how == "cancel":
                response.read(chooser.randrange(1, 2000))
                other = http.client.HTTPConnection("127.0.0.1", self.port, timeout=ANSWER_S)
                other.request("POST", f"/v1/requests/{request_id}/cancel")
                if (status := other.getresponse().status) not in (200, 404):  # 404: it ended meanwhile
                    raise ChaosError(f"cancel: status {status}")
                other.close()
            response.read()
        finally:
            connection.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model folder with a real tokenizer")
    parser.add_argument("--model", type=Path, help="instead of the tiny random one")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--clients", type=int, default=6, help="of which two leave early")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    end_by_signals()
    with tempfile.TemporaryDirectory(prefix="mlx-mesh-soak-") as folder:
        try:
            return run(arguments, Path(folder))
        except ChaosError as error:
            print(f"soak: {error}", file=sys.stderr)
            return 1


def run(arguments: argparse.Namespace, folder: Path) -> int:
    model = arguments.model
    if model is None:
        (folder / "model").mkdir()
        model = make_model(folder / "model", arguments.tokenizer, arguments.seed)
    mesh = Mesh(model, arguments.ranks, folder / "state", folder / "launcher.log")
    readings = Readings(mesh)
    problems: list[str] = []
    try:
        mesh.wait_for_start()
        jobs = make_jobs(random.Random(arguments.seed), 12)
        clients = Clients(
            mesh.port, jobs, {job: ask(mesh.port, job, stream=False)[0] for job in jobs}, arguments.seed
        )
        leavers = [Leavers(mesh.port, jobs, arguments.seed + number) for number in range(2)]
        for work in (readings.run, *(leaver.run for leaver in leavers)):
            threading.Thread(target=work, daemon=True).start()
        clients.start(max(1, arguments.clients - len(leavers)))
        end = time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < end and mesh.is_alive() and not clients.problems:
            time.sleep(1.0)
        for stopping in (readings.stopping, *(leaver.stopping for leaver in leavers)):
            stopping.set()
        clients.stop()
        problems += clients.problems + [problem for one in leavers for problem in one.problems]
        epoch = (mesh.get("/ready") or {}).get("epoch")
        if epoch != 1:
            problems.append(f"the mesh is in epoch {epoch}: something broke it")
        left = {
            how: sum(one.num_left[how] for one in leavers) for how in ("disconnect", "cancel", "deadline")
        }
        print(
            f"{arguments.minutes:g} minutes, {arguments.ranks} ranks: {clients.num_answers} answers, ", end=""
        )
        print(", ".join(f"{count} x {how}" for how, count in left.items()))
        lines, grown = readings.report()
        problems += grown
        print("\n".join(lines))
    except ChaosError as error:
        problems.append(str(error))
    finally:
        readings.stopping.set()
        problems += mesh.stop()
    for problem in problems:
        print(f"PROBLEM {problem}")
    print(tail(mesh.log) if problems else "no wrong answer, no growth, nothing left running")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
