"""Answers under a schema: valid and the same at every world size, beside neighbours without one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

SPLITS = {
    "world size 1": ("serve",),
    "pipeline 2": ("up", "--sim", "2", "--sharding", "pipeline"),
    "tensor 2": ("up", "--sim", "2", "--sharding", "tensor"),
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[a-z]{1,6}$"},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
        "kind": {"enum": ["cat", "dog"]},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["name", "size", "kind", "tags"],
    "additionalProperties": False,
}


def check(text: str) -> None:
    value = json.loads(text)
    assert list(value) == ["name", "size", "kind", "tags"]
    assert value["name"].isalpha() and 1 <= len(value["name"]) <= 6 and 0 <= value["size"] <= 99
    assert value["kind"] in ("cat", "dog") and len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])


def ask(mesh: Any, at: int) -> tuple[str, str]:
    """The answer to question `at`, every fourth without a form, and how it ended."""
    form: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA}}
    answer = mesh.client().chat.completions.create(
        model="local",
        messages=[{"role": "user", "content": f"Thing number {at}?"}],
        temperature=1.0 if at % 2 else 0.0,
        seed=at,
        max_tokens=400 if at % 4 else 20,
        response_format=form if at % 4 else {"type": "text"},
    )
    return answer.choices[0].message.content or "", answer.choices[0].finish_reason


def compare(start_mesh: Any, model: Path, splits: Sequence[str], num_questions: int) -> None:
    answers: dict[str, list[tuple[str, str]]] = {}
    for split in splits:
        arguments = SPLITS[split]
        with start_mesh(*arguments, "--model", str(model)) as mesh, ThreadPoolExecutor(8) as pool:
            answers[split] = list(pool.map(lambda at, mesh=mesh: ask(mesh, at), range(num_questions)))
    for split, given in answers.items():
        assert given == answers["world size 1"], split
        for at, (text, end) in enumerate(given):
            if at % 4:
                assert end == "stop", (split, at, text)
                check(text)


@pytest.mark.two_rank
def test_answers_match_their_schema_alone_and_on_two_ranks(start_mesh: Any, tiny_llama: Path) -> None:
    compare(start_mesh, tiny_llama, ("world size 1", "pipeline 2"), 16)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_two_hundred_answers_match_their_schema_at_every_world_size(
    start_mesh: Any, tiny_llama: Path
) -> None:
    compare(start_mesh, tiny_llama, tuple(SPLITS), 268)  # every fourth is a neighbour without one
