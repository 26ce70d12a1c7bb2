"""One rank beside mlx-lm's own server: the same model, the same requests, alternating in one run.

Prints for 1 and 4 streams the median of the ratios of neighbouring measurements, mlx-mesh over mlx_lm.server:
prefill in prompt tokens per second until the first token, decode in tokens per second after it. The figures
beside them are medians of their own. Ratios, because a shared machine is never twice the same.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import threading
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

from serving import Answer, ServerError, answering, complete, free_port, mesh_url, running
from words import WORDS

READY_S = 180.0


@dataclass(frozen=True)
class Figures:
    """Tokens per second of one measurement over all its streams."""

    prefill: float
    decode: float


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/bench_smoke", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each server")
    parser.add_argument("--prompt-words", type=int, default=192)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--at-least", type=float, default=0.0, help="exit with 1 when a ratio is below this")
    arguments = parser.parse_args()

    try:
        with mesh_server(arguments.model) as mesh, mlx_lm_server(arguments.model) as mlx_lm:
            for url in (mesh, mlx_lm):  # warm both, outside the measurement
                measure(url, arguments.model, 4, arguments.prompt_words, 8)
            worst = min(compare(mesh, mlx_lm, num_streams, arguments) for num_streams in (1, 4))
    except ServerError as error:
        sys.exit(f"bench_smoke: {error}")
    if worst < arguments.at_least:
        sys.exit(f"bench_smoke: the ratio {worst:.2f} is below {arguments.at_least}")


def compare(mesh: str, mlx_lm: str, num_streams: int, arguments: argparse.Namespace) -> float:
    """Print both ratios for so many streams; returns the lower one."""
    figures: dict[str, list[Figures]] = {mesh: [], mlx_lm: []}
    for turn in range(arguments.rounds):
        # Neither server always goes first: whatever disturbs the machine hits both alike.
        for url in (mesh, mlx_lm) if turn % 2 == 0 else (mlx_lm, mesh):
            measured = measure(
                url, arguments.model, num_streams, arguments.prompt_words, arguments.max_tokens
            )
            figures[url].append(measured)
    prefills = [statistics.median(one.prefill for one in figures[url]) for url in (mesh, mlx_lm)]
    decodes = [statistics.median(one.decode for one in figures[url]) for url in (mesh, mlx_lm)]
    pairs = list(zip(figures[mesh], figures[mlx_lm], strict=True))  # measured one after the other
    prefill = statistics.median(ours.prefill / theirs.prefill for ours, theirs in pairs)
    decode = statistics.median(ours.decode / theirs.decode for ours, theirs in pairs)
    print(
        f"{num_streams} stream{'s' if num_streams > 1 else ''}: "
        f"prefill {prefill:.2f}x ({prefills[0]:.0f} / {prefills[1]:.0f} tokens/s), "
        f"decode {decode:.2f}x ({decodes[0]:.1f} / {decodes[1]:.1f} tokens/s)",
        flush=True,
    )
    return min(prefill, decode)


def measure(url: str, model: Path, num_streams: int, prompt_words: int, max_tokens: int) -> Figures:
    """One measurement: so many requests at once, each with a prompt that no cache has seen."""
    answers: list[Answer] = []
    errors: list[ServerError] = []

    def ask(prompt: str) -> None:
        body = {
            "model": str(model),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "skip_prefix_cache": True,
        }
        try:
            answers.append(complete(url + "/v1/completions", body))
        except ServerError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask, args=(new_prompt(prompt_words),)) for _ in range(num_streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    last_first = max(answer.first_s for answer in answers)
    prompt_tokens = sum(answer.usage["prompt_tokens"] for answer in answers)
    decoded = sum(answer.usage["completion_tokens"] - 1 for answer in answers)
    decode_s = max(answer.last_s for answer in answers) - min(answer.first_s for answer in answers)
    return Figures(prefill=prompt_tokens / last_first, decode=decoded / decode_s)


def new_prompt(num_words: int) -> str:
    """Different from its first word on; ends so that the model goes on for long."""
    return " ".join(random.choices(WORDS, k=num_words)) + ". Once upon a time, in a small village,"


def mesh_server(model: Path) -> AbstractContextManager[str]:
    name = f"bench-smoke-{os.getpid()}"
    mesh = str(Path(sys.executable).with_name("mlx-mesh"))
    command = [mesh, "serve", "--model", str(model), "--port", "0", "--name", name]
    return running("mlx-mesh", command, lambda process: mesh_url(name, process), READY_S)


def mlx_lm_server(model: Path) -> AbstractContextManager[str]:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port", str(port)]
    return running(
        "mlx_lm.server", command, lambda _: answering(url, "/v1/models"), READY_S, **blas_variables()
    )


def blas_variables() -> dict[str, str]:
    """What an agent gives its engines, so that both servers compute with the same library."""
    code = "from mlx_mesh.node import blas; print(blas.find_openblas() if blas.is_wanted() else '')"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, check=True)
    library = done.stdout.strip()
    return {"LD_PRELOAD": library, "OPENBLAS_NUM_THREADS": "1"} if library else {}


if __name__ == "__main__":
    main()
