"""The full table of architectures meets what docs/models.md promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_every_architecture_is_divided_as_the_table_says(tmp_path: Path) -> None:
    rows = tmp_path / "rows.json"
    out = tmp_path / "models.md"
    out.write_text("<!-- table: scripts/coverage_table -->\n<!-- end of table -->\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "scripts/coverage_table.py", "--json", str(rows), "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=7000,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    counts = {
        " ".join(words): int(number)
        for number, *words in (
            line.split() for line in done.stderr.splitlines() if line[:5].strip().isdigit()
        )
    }
    assert counts["run whole on a CPU"] >= 120
    assert counts["pipeline of 2 bit-identical"] >= 118 and counts["pipeline of 3 bit-identical"] >= 118
    assert counts["tensor right at 2, 3 and 2:1"] >= 119
    assert counts["same tokens in a batch, by all five plans"] >= 116  # mlx-lm cannot batch three even whole
    assert counts["fully split over 2"] >= 105 and counts["fully split over 3"] >= 105
    found = json.loads(rows.read_text(encoding="utf-8"))
    variants = [row for row in found if "," in row["kind"] or "adapter" in row["kind"]]
    assert len(found) == 126 + len(variants) and len(variants) == 11
    for row in variants:  # quantised and adapted
        gaps = {name: plan["gap"] for name, plan in row["plans"].items()}
        assert gaps.pop("pipeline 2") == gaps.pop("pipeline 3") == 0.0, row
        assert max(gaps.values()) <= 1e-4, row
        assert all(plan["same_tokens"] for plan in row["plans"].values()), row
