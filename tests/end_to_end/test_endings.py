"""Every way in which a mesh may end: by a wish, with its answers, or by a death, with nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

SOON_S = 10.0
BODY = {
    "messages": [{"role": "user", "content": "Tell me a long story"}],
    "max_tokens": 200,
    "temperature": 0,
    "logit_bias": {"0": -100, "2": -100},  # no end-of-text token ends it early
}


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def soon_gone(pids: list[int], files: list[Path]) -> bool:
    deadline = time.monotonic() + SOON_S
    while left := [*filter(is_running, pids), *(file for file in files if file.exists())]:
        if time.monotonic() > deadline:
            pytest.fail(f"still there after {SOON_S:g} s: {left}")
        time.sleep(0.05)  # other processes' children send us no event
    return True


def processes_of(mesh: Any, state: Path) -> tuple[int, list[int], list[int], Path]:
    """Agent, proxy and embedder, engines by rank, run file."""
    run_file = state / "mlx-mesh" / mesh.name / "agent-local.json"
    record = json.loads(run_file.read_bytes())
    engines = [record["engines"][rank]["pid"] for rank in sorted(record["engines"])]
    others = [record[name]["pid"] for name in ("proxy", "embedder")]
    return record["agent"]["pid"], others, engines, run_file


def test_a_wished_end_lets_open_answers_finish_and_takes_no_new_ones(
    start_mesh: Any, tiny_llama: Path, tiny_bert: Path
) -> None:
    model = ("--model", str(tiny_llama), "--embedding-model", str(tiny_bert))
    with start_mesh("up", "--sim", "2", *model) as mesh:
        with mesh.client() as client:
            vector = client.embeddings.create(model=tiny_bert.name, input="hello").data[0].embedding
        assert len(vector) == 16
        url = f"{mesh.url}/v1/chat/completions"
        undisturbed = httpx.post(url, json=BODY, timeout=120).json()["choices"][0]["message"]["content"]
        text = ""
        statuses: set[tuple[int, str, bool]] = set()
        with httpx.stream("POST", url, json={**BODY, "stream": True}, timeout=120) as response:
            lines = response.iter_lines()
            for line in lines:
                if not line.startswith("data: {"):
                    continue
                text += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
                if text and not statuses:
                    mesh.launcher.send_signal(signal.SIGTERM)
                    statuses = wait_for_refusal(url)
        assert text == undisturbed and statuses == {(503, "draining", True)}
        assert mesh.launcher.wait(SOON_S) == 0
    assert "1 open request may finish within 30 s (drain_s)" in mesh.output.read_text()


def wait_for_refusal(url: str) -> set[tuple[int, str, bool]]:
    """Status, code and Retry-After of the first new request that is not taken."""
    deadline = time.monotonic() + SOON_S
    while time.monotonic() < deadline:
        answer = httpx.post(url, json={**BODY, "max_tokens": 1}, timeout=SOON_S)
        if answer.status_code != 200:
            code = answer.json()["error"]["code"]
            return {(answer.status_code, code, "retry-after" in answer.headers)}
    return set()


def kill_launcher(mesh: Any, agent: int) -> None:
    mesh.launcher.kill()


def kill_agent(mesh: Any, agent: int) -> None:
    os.kill(agent, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux ends children with their parent")
@pytest.mark.parametrize("kill", [kill_launcher, kill_agent])
def test_a_death_leaves_nothing_even_when_an_engine_and_the_proxy_are_stopped(
    start_mesh: Any, tiny_llama: Path, tiny_bert: Path, tmp_path: Path, kill: Callable[[Any, int], None]
) -> None:
    model = ("--model", str(tiny_llama), "--embedding-model", str(tiny_bert))
    with start_mesh("up", "--sim", "2", *model) as mesh:
        agent, others, engines, run_file = processes_of(mesh, tmp_path / "state")
        os.kill(engines[1], signal.SIGSTOP)
        for other in others:
            os.kill(other, signal.SIGSTOP)
        kill(mesh, agent)
        # A killed agent's file is removed by its launcher.
        assert soon_gone([agent, *others, *engines, mesh.launcher.pid], [run_file])
