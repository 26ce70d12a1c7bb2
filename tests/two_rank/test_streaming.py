"""A pipeline computes several prefill chunks at once, one in each stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Tokens
from mlx_mesh.mesh.types import Sharding

pytestmark = pytest.mark.two_rank

STAGE_S = 0.25
SLOW_LAST_STAGE = f"""
import time
import mlx_mesh.node.engine.loop as loop
step = loop.Generation.step
def slow_step(self):
    produced = step(self)
    time.sleep({STAGE_S})  # with the chunk here, as its computation would be
    return produced
loop.Generation.step = slow_step
"""
SLOW_FIRST_STAGE = f"""
import time
import mlx_mesh.node.engine.report as report
report.Reporter.entered_layer = lambda self, layer: time.sleep({STAGE_S} if layer == 0 else 0)  # then sends
"""
NUM_CHUNKS = 12


def test_two_stages_work_on_different_chunks_of_a_prompt(bench: Any, tiny_llama: Path) -> None:
    with bench.mesh(2, codes=[SLOW_LAST_STAGE, SLOW_FIRST_STAGE]) as mesh:
        mesh.connect()
        mesh.load(tiny_llama, bench.split(Sharding.PIPELINE, 6, [3, 3]), prefill_step_size=16)
        mesh.submit(bench.greedy("a", [5, 6, 7, 8] * 4 * NUM_CHUNKS + [9], 1))
        mesh.answer("a")
        (first,) = [
            chunk
            for report in mesh.leader.reports
            if isinstance(report, Tokens)
            for chunk in report.chunks
            if chunk.id == "a"
        ]
        # The chunks, then the last prompt token and the step that the generator computes ahead.
        num_forwards = NUM_CHUNKS + 2
        one_after_the_other_s = num_forwards * 2 * STAGE_S
        assert first.prefill_s > num_forwards * STAGE_S
        assert first.prefill_s < 0.8 * one_after_the_other_s
