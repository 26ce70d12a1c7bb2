"""Quantised caches, a kept prefix and the death of a follower together, over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs

WITHIN_S = 120.0
NUM_TOKENS = 200
SYSTEM = "You keep a lighthouse. " + " ".join(f"Rule {i}: lamp {i * 7} is lit." for i in range(25))


@pytest.fixture
def wide_heads(tiny_llama: Path, tmp_path: Path) -> Path:
    """A random llama whose heads divide into groups of 32 numbers."""
    folder = Path(shutil.copytree(tiny_llama, tmp_path / "wide"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"hidden_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    mx.random.seed(5)
    made = Model(ModelArgs.from_dict(config))
    weights = tree_flatten(
        made.parameters()
    )  # as they are, every text would be one character again and again
    loud = {name: array * 6 if array.ndim == 2 else array for name, array in weights}
    mx.save_safetensors(str(folder / "model.safetensors"), loud)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def ask(mesh: Any, text: str, num_tokens: int = NUM_TOKENS, **fields: Any) -> tuple[str, int]:
    """The answer, and how many tokens of its prompt were kept."""
    body = {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}],
        "max_tokens": num_tokens,
        "temperature": 0,
        **fields,
    }
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    told = answer.json()
    return told["choices"][0]["message"]["content"], told["usage"]["prompt_tokens_details"]["cached_tokens"]


def get(mesh: Any, path: str) -> Any:
    return httpx.get(f"{mesh.url}{path}", timeout=30).json()


@pytest.mark.long
@pytest.mark.two_rank
@pytest.mark.timeout(900)
@pytest.mark.parametrize("split", ["pipeline", "tensor"])
def test_a_killed_follower_costs_no_token_of_rows_that_began_with_a_quantised_prefix(
    start_mesh: Any, wide_heads: Path, split: str
) -> None:
    command = ("up", "--sim", "2", "--sharding", split, "--kv-bits", "4", "--kv-group-size", "32")
    with start_mesh(*command, "--model", str(wide_heads)) as mesh:
        assert get(mesh, "/v1/capabilities")["kv_cache"] == {
            "bits": 4,
            "group_size": 32,
            "quantized_from_token": 0,
        }
        texts = [f"Is lamp {i} lit?" for i in range(3)]
        alone = [ask(mesh, text, skip_prefix_cache=True)[0] for text in texts]
        assert len(set(alone)) == 3
        assert ask(mesh, "Hello.", 4)[1] == 0
        with ThreadPoolExecutor(3) as pool:
            asked = [pool.submit(ask, mesh, text) for text in texts]
            end = time.monotonic() + WITHIN_S
            while get(mesh, "/v1/cluster/status")["num_running"] < 3:
                assert time.monotonic() < end
                time.sleep(0.05)  # the poll interval of a wait that has a deadline
            follower = get(mesh, "/v1/cluster/nodes")["ranks"][1]
            os.kill(follower["engine_pid"], signal.SIGKILL)
            answers = [answer.result() for answer in asked]
        assert [text for text, _ in answers] == alone
        assert all(kept > 500 for _, kept in answers)
        assert get(mesh, "/v1/cluster/status")["epoch"] == 2
        again, kept = ask(mesh, texts[0])
        assert again == alone[0] and kept > 500, "what the second epoch computed is kept, too"
        assert mesh.stop() == 0
