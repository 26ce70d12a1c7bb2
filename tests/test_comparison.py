"""The comparison with other servers: what is claimed there for this one is shown by a test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "comparison.md"
LINK = re.compile(r"\[([^\]]+)\]\(\.\./(tests/[\w/]+\.py)#(test_\w+)\)")


def own_cells() -> dict[str, str]:
    """Feature -> what mlx-mesh answers."""
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[1] for row in rows if row[1] != "mlx-mesh"}


def test_every_link_leads_to_a_test_of_that_name() -> None:
    links = LINK.findall(PAGE.read_text())
    assert len(links) > 50
    missing = []
    for _, path, name in links:
        tree = ast.parse((PAGE.parents[1] / path).read_text())
        names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        if name not in names:
            missing.append(f"{path}#{name}")
    assert not missing


def test_every_yes_of_ours_has_a_link_and_every_row_as_many_cells_as_columns() -> None:
    cells = own_cells()
    assert len(cells) > 60
    assert not [feature for feature, cell in cells.items() if "yes" in cell and not LINK.fullmatch(cell)]
    widths = {line.count(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")}
    assert len(widths) == 1
