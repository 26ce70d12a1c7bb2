"""`mlx-mesh doctor` from the command line, on this machine and a host that is not there."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from mlx_mesh.launcher.cli import main
from mlx_mesh.launcher.pair_probe import dial
from mlx_mesh.launcher.remote import LocalHost, run_program
from mlx_mesh.mesh.doctor import EXIT_STATUS, Area
from mlx_mesh.mesh.pair_checks import Dialled


def test_a_host_is_told_at_its_first_failing_step_and_the_others_in_full(
    tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostfile = tmp_path / "hosts.yaml"
    hostfile.write_text(
        f"name: x\nmodel: {tiny_llama}\nserve: {{port: 0}}\nhosts:\n"
        "  - {name: here, local: true}\n  - {name: gone, ssh: nowhere.invalid}\n"
    )
    assert main(["doctor", str(hostfile), "--json"]) == EXIT_STATUS[Area.REACH]
    findings = json.loads(capsys.readouterr().out)
    (failed,) = [finding for finding in findings if finding["level"] == "fail"]
    assert (failed["host"], failed["check"]) == ("gone", "resolve") and failed["fix"]
    here = {finding["check"]: finding["level"] for finding in findings if finding["host"] == "here"}
    assert here["model"] == here["tokenizer"] == here["data ports"] == "ok" and len(here) > 30


def test_a_taken_port_is_named_and_has_its_status(
    tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status = main(["doctor", "--model", str(tiny_llama), "--port", str(port)])
    assert status == EXIT_STATUS[Area.MACHINE]
    assert f"port {port} is taken by pid" in capsys.readouterr().out


def test_two_hosts_meet_or_it_is_told_which_end_failed() -> None:
    here, there = LocalHost("mac1"), LocalHost("mac2")
    assert dial(here, sys.executable, there, sys.executable, "127.0.0.1") == Dialled()
    gone = dial(here, sys.executable, there, sys.executable, "192.0.2.1")  # an address of no host
    assert gone.not_listening and not gone.error
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    request = {"do": "dial", "address": "127.0.0.1", "port": port}
    answer = run_program(here, sys.executable, "dial_link", request, 30)
    assert answer["error"] == "ECONNREFUSED" and answer["said"]
