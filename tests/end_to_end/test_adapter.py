"""`--adapter-path` and the hostfile's `adapter`: what users type, to the answers and the refusals."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

PROMPT = "The adapter decides what comes next."


def text_of_mlx_lm(model_folder: Path, adapter: Path) -> str:
    from mlx_lm import generate, load

    loaded: Any = load(str(model_folder), adapter_path=str(adapter))
    text: str = generate(loaded[0], loaded[1], PROMPT, max_tokens=24)
    return text


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", "-m", "mlx_mesh.launcher", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.two_rank
@pytest.mark.timeout(300)
def test_a_hostfile_with_an_adapter_answers_as_mlx_lm_does(
    start_mesh: Any, tmp_path: Path, tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    (tmp_path / "lora").symlink_to(tiny_adapters["lora"])
    (tmp_path / "hosts.yaml").write_text(
        f"model: {tiny_llama}\nadapter: lora\nsharding: tensor\nhosts:\n  - {{local: true, slots: 2}}\n"
    )
    with start_mesh("up", str(tmp_path / "hosts.yaml"), "--served-model-name", "tiny") as mesh:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}
        answer = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=120).json()
        assert answer["choices"][0]["text"] == text_of_mlx_lm(tiny_llama, tiny_adapters["lora"])
        held = [
            r["weights_bytes"] for r in httpx.get(f"{mesh.url}/v1/cluster/nodes", timeout=10).json()["ranks"]
        ]
        plan = httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()["plan"]
        assert held == [shard["weights_bytes"] for shard in plan["shards"]]
        assert mesh.stop() == 0


@pytest.mark.two_rank
def test_adapters_that_cannot_be_used_are_refused_before_anything_starts(
    tmp_path: Path, tiny_llama: Path, tiny_adapters: dict[str, Path]
) -> None:
    up = ("up", "--sim", "2", "--model", str(tiny_llama), "--adapter-path")
    missing = run(*up, str(tmp_path / "nowhere"))
    assert missing.returncode == 3
    assert f"local: adapter: the adapter folder {tmp_path / 'nowhere'} does not exist on" in missing.stderr

    other = tmp_path / "other"
    other.mkdir()
    for name in ("adapter_config.json", "adapters.safetensors"):
        (other / name).write_bytes((tiny_adapters["lora"] / name).read_bytes())
    text = (other / "adapter_config.json").read_text().replace('"rank": 4', '"rank": 8')
    (other / "adapter_config.json").write_text(text)
    misfit = run(*up, str(other))
    assert misfit.returncode == 4, misfit.stderr
    words = (
        r"self_attn.\w+.lora_[ab]: adapter shape \(.*\) does not match model parameter shape \(.*\); and 23"
    )
    assert re.search(words, misfit.stderr), misfit.stderr
