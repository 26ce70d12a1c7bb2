"""One host fetches a model from the hub for all; told offline it asks nobody."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from mlx_mesh.mesh.delivery_orders import Failed, FetchOrder, Said
from mlx_mesh.mesh.errors import ExitCode


def test_offline_is_offline(tmp_path: Path) -> None:
    order = FetchOrder(marker="told", model="org/name", offline=True)
    process = subprocess.Popen(
        [sys.executable, "-I", "-m", "mlx_mesh.node.delivery.fetch"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9"},
    )
    with process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(order) + b"\n")
        process.stdin.flush()  # and it stays open: the launcher is there
        (line,) = [line for line in process.stdout if line.startswith(b"told ")]
    said = msgspec.json.decode(line.removeprefix(b"told "), type=Said)
    assert isinstance(said, Failed)
    assert "forbids to ask the hub" in said.message
    assert process.returncode == ExitCode.FAILED
