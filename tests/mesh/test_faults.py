"""The words of `--fault`, and that nothing but the flag leads to the fault kit."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.faults import Fault, FaultKind, Moment, check_faults, faults_of, parse_fault
from mlx_mesh.node.children import Programs

ROOT = Path(__file__).resolve().parents[2]
KIT = ("mlx_mesh.mesh.faults", "mlx_mesh.node.engine.faulty")


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("kill:1@decode+5", Fault(FaultKind.KILL, 1, Moment.DECODE, 5)),
        ("delay:0@prefill=3s#2", Fault(FaultKind.DELAY, 0, Moment.PREFILL, 0, 3.0, 2)),
        ("memory:2@load+1=200MB#*", Fault(FaultKind.MEMORY, 2, Moment.LOAD, 1, 200e6, 0)),
        ("freeze:1@warm-up", Fault(FaultKind.FREEZE, 1, Moment.WARM_UP)),
    ],
)
def test_a_fault_is_read_from_its_words(text: str, fault: Fault) -> None:
    assert parse_fault(text) == fault


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("kill", "form"),
        ("melt:1@decode", "melt is none of kill, freeze"),
        ("kill:1@lunch", "lunch is none of connect"),
        ("kill:1@decode+5; rm", "form"),
        ("kill:3@decode", "no rank 3 among 2"),
    ],
)
def test_a_wrong_fault_is_refused_with_what_would_be_right(text: str, what: str) -> None:
    with pytest.raises(SettingsError, match=what):
        check_faults([text], 2)


def test_a_fault_is_for_one_rank_and_by_default_for_the_first_epoch_only() -> None:
    texts = ["kill:1@decode", "freeze:1@idle#*"]
    assert [fault.kind for fault in faults_of(texts, 1, 1)] == ["kill", "freeze"]
    assert [fault.kind for fault in faults_of(texts, 1, 2)] == ["freeze"]
    assert faults_of(texts, 0, 1) == ()


def test_only_the_flag_and_the_faulty_engine_import_the_kit() -> None:
    importers: dict[str, list[str]] = {}
    for folder in ("launcher", "mesh", "node", "proxy"):
        for path in (ROOT / folder).rglob("*.py"):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            top = {id(node) for node in tree.body}
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module in KIT:
                    where = "at the top" if id(node) in top else "in a function"
                    importers.setdefault(str(path.relative_to(ROOT)), []).append(where)
    assert importers == {
        "launcher/commands/up.py": ["in a function"],
        "node/engine/faulty.py": ["at the top"],
    }


def test_processes_without_the_flag_never_load_the_kit() -> None:
    code = (
        "import sys, mlx_mesh.launcher.commands.up, mlx_mesh.node.lifecycle, mlx_mesh.node.engine.phases\n"
        f"sys.exit(any(name in sys.modules for name in {KIT!r}))"
    )
    assert subprocess.run([sys.executable, "-I", "-c", code], timeout=60, check=False).returncode == 0
    assert "faulty" not in " ".join(Programs.default().engine)
    assert Programs.default(("kill:0@idle",)).engine[-3:] == (
        "mlx_mesh.node.engine.faulty",
        "--faults",
        "kill:0@idle",
    )


def test_a_fault_without_sim_is_refused(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-m", "mlx_mesh.launcher", "up", "hosts.yaml", "--fault", "kill:0@idle"],
        capture_output=True,
        cwd=tmp_path,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2
