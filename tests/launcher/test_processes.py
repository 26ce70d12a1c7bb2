"""Processes by identity, and what a killed agent leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.launcher.programs.processes import forget, started

GONE = 2**22 + 1  # no Linux or macOS gives such a pid


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


def write_record(state_home: Path, engines: dict[str, Any]) -> Path:
    path = state_home / "mlx-mesh" / "studio" / "agent-mac_1.json"
    path.parent.mkdir(parents=True)
    record = {"agent": {"pid": GONE, "start_time": "b:1"}, "engines": engines, "proxy": None}
    path.write_text(json.dumps(record))
    return path


def test_a_run_file_goes_once_the_children_of_its_agent_are_ended(
    state_home: Path, child: subprocess.Popen[bytes]
) -> None:
    since = started(child.pid)
    identity = f"boot:{since}" if sys.platform == "linux" else since
    path = write_record(state_home, {"0": {"pid": child.pid, "start_time": identity}})
    assert forget("studio", "mac 1", GONE, 1.0) == ""
    assert not started(child.pid) and not path.exists()


def test_a_pid_that_is_another_process_now_is_left_alone(
    state_home: Path, child: subprocess.Popen[bytes]
) -> None:
    path = write_record(state_home, {"0": {"pid": child.pid, "start_time": "boot:1"}})
    assert forget("studio", "mac 1", GONE, 1.0) == ""
    assert started(child.pid) and not path.exists()


def test_another_agents_run_file_stays(state_home: Path) -> None:
    path = write_record(state_home, {})
    assert forget("studio", "mac 1", os.getpid(), 1.0) == ""
    assert path.exists()
    path.unlink()
    assert forget("studio", "mac 1", os.getpid(), 1.0) == ""
