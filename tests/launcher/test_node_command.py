"""`node drain` and `node add` against a scripted leader."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_mesh.launcher import node_command
from mlx_mesh.launcher.api import Api, ApiError
from mlx_mesh.launcher.model_command import change_model
from mlx_mesh.launcher.node_command import change_node
from mlx_mesh.mesh.errors import MeshError

READY = {"ready": True, "epoch": 2, "world_size": 1, "sharding": "none", "lineup": ""}
BUSY = ApiError("it answered 503: the coordinator does not answer.", 503)
SILENT = ApiError("nothing answers.", 0)


class ScriptedApi(Api):
    """Takes the change; each question for the status gets the next of `answers`, the last one for ever."""

    def __init__(self, *answers: Any) -> None:
        super().__init__("http://127.0.0.1:1")
        self.answers = list(answers)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return {"message": "The mesh goes on without mac2.", "changing": True, "epoch": 1}

    def get(self, path: str) -> Any:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, ApiError):
            raise answer
        return answer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_command, "POLL_S", 0.0)


def changed(*answers: Any) -> str:
    said: list[str] = []
    change_node(ScriptedApi(*answers), "drain", "mac2", said.append)
    return said[-1]


def test_a_leader_that_cannot_answer_while_the_mesh_changes_is_asked_again() -> None:
    words = changed({**READY, "ready": False}, BUSY, SILENT, {**READY, "epoch": 1}, READY)
    assert words == "Ready again: 1 rank, sharding none, epoch 2."


def changed_model(action: str, *answers: Any) -> list[str]:
    said: list[str] = []
    change_model(ScriptedApi(*answers), action, "", said.append)
    return said


def test_a_model_is_unloaded_when_the_mesh_says_so_and_loaded_when_the_next_epoch_serves() -> None:
    away = {**READY, "ready": False, "code": "model_unloaded"}
    assert changed_model("unload", READY, BUSY, away)[-1] == "Unloaded."
    again = {**READY, "model": "m", "switch": "", "code": ""}
    assert changed_model("load", away, {**again, "epoch": 1}, SILENT, again)[-1] == "m serves."


def test_an_answer_that_stays_wrong_ends_the_wait_at_once() -> None:
    with pytest.raises(ApiError, match="401"):
        changed(ApiError("it answered 401: no key.", 401))


@pytest.mark.parametrize(
    ("answer", "words"),
    [(SILENT, r": nothing answers\.$"), ({**READY, "ready": False, "reason": "loading"}, r": loading\.$")],
)
def test_what_was_last_seen_is_told_when_the_mesh_is_not_ready_in_time(
    monkeypatch: pytest.MonkeyPatch, answer: Any, words: str
) -> None:
    monkeypatch.setattr(node_command, "CHANGE_S", 0.0)
    with pytest.raises(MeshError, match=f"not ready again after 0 s{words}"):
        changed(answer)
