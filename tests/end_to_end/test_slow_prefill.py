"""A long prompt on a machine that is busy with other things is slow, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

NUM_HOGS = 4


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("command", [("serve",), ("up", "--sim", "3")])
def test_a_prompt_of_four_thousand_tokens_on_a_loaded_machine_is_never_called_a_hang(
    start_mesh: Any, smollm2: Path, command: tuple[str, ...]
) -> None:
    with start_mesh(*command, "--model", str(smollm2), "--served-model-name", "it") as mesh:
        body = {
            "prompt": "a short one",
            "max_tokens": 3,
            "temperature": 0,
        }  # what the ranks learn their pace by
        assert httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=600).status_code == 200
        hogs = [subprocess.Popen([sys.executable, "-I", "-c", "while True: pass"]) for _ in range(NUM_HOGS)]
        try:
            body = {"prompt": "river stone " * 2000, "max_tokens": 4, "temperature": 0}
            answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=1500)
        finally:
            for hog in hogs:
                hog.kill()
                hog.wait()
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] >= 4000
        assert httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()["epoch"] == 1
        assert mesh.stop() == 0
