"""Architectures of different kinds over the real ring, two and three ranks, as pipelines and by tensor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.two_rank

LIMIT_S = 240.0
PROGRAM = Path(__file__).parent / "ring_rank.py"
DROPPED = ("MLX_", "RANK", "WORLD_SIZE")


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_dozen_kinds_of_models_compute_over_a_ring_what_one_process_computes(
    world_size: int, bench: Any
) -> None:
    ports = ",".join(map(str, bench.free_ports(world_size)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(DROPPED)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-u", str(PROGRAM), str(rank), ports],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(world_size)
    ]
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "ready\n", rank.communicate()[1][-3000:]
        for rank in ranks:
            assert rank.stdin is not None
            rank.stdin.write("go\n")
            rank.stdin.flush()
        output, errors = ranks[0].communicate(timeout=LIMIT_S)
        statuses = [ranks[0].returncode, *(rank.wait(timeout=30) for rank in ranks[1:])]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert statuses == [0] * world_size, errors[-3000:]
    rows = [json.loads(line) for line in output.splitlines()]
    assert len(rows) == 2 * 13
    wrong = [row for row in rows if row["gap"] > (1e-4 if row["plan"] == "tensor" else 0.0)]
    assert not wrong
