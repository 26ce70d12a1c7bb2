"""The state folder: who runs a mesh, and that only one does."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from mlx_mesh.launcher.programs.processes import started
from mlx_mesh.launcher.state import HostAddress, StateFolder, UpState, all_states, state_root
from mlx_mesh.mesh.errors import AlreadyRunningError, NotRunningError, SettingsError


def a_state(**changes: object) -> UpState:
    state = UpState(
        name="m",
        run_id="r",
        pid=os.getpid(),
        started=started(os.getpid()),
        hostfile="",
        model="x",
        hosts=(HostAddress(name="local", ssh="", user="", python="/p"),),
        url="http://127.0.0.1:18000",
    )
    return msgspec.structs.replace(state, **changes)


def test_state_is_kept_below_xdg_state_home_or_the_home_folder() -> None:
    assert state_root({"XDG_STATE_HOME": "/s"}) == Path("/s/mlx-mesh")
    assert state_root({"XDG_STATE_HOME": "relative"}) == Path.home() / ".local/state/mlx-mesh"


def test_what_is_written_is_read_back_and_only_for_this_user(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "m")
    folder.make()
    folder.write(a_state())
    assert folder.read() == a_state()
    assert (folder.path / "up.json").stat().st_mode & 0o777 == 0o600
    assert [state.name for _, state in all_states(tmp_path)] == ["m"]
    (tmp_path / "measurements.json").write_text("{}")  # of `bench --probe`, beside the meshes' folders
    assert [state.name for _, state in all_states(tmp_path)] == ["m"]
    folder.clear()
    assert folder.read() is None and list(folder.path.iterdir()) == []


def test_a_launcher_lives_only_with_the_same_start_time() -> None:
    assert a_state().is_alive
    assert not a_state(started="another").is_alive
    assert not a_state(started="").is_alive


def test_the_state_of_a_dead_launcher_is_not_a_running_mesh(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "m")
    folder.make()
    folder.write(a_state(started="another"))
    with pytest.raises(NotRunningError, match=r"No mesh named m .* was killed; `mlx-mesh down m`"):
        folder.read_running()


def test_how_the_last_detached_launcher_ended_is_told_with_its_log(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "m")
    folder.make()
    assert folder.last_words() == ""
    folder.launcher_log.write_text(
        "mlx-mesh: an older fault.\nloading\nmlx-mesh: rank 1 died:\n  \x1b[1mwhy.\n"
    )
    assert folder.last_words() == f" The last one ended: rank 1 died: why (see {folder.launcher_log})."
    folder.launcher_log.write_text("Mesh m is down.\n")
    assert folder.last_words() == f" What the last one said is in {folder.launcher_log}."


def test_a_launcher_that_wrote_nothing_takes_its_folder_back(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "m")
    for _ in range(2):
        folder.claim()
        folder.release()
        assert not folder.path.exists()
    folder.claim()
    folder.launcher_log.write_text("words")
    folder.release()
    assert folder.launcher_log.exists()


def test_a_folder_that_was_taken_back_while_somebody_waited_for_it_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = StateFolder(tmp_path, "m"), StateFolder(tmp_path, "m")
    first.claim()
    lock = fcntl.flock

    def after_the_first_is_gone(descriptor: int, how: int) -> None:
        first.release()
        lock(descriptor, how)

    monkeypatch.setattr(fcntl, "flock", after_the_first_is_gone)
    second.claim()
    monkeypatch.undo()
    with pytest.raises(AlreadyRunningError):
        StateFolder(tmp_path, "m").claim()
    second.release()


def test_a_second_launcher_of_one_name_is_refused_with_the_url(tmp_path: Path) -> None:
    first, second = StateFolder(tmp_path, "m"), StateFolder(tmp_path, "m")
    first.claim()
    first.write(a_state())
    with pytest.raises(AlreadyRunningError, match=r"runs already at http://127\.0\.0\.1:18000"):
        second.claim()
    first.release()
    second.claim()
    second.release()


def test_the_claim_ends_with_its_process_even_by_kill(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from mlx_mesh.launcher.state import StateFolder;"
        "StateFolder(pathlib.Path(sys.argv[1]), 'm').claim(); print(flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-I", "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdout.readline()
    folder = StateFolder(tmp_path, "m")
    with pytest.raises(AlreadyRunningError, match="still starting"):
        folder.claim()
    child.kill()
    child.wait()
    child.stdin.close()
    child.stdout.close()
    folder.claim()
    folder.release()


def test_a_state_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "m")
    folder.make()
    (folder.path / "up.json").write_text("{")
    with pytest.raises(SettingsError, match="cannot be read"):
        folder.read()
