"""Architectures of different kinds over the real ring, two and three ranks, as pipelines and by tensor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.two_rank

LIMIT_S = 240.0
PROGRAM = Path(__file__).parent / "ring_rank.py"


@pytest.mark.parametrize("world_size", [2, pytest.param(3, marks=pytest.mark.long)])
def test_a_dozen_kinds_of_models_compute_over_a_ring_what_one_process_computes(
    world_size: int, bench: Any
) -> None:
    rows = bench.run_ring(PROGRAM, world_size, limit_s=LIMIT_S)
    assert len(rows) == 2 * 13
    wrong = [row for row in rows if row["gap"] > (1e-4 if row["plan"] == "tensor" else 0.0)]
    assert not wrong
