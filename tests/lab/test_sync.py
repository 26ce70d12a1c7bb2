"""Models brought over real SSH to hosts that have none, each with a home of its own."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.delivery import size_of
from mlx_mesh.mesh.errors import ExitCode
from mlx_mesh.mesh.part_record import RECORD_NAME, PartRecord, parse_record

pytestmark = pytest.mark.long

MESH = [sys.executable, "-I", "-u", "-m", "mlx_mesh.launcher"]
LIMIT_S = 180.0
GONE_S = 15.0
MODEL = "~/my models/the model"
QUESTION = {"prompt": "ab", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def hostfile(lab: Any, tmp_path: Path) -> Path:
    path = tmp_path / "hosts.yaml"
    hosts = "".join(f"  - {{name: {host}, ssh: {host}}}\n" for host in lab.hosts[1:])
    path.write_text(
        f"name: lab\nmodel: {MODEL}\nserve: {{port: 18000}}\ndefaults: {{python: {sys.executable}}}\n"
        f"hosts:\n  - {{name: mac1, local: true}}\n{hosts}"
    )
    return path


def own_copy(lab: Any, model: Path) -> Path:
    folder: Path = lab.home("mac1") / MODEL.removeprefix("~/")
    shutil.copytree(model, folder)
    return folder


def delivered(lab: Any, host: str) -> Path | None:
    found = list((lab.home(host) / ".cache" / "mlx-mesh" / "delivered").glob("*/*"))
    return found[0] if found else None


def record_of(lab: Any, host: str) -> PartRecord | None:
    folder = delivered(lab, host)
    try:
        return parse_record((folder / RECORD_NAME).read_bytes()) if folder is not None else None
    except (OSError, ValueError):
        return None


def wait_until_gone(lab: Any) -> None:
    deadline = time.monotonic() + GONE_S
    while left := {host: lab.processes(host) for host in lab.hosts if lab.processes(host)}:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert not any(lab.listening(host) for host in lab.hosts)


def test_up_brings_its_part_to_each_host_and_serves(lab: Any, hostfile: Path, tiny_llama: Path) -> None:
    own_copy(lab, tiny_llama)
    process = lab.start("mac1", [*MESH, "up", hostfile])
    try:
        said = ""
        while "lab is ready" not in said:
            line = process.stdout.readline()
            assert line, said
            said += line
        assert "Bringing the model to mac2, mac3" in said
        for host in ("mac2", "mac3"):
            record = record_of(lab, host)
            assert record is not None
            assert not record.is_whole
            assert record.has_small_files
        done = lab.run(
            "mac1",
            "curl",
            "-s",
            "-H",
            "Content-Type: application/json",
            "-d",
            json.dumps(QUESTION),
            "http://127.0.0.1:18000/v1/completions",
        )
        assert json.loads(done.stdout)["usage"]["completion_tokens"] == 4
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == ExitCode.OK
    finally:
        process.kill()
        process.communicate()
    wait_until_gone(lab)
    again = lab.run("mac1", *MESH, "sync", MODEL, hostfile, "--json", timeout_s=LIMIT_S)
    told = json.loads(again.stdout[again.stdout.index("[\n") :])
    assert [host["received"] for host in told] == [0, 0, 0]


def test_a_sync_that_is_killed_leaves_no_process_and_goes_on_where_it_was(
    lab: Any, hostfile: Path, smollm2: Path
) -> None:
    own = own_copy(lab, smollm2)
    total = sum(path.stat().st_size for path in own.iterdir())
    process = lab.start("mac1", [*MESH, "sync", MODEL, hostfile, "--full"])
    try:
        deadline = time.monotonic() + LIMIT_S
        while (record := record_of(lab, "mac2")) is None or record.num_bytes < 0.5 * total:
            assert time.monotonic() < deadline
            assert process.poll() is None, process.stdout.read()
        process.kill()
    finally:
        process.kill()
        process.communicate()
    wait_until_gone(lab)
    record = record_of(lab, "mac2")
    assert record is not None
    there = size_of(record.spans())
    done = lab.run("mac1", *MESH, "sync", MODEL, hostfile, "--full", "--json", timeout_s=LIMIT_S)
    second = json.loads(done.stdout[done.stdout.index("[\n") :])[1]
    assert there + second["received"] <= 1.05 * second["needed"]
    folder = delivered(lab, "mac2")
    assert folder is not None
    assert subprocess.run(["cmp", own / "model.safetensors", folder / "model.safetensors"]).returncode == 0
    wait_until_gone(lab)
