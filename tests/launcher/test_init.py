"""`mlx-mesh init`: asking hosts, writing the file, what is refused; with a real SSH server on loopback."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.launcher.cli import main
from mlx_mesh.launcher.config import read_hostfile
from mlx_mesh.mesh.errors import ExitCode

StartSshd = Callable[..., Any]


@pytest.fixture
def box(start_sshd: StartSshd) -> Any:
    sshd = start_sshd("a")
    sshd.add_host("box")
    return sshd


def init(box: Any, *words: str) -> int:
    return main(["init", *words, "--ssh-config", str(box.config), "--python", sys.executable])


def test_a_host_that_answers_is_written_and_the_file_is_kept_from_then_on(
    box: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "hosts.yaml"
    words = ["box", "nowhere.invalid", "-o", str(output), "--model", "org/name"]
    assert init(box, *words, "--partial") == ExitCode.OK
    told = capsys.readouterr().out
    assert "left out: nowhere: resolve: " in told and f"wrote {output}" in told
    written = read_hostfile(str(output))
    assert [(host.ssh, host.python) for host in written.hosts] == [
        ("", sys.executable),
        ("box", sys.executable),
    ]
    assert written.model == "org/name"
    before = output.read_text()
    assert init(box, *words) == ExitCode.USAGE
    assert "--force" in capsys.readouterr().err and output.read_text() == before


def test_one_host_that_does_not_answer_is_told_at_its_step_and_nothing_is_written(
    box: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "hosts.yaml"
    box.known_hosts.write_text("")
    assert init(box, "box", "--no-local", "-o", str(output)) == ExitCode.PREFLIGHT
    told = capsys.readouterr().err
    assert "box: host key: UNKNOWN" in told and "mlx-mesh trust box" in told
    assert "nothing was written" in told and not output.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a", "b@a", "a"], "a is named twice"),
        (["ssh://a"], "is a URL"),
        (["a", "--name", "-x"], "mesh name"),
    ],
)
def test_words_that_cannot_be_meant_are_refused(
    words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--name" in words:
        words = ["a", "--name=-x"]
    assert main(["init", *words, "-o", str(tmp_path / "new.yaml")]) == ExitCode.USAGE
    assert said in capsys.readouterr().err


def test_an_install_into_no_environments_path_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "a", "-o", "-", "--install", "--python", "/usr/bin/thing"]) == ExitCode.USAGE
    assert "/bin/python" in capsys.readouterr().err
