"""API keys are known to those who must know them, and stand nowhere that others can read."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

KEYS = ("key-of-the-first-client-5e3a", "key-of-the-second-client-9b1c")
WRONG = "key-of-nobody-77d0"
READY_WITHIN_S = 60.0
BODY = {"model": "tiny", "prompt": "hello there", "max_tokens": 5, "temperature": 0}


def ask(mesh: Any, path: str = "/v1/completions", body: Any = BODY, **headers: str) -> httpx.Response:
    content = body if isinstance(body, str) else json.dumps(body)
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.post(f"{mesh.url}{path}", content=content, headers=names, timeout=60)


def read(mesh: Any, path: str) -> httpx.Response:
    return httpx.get(f"{mesh.url}{path}", headers={"authorization": f"Bearer {KEYS[0]}"}, timeout=60)


def recover(mesh: Any) -> None:
    """An engine dies with its words; the next epoch is ready."""
    (*_, last) = read(mesh, "/v1/cluster/nodes").json()["ranks"]
    os.kill(last["engine_pid"], signal.SIGABRT)
    give_up = time.monotonic() + READY_WITHIN_S
    while (seen := httpx.get(f"{mesh.url}/ready", timeout=10)).status_code != 200 or seen.json()["epoch"] < 2:
        assert time.monotonic() < give_up, seen.text
        time.sleep(0.1)  # the poll interval of a wait that has a deadline


@pytest.mark.two_rank
def test_api_keys_are_in_no_log_process_list_status_metric_or_answer(
    start_mesh: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    key_file = tmp_path / "keys"
    key_file.write_text("\n".join(KEYS) + "\n")
    seen: dict[str, str] = {}
    arguments = ("--model", str(tiny_llama), "--served-model-name", "tiny", "--debug")
    with start_mesh("up", "--sim", "2", *arguments, "--api-key-file", str(key_file)) as mesh:
        for number, headers in enumerate(
            (
                {},
                {"authorization": f"Bearer {WRONG}"},
                {"authorization": f"Bearer {KEYS[0]}{WRONG}"},
                {"x_api_key": WRONG},
                {"authorization": KEYS[0]},  # a key, but not as one is sent
                {"authorization": f"Basic {base64.b64encode(f'user:{KEYS[0]}'.encode()).decode()}"},
            )
        ):
            answer = ask(mesh, **headers)
            assert answer.status_code == 401, headers
            seen[f"refusal {number}"] = answer.text + str(answer.headers)
        for path in ("/metrics", "/v1/models", "/v1/cluster/status", f"/v1/models?key={KEYS[0]}"):
            assert httpx.get(f"{mesh.url}{path}", timeout=10).status_code == 401
        good = {"authorization": f"Bearer {KEYS[1]}"}
        assert ask(mesh, **good).status_code == ask(mesh, x_api_key=KEYS[0]).status_code == 200
        for body in ("{", {**BODY, "max_tokens": -1}, {**BODY, "model": "other"}):
            answer = ask(mesh, body=body, **good)
            assert answer.status_code in (400, 404)
            seen[f"error to {body}"] = answer.text + str(answer.headers)
        recover(mesh)
        assert ask(mesh, **good).status_code == 200
        for path in ("/v1/cluster/status", "/v1/cluster/nodes", "/v1/capabilities", "/metrics", "/ready"):
            seen[path] = read(mesh, path).raise_for_status().text
        state = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        for command in (["status"], ["status", "--json"], ["logs", "-n", "1000"]):
            told = subprocess.run(
                [sys.executable, "-I", "-m", "mlx_mesh.launcher", command[0], mesh.name, *command[1:]],
                env=state, capture_output=True, text=True, check=True, timeout=60,
            )  # fmt: skip
            seen[" ".join(command)] = told.stdout + told.stderr
        if sys.platform == "linux":
            pids = mesh.processes()
            assert len(pids) >= 5  # launcher, agent, proxy, two engines
            for pid in pids:
                for what in ("cmdline", "environ"):
                    seen[f"{what} of {pid}"] = (
                        Path(f"/proc/{pid}/{what}").read_bytes().decode(errors="replace")
                    )
        assert mesh.stop() == 0
        seen["launcher's output"] = mesh.output.read_text()
    logs = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert any(path.name.startswith("rank-") for path in logs)
    seen |= {str(path): path.read_text(errors="replace") for path in logs}
    for where, text in seen.items():
        for secret in (*KEYS, WRONG, base64.b64encode(f"user:{KEYS[0]}".encode()).decode()):
            assert secret not in text, where
