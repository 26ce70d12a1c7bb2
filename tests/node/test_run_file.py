"""Starting agents of one host do not get in each other's way, and nobody waits for ever."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec
import pytest

from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.node import run_file as run_file_module
from mlx_mesh.node.processes import identify
from mlx_mesh.node.run_file import RunFile, RunRecord, leftovers_of


def test_the_launcher_of_a_mesh_and_its_agent_on_one_host_do_not_wait_for_each_other(tmp_path: Path) -> None:
    folder = tmp_path / "mesh"
    folder.mkdir()
    launchers = os.open(folder, os.O_RDONLY)  # as launcher/state.py does for as long as it runs
    try:
        fcntl.flock(launchers, fcntl.LOCK_EX)
        run_file, _ = RunFile.claim(folder, "mesh", "here", "run")
        run_file.release()
    finally:
        os.close(launchers)


def test_an_agent_does_not_wait_for_ever_for_another_that_is_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_file_module, "CLAIM_S", 0.1)
    other = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(MeshError, match="locked by another agent"):
            RunFile.claim(tmp_path / "mesh", "mesh", "here", "run")
    finally:
        os.close(other)


def test_all_that_a_dead_agent_left_is_told(tmp_path: Path) -> None:
    mesh = tmp_path / "mesh"
    run_file, _ = RunFile.claim(mesh, "mesh", "here", "run")
    me = identify(os.getpid())
    assert me is not None
    run_file.update(engines={1: me}, proxy=me, embedder=me)
    assert list(leftovers_of(tmp_path)) == []  # its agent lives
    path = next(mesh.glob("agent-*.json"))
    record = msgspec.json.decode(path.read_bytes(), type=RunRecord)
    dead = msgspec.structs.replace(record.agent, pid=2**22 + 1)
    path.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, agent=dead)))
    told = list(leftovers_of(tmp_path))
    run_file.release()
    assert [words.partition(" of mesh")[0] for words in told] == [
        "the engine of rank 1",
        "the proxy",
        "the embedder",
    ]
