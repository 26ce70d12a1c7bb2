"""A conversation over HTTP: what is kept of it, over two ranks, and what is left of it after a restart."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest


def system(num_rules: int) -> str:
    return "You are the keeper of a lighthouse and answer in one short sentence. " + " ".join(
        f"Rule {i}: lamp {i * 7} is lit at hour {i % 24}." for i in range(num_rules)
    )


WITHIN_S = 30.0


def ask(mesh: Any, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int, int, httpx.Headers]:
    """Answer, tokens of the prompt, those that were kept, headers."""
    body = {"messages": messages, "max_tokens": 8, "temperature": 0, "conversation_id": "light", **fields}
    answer = httpx.post(f"{mesh.url}/v1/chat/completions", json=body, timeout=240)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    kept = usage["prompt_tokens_details"]["cached_tokens"]
    return answer.json()["choices"][0]["message"]["content"], usage["prompt_tokens"], kept, answer.headers


def wait_for_entries(mesh: Any, is_there: bool) -> list[Any]:
    """The ranks' rows of /v1/cache/stats, once heartbeats say so of all."""
    end = time.monotonic() + WITHIN_S
    while True:
        ranks = httpx.get(f"{mesh.url}/v1/cache/stats", timeout=10).json()["ranks"]
        if all(bool(rank["entries"]) == is_there for rank in ranks):
            return list(ranks)
        assert time.monotonic() < end, ranks
        time.sleep(0.1)  # the poll interval of a wait that has a deadline


@pytest.mark.two_rank
@pytest.mark.timeout(300)
def test_turns_go_on_from_what_was_kept_and_a_restart_from_the_files(
    start_mesh: Any, tiny_llama: Path, tmp_path: Path
) -> None:
    talk_and_restart(start_mesh, tiny_llama, tmp_path, "pipeline", num_rules=45)


@pytest.mark.long
@pytest.mark.real_model
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("split", ["pipeline", "tensor"])
def test_so_do_those_of_a_real_model_with_a_system_prompt_of_two_thousand_tokens(
    start_mesh: Any, smollm2: Path, tmp_path: Path, split: str
) -> None:
    talk_and_restart(start_mesh, smollm2, tmp_path, split, num_rules=120)


def talk_and_restart(start_mesh: Any, model: Path, tmp_path: Path, split: str, *, num_rules: int) -> None:
    files = ("--prompt-cache-dir", str(tmp_path / "kept"), "--system-cache-max-tokens", "0")
    command = ("up", "--sim", "2", "--sharding", split, "--model", str(model), *files)
    talk = [{"role": "system", "content": system(num_rules)}, {"role": "user", "content": "Is lamp 7 lit?"}]
    with start_mesh(*command) as mesh:
        said, num_first, kept, headers = ask(mesh, talk)
        assert (kept, headers["x-conv-kv"]) == (0, "fresh")
        assert num_first > 1500
        talk += [{"role": "assistant", "content": said}, {"role": "user", "content": "And lamp 14?"}]
        answer, num_second, kept, headers = ask(mesh, talk)
        assert num_first <= kept < num_second
        assert (headers["x-conv-kv"], int(headers["x-conv-cached-tokens"])) == ("hit", kept)
        assert int(headers["x-conv-processing-tokens"]) == num_second - kept
        assert ask(mesh, talk, skip_prefix_cache=True)[:3] == (answer, num_second, 0)
        assert len({rank["entries"] for rank in wait_for_entries(mesh, True)}) == 1
        assert httpx.post(f"{mesh.url}/v1/cache/reset", timeout=10).status_code == 202
        assert {rank["bytes"] for rank in wait_for_entries(mesh, False)} == {0}
        assert ask(mesh, talk)[:3] == (answer, num_second, 0)
        assert mesh.stop() == 0
    assert len(list((tmp_path / "kept").glob("*.safetensors"))) == 2
    with start_mesh(*command) as mesh:
        wait_for_entries(mesh, True)
        again, _, kept, _ = ask(mesh, talk)
        assert again == answer
        assert num_first - 40 < kept < num_first  # the system message
        assert mesh.stop() == 0
    if split == "pipeline" and num_rules < 100:
        return  # the rest is shown with the real model
    one, _ = sorted((tmp_path / "kept").glob("*.safetensors"))
    one.write_bytes(one.read_bytes()[:-9])
    with start_mesh(*command) as mesh:  # one rank has it no more, so none uses it
        assert ask(mesh, talk)[:3] == (answer, num_second, 0)
        assert "cannot be used" in mesh.output.read_text()
        assert mesh.stop() == 0
