"""Hosts that announce themselves by real multicast: seen, refused as copies, paired, and served from."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.errors import ExitCode

MESH = [sys.executable, "-I", "-u", "-m", "mlx_mesh.launcher"]
LOOK = ("--timeout", "1.2")
LIMIT_S = 180.0
GONE_S = 30.0
SECRET = "a secret of the lab's tests"


class Agent:
    """A `mlx-mesh agent` on a host."""

    def __init__(self, lab: Any, host: str, *flags: str, secret: str = "") -> None:
        words = [*MESH, "agent", *flags]
        self._process = lab.start(host, ["env", f"MLX_MESH_SECRET={secret}", *words] if secret else words)
        self.output = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        while not (match := re.search(pattern, self.output)):
            line = self._process.stdout.readline()
            assert line, f"ended without {pattern!r}:\n{self.output}"
            self.output += line
        return match

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        """All that it said is in `output` then."""
        self._process.send_signal(number)
        rest, _ = self._process.communicate(timeout=LIMIT_S)
        self.output += rest
        return int(self._process.returncode)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def agent(lab: Any, host: str, *flags: str, secret: str = "") -> Iterator[Agent]:
    made = Agent(lab, host, *flags, secret=secret)
    try:
        made.read_until(rf"Announced as {host} on ")
        yield made
    finally:
        made.close()


class Up:
    """A `mlx-mesh up --discover` on mac1."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""

    def read_until(self, pattern: str) -> None:
        assert self.process.stdout is not None
        while not re.search(pattern, self.output):
            line = self.process.stdout.readline()
            assert line, f"ended without {pattern!r}:\n{self.output}"
            self.output += line


@contextmanager
def up(lab: Any, model: Path, *flags: object, secret: str = "") -> Iterator[Up]:
    words = [*MESH, "up", "--discover", "--model", model, "--discover-timeout", 1.2, *flags]
    process = lab.start("mac1", ["env", f"MLX_MESH_SECRET={secret}", *words])
    try:
        yield Up(process)
    finally:
        process.kill()
        process.communicate()


def discover(lab: Any) -> dict[str, dict[str, Any]]:
    """What mac1 sees, by host."""
    done = lab.run("mac1", *MESH, "discover", "--json", *LOOK)
    report = json.loads(done.stdout)
    assert [row["name"] for row in report["interfaces"] if row["is_used"]] == ["en0"]
    assert report["interfaces"][0]["num_queries"] == 3
    return {row["name"]: row for row in report["hosts"]}


def pair(lab: Any, host: str, code: str) -> subprocess.CompletedProcess[str]:
    script = 'echo "$0" | "$@"'
    done = lab.run("mac1", "sh", "-c", script, code, *MESH, "discover", "--pair", host, *LOOK)
    assert isinstance(done, subprocess.CompletedProcess)
    return done


def meshes_are_gone(lab: Any) -> None:
    """No agent of a mesh and no engine on any host."""
    until = time.monotonic() + GONE_S
    while left := {
        host: found
        for host in lab.hosts
        if (found := [c for c in lab.processes(host).values() if "--launched" in c or ".engine" in c])
    }:
        assert time.monotonic() < until, left
        time.sleep(0.1)


def test_hosts_are_seen_refused_as_copies_paired_and_serve(lab: Any, tiny_llama: Path) -> None:
    lab.copy_identity("mac2", "mac3")
    with agent(lab, "mac2", "--pair") as first:
        with agent(lab, "mac3", "--pair") as second:
            seen = discover(lab)
            assert {name: row["verdict"]["what"] for name, row in seen.items()} == {
                "mac2": "duplicate",
                "mac3": "duplicate",
            }
            with up(lab, tiny_llama) as refused:
                assert refused.process.wait(LIMIT_S) == ExitCode.PREFLIGHT
                assert refused.process.stdout is not None
                said = refused.process.stdout.read()
            assert "mac2 (10.77.0.2) and mac3 (10.77.0.3) have the same SSH host key" in said, said
            assert second.end() == ExitCode.OK
        code = first.read_until(r"tries: (\d{4}-\d{4})")[1]
        wrong = pair(lab, "mac2", f"{(int(code.replace('-', '')) + 1) % 10**8:08d}")
        assert wrong.returncode == ExitCode.PREFLIGHT and "is not the one that mac2 has" in wrong.stdout
        first.read_until("10.77.0.1: not paired: root@mac1: it does not know the code")
        assert pair(lab, "mac2", code).returncode == ExitCode.OK
        again = pair(lab, "mac2", code)
        assert again.returncode == ExitCode.PREFLIGHT and "was used already" in again.stdout

        with up(lab, tiny_llama, "--hosts", 2) as running:
            running.read_until("discovered is ready: http://127.0.0.1:18000")
            told = json.loads(lab.run("mac1", *MESH, "status", "--json").stdout)
            assert [(rank["host"], rank["address"]) for rank in told["ranks"]] == [
                ("mac1", "10.77.0.1"),
                ("mac2", "10.77.0.2"),
            ]
            answer = lab.run("mac1", *MESH, "chat", "--prompt", "Hello", "--max-tokens", 4)
            assert answer.returncode == ExitCode.OK, answer.stdout
            running.process.kill()
        meshes_are_gone(lab)
        first.read_until("the launcher is gone")
        assert first.end() == ExitCode.OK
    assert not lab.processes("mac2") and not lab.listening("mac2")


@pytest.mark.long
def test_an_agent_that_comes_back_is_used_again(lab: Any, tiny_llama: Path) -> None:
    """By secret; with the leader elsewhere, which is asked through its agent."""
    with agent(lab, "mac2", secret=SECRET) as leader:
        follower = Agent(lab, "mac3", secret=SECRET)
        try:
            follower.read_until("Announced as mac3")
            with up(lab, tiny_llama, "--no-local", "--hosts", 2, secret=SECRET) as running:
                running.read_until("discovered is ready")
                assert discover(lab)["mac2"]["meshes"] == ["discovered"]
                follower.end(signal.SIGKILL)
                running.read_until("The SSH connection to mac3 was lost")
                follower = Agent(lab, "mac3", secret=SECRET)
                running.read_until("Ready again")
                leader.read_until("paired with root@mac1 by secret")
                status = lab.run("mac1", "env", f"MLX_MESH_SECRET={SECRET}", *MESH, "status", "--json")
                assert [rank["host"] for rank in json.loads(status.stdout)["ranks"]] == ["mac2", "mac3"]
                down = lab.run("mac1", "env", f"MLX_MESH_SECRET={SECRET}", *MESH, "down")
                assert down.returncode == ExitCode.OK, down.stdout
            meshes_are_gone(lab)
        finally:
            follower.close()


@pytest.mark.long
def test_another_secret_joins_nobody(lab: Any, tiny_llama: Path) -> None:
    with agent(lab, "mac2", secret=SECRET) as waiting:
        with up(lab, tiny_llama, secret="another secret than the other") as refused:
            assert refused.process.wait(LIMIT_S) == ExitCode.PREFLIGHT
            assert refused.process.stdout is not None
            assert "mac2: auth: no pairing by MLX_MESH_SECRET" in refused.process.stdout.read()
        waiting.read_until("not paired: root@mac1: it does not know the code or secret")
        meshes_are_gone(lab)


@pytest.mark.long
def test_without_multicast_an_address_will_do(lab: Any, tiny_llama: Path) -> None:
    waiting = Agent(lab, "mac2", "--no-announce", secret=SECRET)
    try:
        waiting.read_until("Waiting on port 17864")
        nobody = lab.run("mac1", *MESH, "discover", *LOOK)
        assert nobody.returncode == ExitCode.FAILED and "--address HOST" in nobody.stdout
        found = lab.run("mac1", *MESH, "discover", *LOOK, "--address", "mac2")
        assert found.returncode == ExitCode.OK and "mac2:17864: mac2" in found.stdout, found.stdout
        with up(lab, tiny_llama, "--address", "mac2", secret=SECRET) as running:
            running.read_until("discovered is ready")
    finally:
        waiting.close()


@pytest.mark.long
def test_a_new_address_is_announced(lab: Any) -> None:
    with agent(lab, "mac2", secret=SECRET):
        assert discover(lab)["mac2"]["interfaces"][0]["addresses"] == ["10.77.0.2/24"]
        lab.run("mac2", "ip", "addr", "add", "10.77.0.22/24", "dev", "en0")
        until = time.monotonic() + GONE_S
        while discover(lab)["mac2"]["interfaces"][0]["addresses"] != ["10.77.0.2/24", "10.77.0.22/24"]:
            assert time.monotonic() < until
