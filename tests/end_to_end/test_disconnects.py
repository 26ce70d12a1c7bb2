"""Clients that hang up: no rank decodes on for them, and nothing of them stays."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

SETTLED_WITHIN_S = 20.0
LONG = 1900  # tokens; no client waits for all of them
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {"temperature": 0.9, "seed": 7},
    "penalties": {"temperature": 0.9, "seed": 7, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "logprobs": {"temperature": 0.9, "seed": 7, "logprobs": 3},
    "bias": {"temperature": 0, "logit_bias": {"40": 5.0}},
}


def metric(mesh: Any, name: str) -> float:
    """The sum over all labels of one metric, NaN when there is none."""
    text = httpx.get(f"{mesh.url}/metrics", timeout=10).text
    values = re.findall(rf"^mlx_mesh_{name}(?:{{.*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, values)) if values else float("nan")


def wait_until_idle(mesh: Any) -> None:
    """No rank has a row or a running cache, and nobody is open."""
    wait_for_zero(mesh, ("rank_kv_bytes", "rank_running", "rank_waiting", "requests_open"))


def forget_prefixes(mesh: Any) -> None:
    """What was kept of prompts is within its own limit, and in the way of a comparison of memory."""
    assert httpx.post(f"{mesh.url}/v1/cache/reset", timeout=10).status_code == 202
    wait_for_zero(mesh, ("rank_prefix_bytes",))


def wait_for_zero(mesh: Any, names: tuple[str, ...]) -> None:
    give_up = time.monotonic() + SETTLED_WITHIN_S
    while any((values := {name: metric(mesh, name) for name in names}).values()):
        assert time.monotonic() < give_up, f"still busy: {values}"
        time.sleep(0.2)  # the poll interval of a wait that has a deadline


def hang_up_after(mesh: Any, prompt: str, num_bytes: int, **body: Any) -> None:
    """Stream, read so many bytes, and close the connection."""
    data = json.dumps({"model": "tiny-llama", "prompt": prompt, "max_tokens": LONG, "stream": True, **body})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
    port = int(mesh.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(f"{head}Content-Type: application/json\r\n\r\n{data}".encode())
        received = 0
        while received < num_bytes:
            part = connection.recv(4096)
            assert part, "the server hung up first"
            received += len(part)


def answer(mesh: Any) -> str:
    body = {"model": "tiny-llama", "prompt": "after all", "max_tokens": 20, "temperature": 0.7, "seed": 3}
    text: str = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    return text


def fastest_s(mesh: Any) -> float:
    """Of several equal answers, so that other work on this machine counts little."""
    taken = []
    for _ in range(8):
        began = time.monotonic()
        answer(mesh)
        taken.append(time.monotonic() - began)
    return min(taken)


@pytest.mark.two_rank
@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_disconnects", [60, pytest.param(200, marks=pytest.mark.long)])
def test_many_disconnects_with_a_seed_leave_the_mesh_as_it_was(
    num_disconnects: int, start_mesh: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    model = tmp_path / "tiny-llama"
    model.symlink_to(tiny_llama)
    with start_mesh("up", "--sim", "2", "--model", str(model), "--served-model-name", "tiny-llama") as mesh:
        before, before_s = answer(mesh), fastest_s(mesh)
        wait_until_idle(mesh)
        forget_prefixes(mesh)
        memory = metric(mesh, "rank_memory_bytes")
        for number in range(num_disconnects):
            # Before the first token, at it, and later.
            hang_up_after(mesh, "x" * (5 + number), (0, 200, 1500)[number % 3], temperature=0.9, seed=number)
        wait_until_idle(mesh)
        for name, settings in MODES.items():
            hang_up_after(mesh, f"in {name}", 600, **settings)
            wait_until_idle(mesh)
        assert answer(mesh) == before
        assert fastest_s(mesh) < 3 * before_s
        wait_until_idle(mesh)
        assert metric(mesh, "epochs_total") == 1
        assert metric(mesh, "requests_cancelled_total") >= num_disconnects * 2 / 3
        forget_prefixes(mesh)
        assert metric(mesh, "rank_memory_bytes") < memory + 8e6
        assert mesh.stop() == 0
