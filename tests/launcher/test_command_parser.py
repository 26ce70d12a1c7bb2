"""Words behind flags, and flags that are none."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_mesh.launcher.cli import build_parser


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
