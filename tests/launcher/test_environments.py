"""Environments on hosts: what is found, what is right as it is, what is refused, and the carried wheel."""

from __future__ import annotations

import csv
import io
import os
import sys
import zipfile
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.launcher import environments
from mlx_mesh.launcher.environments import MINOR, Wanted, find_environment, folder_of, install, look
from mlx_mesh.launcher.faults import HostFault
from mlx_mesh.launcher.own_wheel import Wheel, pack_wheel
from mlx_mesh.launcher.remote import LocalHost, stream_program

WANTED = Wanted(wheel=Wheel("mlx_mesh-1-py3-none-any.whl", b"x"), mlx="1", mlx_lm="2", mlx_mesh="3")
SEEN: dict[str, Any] = {
    "python": [int(part) for part in MINOR.split(".")] + [4],
    "system": "Darwin",
    "machine": "arm64",
    "is_translated": False,
    "versions": {"mlx": "1", "mlx-lm": "2", "mlx-mesh": "3"},
    "wheel": "",
}


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LocalHost:
    """This machine with a home of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    return LocalHost("mac2", {"HOME": str(tmp_path), "PATH": os.environ["PATH"]})


def add_python(folder: Path, name: str, answer: str = "") -> Path:
    """An interpreter at that path: this one, or one that only prints."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if answer:
        path.write_text(f"#!/bin/sh\ncat > /dev/null\n{answer}\n")
        path.chmod(0o755)
    else:
        path.symlink_to(Path(sys.executable).resolve())
    return path


# ---------------------------------------------------------------- the wheel


def test_the_wheel_has_every_file_of_the_package_and_is_always_the_same() -> None:
    wheel = pack_wheel()
    assert wheel == pack_wheel() and wheel.name.endswith("-py3-none-any.whl")
    archive = zipfile.ZipFile(io.BytesIO(wheel.data))
    names = archive.namelist()
    assert {info.date_time[0] for info in archive.infolist()} == {1980}  # no time of making is in it
    for needed in ("__init__.py", "py.typed", "launcher/cli.py", "node/engine/loop.py", "proxy/app.py"):
        assert f"mlx_mesh/{needed}" in names
    assert not [name for name in names if "__pycache__" in name or name.endswith(".pyc")]
    (about,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    record = archive.read(f"{about}/RECORD").decode()
    rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(record))}
    assert set(rows) == set(names)
    data = archive.read("mlx_mesh/launcher/cli.py")
    assert rows["mlx_mesh/launcher/cli.py"][1] == str(len(data))
    assert "mlx-mesh = mlx_mesh.launcher.__main__:main" in archive.read(f"{about}/entry_points.txt").decode()
    assert b"Requires-Dist: mlx" in archive.read(f"{about}/METADATA")
    assert wheel.digest == sha256(wheel.data).hexdigest()


# ---------------------------------------------------------------- what is right as it is


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ({}, True),
        ({"wheel": WANTED.wheel.digest}, True),
        ({"wheel": "another"}, False),  # of the same version, from another state of the code
        ({"python": [3, 1, 0]}, False),
        ({"versions": {**SEEN["versions"], "mlx": "9"}}, False),
        ({"versions": {**SEEN["versions"], "mlx-lm": ""}}, False),
        ({"versions": {**SEEN["versions"], "mlx-mesh": "2"}}, False),
    ],
)
def test_an_environment_is_right_when_all_versions_and_the_code_are(
    change: dict[str, Any], is_right: bool
) -> None:
    assert WANTED.is_met_by({**SEEN, **change}) == is_right


def test_a_right_environment_is_left_alone(
    host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_python(tmp_path, ".venvs/mlx-mesh/bin/python", "exit 1")
    monkeypatch.setattr(environments, "look", lambda host, python: SEEN)
    said: list[str] = []
    install(host, "~/.venvs/mlx-mesh", WANTED, said.append)
    assert said == ["mac2: ~/.venvs/mlx-mesh has the same versions already; left as it is"]


@pytest.mark.parametrize("change", [{"is_translated": True}, {"machine": "x86_64"}])
def test_a_python_under_rosetta_is_refused(
    change: dict[str, Any], host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_python(tmp_path, ".venvs/mlx-mesh/bin/python", "exit 1")
    monkeypatch.setattr(environments, "look", lambda host, python: {**SEEN, **change})
    with pytest.raises(HostFault, match=r"is an Intel program .*; install a native \(arm64\) Python"):
        install(host, "~/.venvs/mlx-mesh", WANTED, print)


def test_an_interpreter_tells_what_it_is(host: LocalHost) -> None:
    seen = look(host, sys.executable)
    assert seen["python"] == list(sys.version_info[:3]) and seen["versions"]["mlx-mesh"]
    with pytest.raises(HostFault, match="does not run"):
        look(host, "/bin/true")


# ---------------------------------------------------------------- where interpreters are


def test_the_usual_place_comes_before_this_machines_path_and_none_is_told(
    host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_environment(host, "/given/python") == "/given/python"
    assert find_environment(host, "") == sys.executable
    add_python(tmp_path, ".venvs/mlx-mesh/bin/python")
    assert find_environment(host, "") == "~/.venvs/mlx-mesh/bin/python"
    (tmp_path / ".venvs/mlx-mesh/bin/python").unlink()
    monkeypatch.setattr(sys, "executable", "/nowhere/it's $HOME/python")
    with pytest.raises(HostFault, match="mlx-mesh init --install"):
        find_environment(host, "")


def test_a_python_is_found_where_installers_put_it_and_another_minor_is_named(
    host: LocalHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        environments,
        "_base_places",
        lambda minor: [f"~/.local/bin/python{minor}", f"~/.pyenv/versions/{minor}*/bin/python{minor}"],
    )
    with pytest.raises(HostFault, match=rf"there is no Python {MINOR}, which this machine has; install it"):
        install(host, "~/new", WANTED, print)
    found = add_python(tmp_path, f".pyenv/versions/{MINOR}.4/bin/python{MINOR}")
    assert environments._find_base(host, MINOR) == f"~/{found.relative_to(tmp_path)}"
    with pytest.raises(HostFault, match=r"there is no Python 9\.9.*, only ~/\.pyenv"):
        monkeypatch.setattr(
            environments, "_base_places", lambda minor: [f"~/.pyenv/versions/*/bin/python{MINOR}"]
        )
        environments._find_base(host, "9.9")


@pytest.mark.parametrize(
    ("python", "folder"),
    [("~/a/bin/python", "~/a"), (f"/x/bin/python{MINOR}", "/x"), ("/usr/bin/thing", ""), ("python", "")],
)
def test_the_folder_of_an_environments_interpreter(python: str, folder: str) -> None:
    assert folder_of(python) == folder


# ---------------------------------------------------------------- an install that does not work


def test_a_folder_that_is_something_else_is_not_touched(host: LocalHost, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    request = {"do": "install", "folder": "~/mine", "wheel_name": "x.whl", "wheel": "", "pins": []}
    (answer,) = [a for a in stream_program(host, sys.executable, "environment", request) if a is not None]
    assert answer["step"] == "environment" and "is no Python environment" in answer["failed"]
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ('echo "$MARK" > /dev/null; kill -9 $$', "the install was cut off .*run the same command again"),
        ("exit 3", "the install was cut off"),
    ],
)
def test_an_install_that_is_cut_off_says_that_it_goes_on(
    python: str, said: str, host: LocalHost, tmp_path: Path
) -> None:
    base = add_python(tmp_path, "python", python)
    with pytest.raises(HostFault, match=said):
        environments._install(host, str(base), {"do": "install"}, print)


def test_what_pip_and_venv_say_becomes_a_fault_with_its_fix() -> None:
    fault = environments._failed("mac2", "/py", {"step": "packages", "failed": "no matching distribution"})
    assert fault.step == "import" and "package index" in fault.fix
    fault = environments._failed(
        "mac2", "/py", {"step": "environment", "failed": "ensurepip is not available"}
    )
    assert fault.step == "interpreter" and f"python{MINOR}-venv" in fault.fix
