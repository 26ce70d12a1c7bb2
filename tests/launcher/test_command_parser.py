"""Words behind flags, flags that are none, and what is imported for a command."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from mlx_mesh.launcher.cli import build_parser
from mlx_mesh.launcher.commands.table import COMMANDS


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("plan M --context 2k hosts.yaml", "hostfile", "hosts.yaml"),
        ("plan M hosts.yaml --context 2k", "hostfile", "hosts.yaml"),
        ("sync M --full hosts.yaml", "hostfile", "hosts.yaml"),
        ("net plan --undo hosts.yaml", "hostfile", "hosts.yaml"),
        ("up --port 0 hosts.yaml --detach", "hostfile", "hosts.yaml"),
        ("logs --rank 1 sim", "mesh", "sim"),
        ("init mac1 --install mac2", "hosts", ["mac1", "mac2"]),
    ],
)
def test_a_word_may_stand_behind_flags(words: str, name: str, value: Any) -> None:
    found = vars(build_parser().parse_args(words.split()))
    assert value in found.values(), (name, found)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("serve --model M --shardng pipeline", "--shardng"),
        ("up hosts.yaml --detatch", "--detatch (did you mean --detach?)"),
        ("up hosts.yaml more.yaml", "unrecognized arguments: more.yaml"),
        ("plan M hosts.yaml third", "unrecognized arguments: third"),
    ],
)
def test_what_is_left_over_is_told_with_the_commands_usage(
    words: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args(words.split())
    assert caught.value.code == 2
    told = capsys.readouterr().err
    assert complaint in told and f"usage: mlx-mesh {words.split()[0]}" in told


def test_every_command_is_called_by_its_name() -> None:
    for command in COMMANDS:
        module = command.load()
        assert callable(module.add_flags) and callable(module.run), command.name


@pytest.mark.parametrize(
    ("words", "forbidden"),
    [
        ("--help", ["paramiko", "zeroconf", "pydantic", "rich", "msgspec", "yaml"]),
        ("serve --help", ["paramiko", "zeroconf", "asyncio", "spake2"]),
        ("up --sim 2 --model /nowhere --dry-run", ["paramiko", "zeroconf", "asyncio", "spake2"]),
    ],
)
def test_a_command_does_not_wait_for_libraries_of_others(words: str, forbidden: list[str]) -> None:
    code = (
        "import contextlib, sys\n"
        "from mlx_mesh.launcher.cli import main\n"
        f"with contextlib.suppress(SystemExit): main({words.split()!r})\n"
        f"print('loaded:', *(name for name in {forbidden!r} if name in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1].strip() == "loaded:", done.stdout
