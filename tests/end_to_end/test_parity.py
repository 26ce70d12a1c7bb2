"""Requests over the whole HTTP surface have the same answers at world size 1, by tensor and in a pipeline."""

from __future__ import annotations

import importlib.util
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

SPLITS = {
    "world size 1": ("serve",),
    "tensor 2": ("up", "--sim", "2", "--sharding", "tensor"),
    "pipeline 2": ("up", "--sim", "2", "--sharding", "pipeline"),
}
AT_ONCE = 16


@pytest.fixture(scope="session")
def parity() -> ModuleType:
    path = Path(__file__).parent / "parity.py"
    spec = importlib.util.spec_from_file_location("end_to_end_parity", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["end_to_end_parity"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def run(parity: ModuleType, url: str, cases: list[Any]) -> dict[str, Any]:
    """All answers by name, one after the other; and those that generate once more, all at the same time."""
    # An idle connection is given up before the server does: it would end under the next request.
    limits = httpx.Limits(max_connections=AT_ONCE + 2, keepalive_expiry=1)
    with httpx.Client(base_url=url, timeout=120, limits=limits) as client:
        answers = {case.name: parity.ask(client, case) for case in cases}
        unknown = parity.paths_without_a_case(client.get("/openapi.json").json())
        assert not unknown, f"parity.py needs a case for {unknown}"
        together = [case for case in cases if case.generates]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            again = list(pool.map(lambda case: parity.ask(client, case), together))
        for case, answer in zip(together, again, strict=True):
            alone = parity.without_cache(answers[case.name])
            changed = parity.differences(alone, parity.without_cache(answer))
            assert not changed, (case.name, "beside others", changed)
        return answers | {script.__name__: script(client) for script in parity.SCRIPTS}


@pytest.mark.two_rank
@pytest.mark.timeout(900)
@pytest.mark.parametrize("is_quick", [True, pytest.param(False, marks=pytest.mark.long)])
def test_what_differs_by_world_size_is_what_capabilities_say(
    parity: ModuleType, start_mesh: Any, tiny_llama: Path, tmp_path: Path, is_quick: bool
) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(parity.TEMPLATE)
    cases = [case for case in parity.CASES if case.is_quick or not is_quick]
    assert len({case.name for case in cases}) == len(cases)
    answers: dict[str, dict[str, Any]] = {}
    for split, arguments in SPLITS.items():
        with start_mesh(*arguments, "--model", str(tiny_llama), "--chat-template", str(template)) as mesh:
            answers[split] = run(parity, mesh.url, cases)
            assert mesh.stop() == 0
    alone = answers["world size 1"]
    statuses = {case.name: alone[case.name]["status"] for case in cases}
    wrong = {name: code for name, code in statuses.items() if (code >= 400) != name.startswith("refused")}
    assert wrong == {"GET /v1/models/none": 404} and max(statuses.values()) < 500, (wrong, alone)
    found = {
        f"{name} at {split}": changed
        for split, given in answers.items()
        for name in given
        if (changed := parity.differences(alone[name], given[name]))
    }
    said = alone["GET /v1/capabilities"]["answer"]["differences_by_world_size"]
    assert list(found) == said, found
