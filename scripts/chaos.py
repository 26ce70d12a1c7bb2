"""Faults at random moments of a busy mesh: no request may fail, no token may change, nothing may be left.

Every answer is first computed undisturbed. Then clients ask for the same answers over and over, streamed and
whole, greedy and with seeds, while real signals hit real engines. A 503 with Retry-After counts as an
invitation to come back, as official clients take it; anything else than the expected text is a failure.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from words import WORDS

READY_S = 180.0
RECOVER_S = 120.0
ANSWER_S = 240.0
POLL_S = 0.03
MARK = "CHAOS_SESSION"  # inherited by every process of the mesh
STRIKES_IN_A_ROW = 2  # during recoveries: more would be a crash loop, which the mesh must end
MAX_GROWTH = 1.3
GROWTH_MARGIN_BYTES = 64e6
NO_MORE_STEPS_S = 10.0


# ---------------------------------------------------------------- the model


def make_model(folder: Path, tokenizer: Path, seed: int) -> Path:
    """A random llama in float32, 4 layers, with the real tokenizer: noise, but always the same."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_bytes((tokenizer / name).read_bytes())
    real = json.loads((tokenizer / "config.json").read_text())
    hidden, inner, layers, heads = 64, 128, 4, 4
    config = {
        **{key: real[key] for key in ("vocab_size", "bos_token_id", "eos_token_id") if key in real},
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    noise = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> Any:
        return (noise.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(real["vocab_size"], hidden)}
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    for layer in range(layers):
        start = f"model.layers.{layer}"
        for name in ("q", "k", "v", "o"):
            weights[f"{start}.self_attn.{name}_proj.weight"] = matrix(hidden, hidden)
        weights[f"{start}.mlp.gate_proj.weight"] = matrix(inner, hidden)
        weights[f"{start}.mlp.up_proj.weight"] = matrix(inner, hidden)
        weights[f"{start}.mlp.down_proj.weight"] = matrix(hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{start}.{name}.weight"] = np.ones(hidden, np.float32)
    save_file(weights, folder / "model.safetensors", metadata={"format": "mlx"})
    return folder


# ---------------------------------------------------------------- the mesh


class Mesh:
    """The launcher and what it started; `stop` checks that nothing is left."""

    def __init__(self, model: Path, num_ranks: int, state: Path, log: Path) -> None:
        self.session = uuid.uuid4().hex
        self.log = log
        self.port = _free_port()
        command = [sys.executable, "-I", "-u", "-m", "mlx_mesh.launcher", "up", "--sim", str(num_ranks)]
        command += ["--model", str(model), "--name", f"chaos-{self.port}", "--port", str(self.port)]
        command += ["--served-model-name", "chaos"]
        environment = {**os.environ, "XDG_STATE_HOME": str(state), MARK: self.session}
        self._began = time.monotonic()
        with log.open("wb") as output:
            # In a session of its own: a Ctrl-C is for this script, which ends the mesh when it is done.
            self.launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )
        self.load_s = 0.0

    def wait_for_start(self) -> None:
        """Until the first epoch is ready."""
        self.wait_ready(0, READY_S)
        self.load_s = time.monotonic() - self._began

    def get(self, path: str) -> Any:
        """JSON of a GET, None when nobody answers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            return json.loads(connection.getresponse().read())
        except (OSError, ValueError, http.client.HTTPException):
            return None
        finally:
            connection.close()

    def is_alive(self) -> bool:
        return self.launcher.poll() is None

    def wait_ready(self, epoch: int, within_s: float) -> float:
        """Seconds until ready in a later epoch than this."""
        began = time.monotonic()
        while time.monotonic() - began < within_s and self.is_alive():
            ready = self.get("/ready")
            if ready and ready["ready"] and ready["epoch"] > epoch:
                return time.monotonic() - began
            time.sleep(POLL_S)
        raise ChaosError(f"not ready within {within_s:.0f} s:\n{tail(self.log)}")

    def ranks(self) -> list[dict[str, Any]]:
        nodes = self.get("/v1/cluster/nodes")
        return [rank for rank in nodes["ranks"] if rank["engine_pid"]] if nodes else []

    def wait_step(self, within_s: float) -> None:
        """Until every rank has completed one step more: a mesh whose epochs all end before that must give
        up, and is right to."""
        began = time.monotonic()
        first: int | None = None
        while time.monotonic() - began < within_s and self.is_alive():
            steps = [rank["step"] for rank in self.ranks() if rank["phase"] == "ready"]
            first = max(steps) if first is None and steps else first
            if first is not None and steps and min(steps) > first:
                return
            time.sleep(POLL_S)
        raise ChaosError(f"no step within {within_s:.0f} s:\n{tail(self.log)}")

    def processes(self) -> dict[int, str]:
        """Every process of this mesh, with its command line."""
        mark = f"{MARK}={self.session}".encode()
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    if mark in (folder / "environ").read_bytes().split(b"\0"):
                        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ")
                        found[int(folder.name)] = command.decode(errors="replace")
                except OSError:  # gone meanwhile
                    continue
        return found

    def memory(self) -> dict[str, int]:
        """Resident bytes of what lives as long as the mesh."""
        sizes = {}
        for pid, command in self.processes().items():
            for name in ("mlx_mesh.proxy", "mlx_mesh.node "):
                if name in command:
                    try:
                        status = Path(f"/proc/{pid}/status").read_text()
                    except OSError:
                        continue
                    (size,) = (line.split()[1] for line in status.splitlines() if "VmRSS" in line)
                    sizes[name.strip()] = int(size) * 1024
        return sizes

    def stop(self) -> list[str]:
        """Ctrl-C; what is wrong afterwards."""
        if self.is_alive():
            self.launcher.send_signal(signal.SIGINT)
        try:
            status = self.launcher.wait(60)
        except subprocess.TimeoutExpired:
            self.launcher.kill()
            self.launcher.wait()
            return ["the launcher did not end within 60 s"]
        problems = [f"the launcher ended with status {status}"] if status else []
        give_up = time.monotonic() + NO_MORE_STEPS_S
        while (left := self.processes()) and time.monotonic() < give_up:
            time.sleep(POLL_S)
        for pid, command in left.items():
            problems.append(f"left running: {pid} {command}")
            os.kill(pid, signal.SIGKILL)
        return problems


class ChaosError(Exception):
    """The run cannot go on; the message is for people."""


def end_by_signals() -> None:
    """Have Ctrl-C, SIGTERM and SIGHUP end the run as an error would: with everything that it started."""

    def end(number: int, frame: FrameType | None) -> None:
        for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(one, signal.SIG_IGN)  # the clean end is under way
        raise ChaosError(f"ended by {signal.Signals(number).name}")

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def _free_port() -> int:
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


# ---------------------------------------------------------------- the clients


@dataclass(frozen=True)
class Job:
    prompt: str
    seed: int | None  # None = greedy
    max_tokens: int

    def body(self, stream: bool) -> bytes:
        body: dict[str, Any] = {
            "model": "chaos",
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0.0 if self.seed is None else 0.8,
            "stream": stream,
        }
        if self.seed is not None:
            body["seed"] = self.seed
        return json.dumps(body).encode()


def make_jobs(chooser: random.Random, count: int) -> list[Job]:
    return [
        Job(
            prompt=" ".join(chooser.choices(WORDS, k=chooser.choice((3, 10, 40, 150)))),
            seed=None if number % 2 else chooser.randrange(1 << 30),
            max_tokens=chooser.choice((20, 60, 120)),
        )
        for number in range(count)
    ]


def ask(port: int, job: Job, stream: bool) -> tuple[str, int]:
    """The whole text, and how often the mesh asked to come back. Raises ChaosError for anything else."""
    num_returns = 0
    give_up = time.monotonic() + ANSWER_S
    while True:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
        try:
            connection.request(
                "POST", "/v1/completions", job.body(stream), {"content-type": "application/json"}
            )
            response = connection.getresponse()
            if response.status in (503, 429) and response.getheader("retry-after"):
                response.read()
                if time.monotonic() > give_up:
                    raise ChaosError("asked to come back for too long")
                num_returns += 1
                time.sleep(0.2)
                continue
            if response.status != 200:
                raise ChaosError(f"status {response.status}: {response.read()[:300]!r}")
            if not stream:
                return json.loads(response.read())["choices"][0]["text"], num_returns
            return "".join(_pieces(response)), num_returns
        except (OSError, http.client.HTTPException) as error:
            raise ChaosError(f"the connection broke: {error!r}") from error
        finally:
            connection.close()


def _pieces(response: http.client.HTTPResponse) -> Iterator[str]:
    is_done = False
    for line in response:
        if not line.startswith(b"data: "):
            continue
        if line.strip() == b"data: [DONE]":
            is_done = True
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            raise ChaosError(f"error event: {event['error']}")
        yield from (choice.get("text") or "" for choice in event["choices"])
    if not is_done:
        raise ChaosError("the stream ended without [DONE]")


@dataclass
class Clients:
    """Threads that ask until they are told to stop."""

    port: int
    jobs: list[Job]
    expected: dict[Job, str]
    seed: int
    num_answers: int = 0
    num_returns: int = 0
    problems: list[str] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)
    lock: threading.Lock = field(default_factory=threading.Lock)
    threads: list[threading.Thread] = field(default_factory=list)

    def start(self, count: int) -> None:
        # Daemons: when the run is broken off, nobody waits for their answers.
        self.threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(count)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        chooser = random.Random(self.seed * 1000 + number)
        while not self.stopping.is_set():
            job, stream = chooser.choice(self.jobs), chooser.random() < 0.5
            try:
                text, returns = ask(self.port, job, stream)
                problem = "" if text == self.expected[job] else _difference(job, text, self.expected[job])
            except ChaosError as error:
                returns, problem = 0, f"{'stream' if stream else 'whole'}: {error}"
            with self.lock:
                self.num_answers += 1
                self.num_returns += returns
                if problem:
                    self.problems.append(problem)
            if problem:
                time.sleep(1.0)

    def stop(self, within_s: float = ANSWER_S) -> None:
        self.stopping.set()
        give_up = time.monotonic() + within_s
        for thread in self.threads:
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive():
                self.problems.append("a request hangs")


def _difference(job: Job, text: str, expected: str) -> str:
    at = next(
        (at for at, pair in enumerate(zip(text, expected, strict=False)) if pair[0] != pair[1]),
        min(len(text), len(expected)),
    )
    return f"wrong text after {at} characters ({job}): {text[at : at + 40]!r}, not {expected[at : at + 40]!r}"


# ---------------------------------------------------------------- the faults


@dataclass(frozen=True)
class Strike:
    kind: str
    phase: str
    rank: int
    detect_s: (
        float  # until the mesh is not ready any more, or during a recovery until the process is replaced
    )


@dataclass
class Chaos:
    mesh: Mesh
    chooser: random.Random
    strikes: list[Strike] = field(default_factory=list)
    resumes: list[tuple[list[Strike], float]] = field(default_factory=list)

    def one_recovery(self) -> None:
        """A fault at a random moment after ready, one in five with another during the recovery."""
        self.mesh.wait_step(RECOVER_S)
        time.sleep(self.chooser.uniform(0.2, 3.0))
        epoch = self.mesh.get("/ready")["epoch"]
        began = time.monotonic()
        struck = [self.strike()]
        while len(struck) <= STRIKES_IN_A_ROW and self.chooser.random() < 0.2:
            time.sleep(self.chooser.uniform(0.0, self.mesh.load_s / 2))
            if any(rank["phase"] != "ready" for rank in self.mesh.ranks()):
                struck.append(self.strike())
        self.mesh.wait_ready(epoch, RECOVER_S)
        self.resumes.append((struck, time.monotonic() - began))
        self.strikes += struck

    def strike(self) -> Strike:
        """A signal to a random engine, and how long the mesh takes to notice."""
        while not (ranks := self.mesh.ranks()):
            time.sleep(POLL_S)
        rank = self.chooser.choice(ranks)
        kind, number = self.chooser.choice((("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)))
        began = time.monotonic()
        try:
            os.kill(rank["engine_pid"], number)
        except ProcessLookupError:  # it ended by itself meanwhile: its peer was hit
            return Strike("missed", rank["phase"], rank["rank"], 0.0)
        while time.monotonic() - began < RECOVER_S:
            if rank["phase"] == "ready" and not (self.mesh.get("/ready") or {"ready": True})["ready"]:
                break
            nodes = self.mesh.get("/v1/cluster/nodes")
            rows = nodes["ranks"] if nodes else []
            if not any(row["engine_pid"] == rank["engine_pid"] for row in rows) and rows:
                break
            time.sleep(POLL_S)
        return Strike(kind, rank["phase"], rank["rank"], time.monotonic() - began)

    def table(self) -> str:
        """Faults by kind and phase: how many, when they were noticed, and when the mesh was ready again, also
        as a multiple of its plain start. Several faults in one recovery are a kind of their own."""
        load = self.mesh.load_s
        noticed: dict[tuple[str, str], list[float]] = defaultdict(list)
        again: dict[tuple[str, str], list[float]] = defaultdict(list)
        for strike in self.strikes:
            noticed[strike.kind, strike.phase].append(strike.detect_s)
        for struck, seconds in self.resumes:
            kind = struck[0].kind if len(struck) == 1 else "several"
            again[kind, struck[0].phase].append(seconds)
        lines = [
            f"plain start: {load:.1f} s",
            f"{'fault':9}{'phase':12}{'noticed after s':>26}{'ready again after s':>30}{'x start':>9}",
        ]
        for key in sorted({*noticed, *again}):
            resumed = again.get(key, [])
            times = f"{_middle(resumed) / load:>9.2f}" if resumed else ""
            lines.append(
                f"{key[0]:9}{key[1]:12}{_spread(noticed.get(key, [])):>26}{_spread(resumed):>30}{times}"
            )
        everything = [seconds for _, seconds in self.resumes]
        if everything:
            lines.append(f"all recoveries: {_spread(everything)} s, {_middle(everything) / load:.2f} x start")
        return "\n".join(lines)


def _middle(times: list[float]) -> float:
    return sorted(times)[len(times) // 2]


def _spread(times: list[float]) -> str:
    """Count, median and worst."""
    return f"{len(times)}: {_middle(times):.2f}, worst {max(times):.2f}" if times else ""


# ---------------------------------------------------------------- the run


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/chaos", description=__doc__)
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model folder with a real tokenizer")
    parser.add_argument("--model", type=Path, help="instead of the tiny random one")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--recoveries", type=int, default=12)
    parser.add_argument("--limit-s", type=float, default=300.0, help="no new fault after this")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    end_by_signals()
    with tempfile.TemporaryDirectory(prefix="mlx-mesh-chaos-") as folder:
        try:
            return run(arguments, Path(folder))
        except ChaosError as error:
            print(f"chaos: {error}", file=sys.stderr)
            return 1


def run(arguments: argparse.Namespace, folder: Path) -> int:
    chooser = random.Random(arguments.seed)
    model = arguments.model
    if model is None:
        (folder / "model").mkdir()
        model = make_model(folder / "model", arguments.tokenizer, arguments.seed)
    mesh = Mesh(model, arguments.ranks, folder / "state", folder / "launcher.log")
    problems: list[str] = []
    chaos = Chaos(mesh, chooser)
    try:
        mesh.wait_for_start()
        print(
            f"seed {arguments.seed}: {arguments.ranks} ranks, {arguments.clients} clients, "
            f"ready after {mesh.load_s:.1f} s",
            flush=True,
        )
        jobs = make_jobs(chooser, arguments.jobs)
        expected = {job: ask(mesh.port, job, stream=False)[0] for job in jobs}
        clients = Clients(mesh.port, jobs, expected, arguments.seed)
        clients.start(arguments.clients)
        before: dict[str, int] = {}
        began = time.monotonic()
        patience_s = 0.0
        try:
            while len(chaos.resumes) < arguments.recoveries and time.monotonic() - began < arguments.limit_s:
                chaos.one_recovery()
                before = before or mesh.memory()
                if clients.problems:
                    break
            patience_s = ANSWER_S
        finally:
            clients.stop(patience_s)
        problems += clients.problems
        problems += grown(before, mesh.memory())
        print(f"{clients.num_answers} answers, {clients.num_returns} times asked to come back, ", end="")
        print(f"{len(chaos.resumes)} recoveries in {time.monotonic() - began:.0f} s")
        if len(chaos.resumes) < arguments.recoveries:
            problems.append(f"only {len(chaos.resumes)} of {arguments.recoveries} recoveries")
    except ChaosError as error:
        problems.append(str(error))
    finally:
        problems += mesh.stop()
    if chaos.resumes:
        print(chaos.table())
    for problem in problems:
        print(f"PROBLEM {problem}")
    if problems:
        print(tail(mesh.log))
    else:
        print("no failed request, no wrong token, nothing left running")
    return 1 if problems else 0


def grown(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Processes that live as long as the mesh and take far more memory than after the first recovery."""
    return [
        f"{name} grew from {size / 1e6:.0f} to {after[name] / 1e6:.0f} MB"
        for name, size in before.items()
        if name in after and after[name] > size * MAX_GROWTH + GROWTH_MARGIN_BYTES
    ]


if __name__ == "__main__":
    sys.exit(main())
