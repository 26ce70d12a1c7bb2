"""Ranks that fail on order: the answer is the same, and the cause is told."""

from __future__ import annotations

import time
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


BODY = {
    "model": "tiny",
    "prompt": "hello there",
    "max_tokens": 60,
    "temperature": 0.8,
    "seed": 4,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.1,
    "logprobs": 1,
}
"""An answer to which its own past matters."""


def told(answer: Any) -> tuple[Any, ...]:
    """Text, the tokens that have log probabilities, and how many tokens are counted."""
    (choice,), usage = answer["choices"], answer["usage"]
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == len(choice["logprobs"]["token_logprobs"]) == usage["completion_tokens"]
    return choice["text"], tuple(tokens), usage["prompt_tokens"], usage["completion_tokens"]


def ask(mesh: Any) -> tuple[Any, ...]:
    return told(httpx.post(f"{mesh.url}/v1/completions", json=BODY, timeout=200).json())


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


def ask_long(mesh: Any) -> str:
    body = {"model": "tiny", "prompt": "hello there " * 140, "max_tokens": 20, "temperature": 0.8, "seed": 4}
    text: str = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=200).json()["choices"][0]["text"]
    return text


@pytest.mark.two_rank
def test_a_lack_of_memory_costs_a_pause_and_a_slow_rank_not_even_that(
    start_mesh: Any, tiny_llama: Path
) -> None:
    """Rank 1 gets no more memory after a few tokens, and the long prompt needs much. Then it is slow once."""
    faults = ("--fault", "memory:1@decode+3=1MB#1", "--fault", "delay:1@decode+2=3s#2")
    model = ("--model", str(tiny_llama), "--served-model-name", "tiny")
    with start_mesh("up", "--sim", "2", *model, *faults) as mesh:
        short = ask(mesh)
        long = ask_long(mesh)
        assert (ask(mesh), ask_long(mesh)) == (short, long)
        status = httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()
        assert status["epoch"] == 2 and status["epoch_cause"].startswith("rank 1 on local, phase ready")
        assert mesh.stop() == 0
        log = mesh.output.read_text()
        assert "fault: memory at decode" in log and "fault: delay at decode" in log


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("moment", ["connect", "load", "warm-up", "prefill", "decode", "idle"])
def test_every_kind_of_fault_at_every_moment(start_mesh: Any, tiny_llama: Path, moment: str) -> None:
    """Each in an epoch of its own; between them a rank is killed after some tokens, for an epoch that
    completes no step uses up the budget of restarts."""
    kinds = ["kill", "freeze", "corrupt", "drop"]
    if moment == "idle":
        kinds = ["kill", "freeze"]  # while nothing is said there is nothing to lose or falsify
    faults = [f"{kind}:1@{moment}#{2 * at + 1}" for at, kind in enumerate(kinds)]
    faults += [f"kill:0@decode+2#{2 * at + 2}" for at in range(len(kinds))]
    faults.append(f"delay:1@{moment}=2s#{2 * len(kinds) + 1}")
    arguments = [word for fault in faults for word in ("--fault", fault)]
    model = ("--model", str(tiny_llama), "--served-model-name", "tiny")
    with start_mesh("up", "--sim", "2", *model, "--paranoid", *arguments) as mesh:
        answers = set()
        deadline = time.monotonic() + 1200
        while httpx.get(f"{mesh.url}/ready", timeout=10).json()["epoch"] <= 2 * len(kinds):
            assert time.monotonic() < deadline, mesh.output.read_text()[-3000:]
            if moment == "idle":
                time.sleep(1.5)  # longer than it takes to count as idle
            reply = httpx.post(f"{mesh.url}/v1/completions", json=BODY, timeout=300)
            if reply.status_code == 200:
                answers.add(told(reply.json()))
            else:
                assert reply.status_code == 503 and reply.headers["retry-after"]
                time.sleep(0.5)
        answers.add(ask(mesh))
        assert len(answers) == 1
        assert mesh.stop() == 0
