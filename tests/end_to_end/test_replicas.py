"""Two replicas over HTTP: conversations stay with their caches, and a killed engine costs no answer."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

WITHIN_S = 60.0
RULES = "answer in short sentences. " + " ".join(f"Rule {i}: lamp {i * 7} is lit." for i in range(30))


def ask(mesh: Any, name: str, text: str, keeper: str = "all", **fields: Any) -> tuple[str, int]:
    """The answer, and how many tokens of its prompt were kept."""
    body = {
        "messages": [
            {"role": "system", "content": f"You, {keeper}, {RULES}"},
            {"role": "user", "content": text},
        ],
        "max_tokens": 12,
        "temperature": 0,
        **fields,
    }
    answer = httpx.post(
        f"{mesh.url}/v1/chat/completions", json=body, headers={"X-Conversation-Id": name}, timeout=240
    )
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def get(mesh: Any, path: str) -> Any:
    return httpx.get(f"{mesh.url}{path}", timeout=30).json()


def wait_for_both(mesh: Any) -> list[Any]:
    end = time.monotonic() + WITHIN_S
    while True:
        replicas = get(mesh, "/v1/cluster/status")["replicas"]
        if all(replica["ready"] for replica in replicas):
            return list(replicas)
        assert time.monotonic() < end, replicas
        time.sleep(0.1)  # the poll interval of a wait that has a deadline


@pytest.mark.long
@pytest.mark.two_rank
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", [("serve",), ("up", "--sim", "4")])
def test_conversations_keep_their_replica_and_its_death_costs_no_answer(
    start_mesh: Any, tiny_llama: Path, command: tuple[str, ...]
) -> None:
    with start_mesh(*command, "--model", str(tiny_llama), "--replicas", "2") as mesh:
        first = {name: ask(mesh, name, "Is lamp 7 lit?", name) for name in ("a", "b")}
        assert all(kept < 50 for _, kept in first.values()), "each on a replica of its own"
        again = {name: ask(mesh, name, "Is lamp 7 lit?", name) for name in ("a", "b")}
        assert all(kept > 500 for _, kept in again.values())
        assert [text for text, _ in again.values()] == [text for text, _ in first.values()]
        counts = [replica["num_requests"] for replica in wait_for_both(mesh)]
        assert counts == [{"load": 1, "conversation": 1}] * 2
        assert get(mesh, "/v1/capabilities")["replicas"] == 2

        alone = ask(mesh, "long", "Go on.", max_tokens=300)[0]
        with ThreadPoolExecutor(4) as pool:
            answers = [pool.submit(ask, mesh, f"c{i}", "Go on.", max_tokens=300) for i in range(4)]
            end = time.monotonic() + WITHIN_S
            while min(one["num_open"] for one in get(mesh, "/v1/cluster/status")["replicas"]) < 1:
                assert time.monotonic() < end
                time.sleep(0.02)  # the poll interval of a wait that has a deadline
            victim = next(row for row in get(mesh, "/v1/cluster/nodes")["ranks"] if row["replica"] == 2)
            os.kill(victim["engine_pid"], signal.SIGKILL)
            assert {answer.result()[0] for answer in answers} == {alone}
        assert get(mesh, "/v1/cache/stats")["hits"] >= 2
        replicas = wait_for_both(mesh)
        assert [(one["epoch"], one["restarts"]) for one in replicas] == [(1, 0), (2, 1)]
        assert mesh.stop() == 0


@pytest.mark.long
@pytest.mark.two_rank
@pytest.mark.timeout(600)
def test_replicas_that_the_memory_does_not_carry_are_refused_with_figures(
    tmp_path: Path, tiny_llama: Path
) -> None:
    hosts = tmp_path / "hosts.yaml"
    hosts.write_text(
        f"model: {tiny_llama}\nreplicas: 2\nhosts: [{{local: true, slots: 2, memory_limit: 2MB}}]\n"
    )
    words = [sys.executable, "-I", "-m", "mlx_mesh.launcher", "up", str(hosts), "--dry-run"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 4, done.stderr
    assert "does not carry 2 replicas" in done.stderr and "local has 1/2 of the" in done.stderr
