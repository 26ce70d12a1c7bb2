"""Ranks that fail on order: the answer is the same, and the cause is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

FAULTS = {
    "kill:0@decode+3#1": "rank 0 on local, phase ready: its engine was killed by SIGKILL",
    "kill:1@load+1#2": "rank 1 on local, phase loading: its engine was killed by SIGKILL",
    "drop:1@decode+3#3": "is due",
    "corrupt:0@connect#4": "phase connecting: Someone who is not of this mesh may be connected",
    "corrupt:1@decode+3#5": "rank 1 on local, phase ready: the ranks have different histories",
    "freeze:1@decode+3#6": "rank 1 on local, phase ready",
}


def ask(mesh: Any) -> str:
    body = {"model": "tiny", "prompt": "hello there", "max_tokens": 60, "temperature": 0.8, "seed": 4}
    text: str = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=200).json()["choices"][0]["text"]
    return text


@pytest.mark.two_rank
@pytest.mark.timeout(400)
def test_an_answer_is_the_same_through_six_faults(start_mesh: Any, tiny_llama: Path) -> None:
    arguments = [word for fault in FAULTS for word in ("--fault", fault)]
    model = ("--model", str(tiny_llama), "--served-model-name", "tiny")
    with start_mesh("up", "--sim", "2", *model, "--paranoid", *arguments) as mesh:
        disturbed = ask(mesh)
        assert httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()["epoch"] == len(FAULTS) + 1
        assert ask(mesh) == disturbed
        assert mesh.stop() == 0
        log = mesh.output.read_text()
        for cause in FAULTS.values():
            assert any(line.startswith("Epoch ") and cause in line for line in log.splitlines()), cause
