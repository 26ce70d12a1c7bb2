"""The child that reads a model's sizes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.node.inspection import inspect_model


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (
            "import os; os.kill(os.getpid(), 9)",
            "was killed by SIGKILL, perhaps because this host is short of memory, without a word.",
        ),
        ("import sys; sys.exit('no such type')", "ended with status 1:\n  no such type"),
    ],
)
async def test_how_it_ended_is_told_also_when_it_said_nothing(tmp_path: Path, code: str, words: str) -> None:
    with pytest.raises(PlacementError) as caught:
        await inspect_model((sys.executable, "-c", code), tmp_path, 30.0)
    assert words in str(caught.value)
