"""`mlx-mesh up` from one host over real SSH to the others: it comes up, and leaves nothing behind."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.errors import ExitCode

MESH = [sys.executable, "-I", "-u", "-m", "mlx_mesh.launcher"]
LIMIT_S = 180.0
GONE_S = 15.0


class Running:
    """A `mlx-mesh up` on a host."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        assert self.process.stdout is not None
        while not (match := re.search(pattern, self.output)):
            line = self.process.stdout.readline()
            assert line, f"ended without {pattern!r}:\n{self.output}"
            self.output += line
        return match

    def wait(self) -> int:
        self.output += self.process.communicate(timeout=LIMIT_S)[0]
        return self.process.returncode


@contextmanager
def up(lab: Any, hostfile: Path, *arguments: object) -> Iterator[Running]:
    process = lab.start("mac1", [*MESH, "up", hostfile, *arguments])
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()


def write_hosts(path: Path, model: object, python: str, *hosts: str, port: int = 18000) -> Path:
    lines = "".join(f"  - {host}\n" for host in hosts)
    path.write_text(
        f"name: lab\nmodel: {model}\nserve: {{port: {port}}}\ndefaults: {{python: {python}}}\nhosts:\n{lines}"
    )
    return path


THREE = ("{name: mac1, local: true}", "{name: mac2, ssh: mac2}", "{name: mac3, ssh: mac3.local}")


LOGS = ".local/state/mlx-mesh/lab/logs/"
CACHE = ".cache/mlx-mesh/"


def nothing_is_left(lab: Any, *allowed: str) -> None:
    """No process, no port; of files only what is documented: logs, the cache, and those that are `allowed` in
    the state folder of mac1."""
    deadline = time.monotonic() + GONE_S
    while True:
        left = {host: (lab.processes(host), lab.listening(host)) for host in lab.hosts}
        if not any(processes or ports for processes, ports in left.values()):
            break
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    files = {
        f"{host}:{name}"
        for host in lab.hosts
        for name in lab.files(host)
        if not name.startswith((LOGS, CACHE))
    }
    assert files <= {f"mac1:.local/state/mlx-mesh/lab/{name}" for name in allowed}


# ---------------------------------------------------------------- pretended agents


@pytest.fixture
def fake(lab: Any, fake_python: Callable[..., Any]) -> Any:
    made = fake_python("lab")
    made.set_facts(addresses=["127.0.0.1", *(lab.address(host) for host in lab.hosts)])
    return made


def test_hosts_with_other_homes_a_noisy_profile_and_an_odd_shell_come_up_and_go_down(
    lab: Any, fake: Any, tmp_path: Path
) -> None:
    for host in lab.hosts:  # the same ~ path is another place on each host
        (lab.home(host) / "venv").symlink_to(fake.folder)
    hostfile = write_hosts(tmp_path / "hosts.yaml", "/m", "~/venv/bin/python", *THREE)
    with up(lab, hostfile) as running:
        running.read_until("lab is ready: http://127.0.0.1:18000")
        assert "[agent mac2] Hello from a profile" in running.output
        assert "[agent mac3] Welcome to a fish-like shell" in running.output
        agents = {agent["host"]: agent for agent in fake.agents()}
        assert {host: agent["config"]["address"] for host, agent in agents.items()} == {
            host: lab.address(host) for host in lab.hosts
        }
        assert agents["mac1"]["config"]["coordinator"] == "10.77.0.1:0"
        assert set(lab.listening("mac1")) == {18000}
        running.process.send_signal(signal.SIGTERM)
        assert running.wait() == ExitCode.OK
    for host in lab.hosts:
        (lab.home(host) / "venv").unlink()
    nothing_is_left(lab)


def test_killing_the_launcher_ends_the_agents_on_every_host(lab: Any, fake: Any, tmp_path: Path) -> None:
    hostfile = write_hosts(tmp_path / "hosts.yaml", "/m", fake.python, *THREE)
    with up(lab, hostfile) as running:
        running.read_until("lab is ready")
        running.process.kill()
    nothing_is_left(lab, "up.json")
    done = lab.run("mac1", *MESH, "down", "lab")
    assert done.returncode == ExitCode.OK, done.stdout
    nothing_is_left(lab)


def test_an_agent_that_cannot_be_reached_any_more_is_told_and_does_not_hang_the_end(
    lab: Any, fake: Any, tmp_path: Path
) -> None:
    hostfile = write_hosts(tmp_path / "hosts.yaml", "/m", fake.python, *THREE)
    with up(lab, hostfile) as running:
        running.read_until("lab is ready")
        lab.cut("mac2")
        running.read_until(r"The SSH connection to mac2 was lost \(no answer for 60 s\)")
        began = time.monotonic()
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == ExitCode.FAILED
        assert time.monotonic() - began < 60
    assert re.search(r"mac2: the agent \(pid \d+\) may still run", running.output)
    assert lab.processes("mac3") == {}
    lab.heal("mac2")


def test_every_unready_host_is_told_at_once(lab: Any, fake: Any, tmp_path: Path) -> None:
    (lab.home("mac1") / ".ssh" / "known_hosts").write_text(
        "".join(
            line
            for line in (lab.home("mac1") / ".ssh" / "known_hosts").read_text().splitlines(True)
            if "mac3" not in line
        )
    )
    hosts = ("{name: mac1, local: true, python: /no/python}", *THREE[1:], "{name: mac9, ssh: mac9.local}")
    done = lab.run("mac1", *MESH, "up", write_hosts(tmp_path / "hosts.yaml", "/m", fake.python, *hosts))
    assert done.returncode == ExitCode.PREFLIGHT
    told = [line.split(": ")[:2] for line in done.stdout.splitlines() if line.startswith("  mac")]
    assert told == [["  mac1", "interpreter"], ["  mac3", "host key"], ["  mac9", "resolve"]]
    nothing_is_left(lab)


def test_an_address_that_a_host_does_not_have_is_refused(lab: Any, tmp_path: Path, tiny_llama: Path) -> None:
    hosts = ("{name: mac1, local: true}", "{name: mac2, ssh: mac2, addresses: [10.77.0.99]}")
    done = lab.run(
        "mac1", *MESH, "up", write_hosts(tmp_path / "hosts.yaml", tiny_llama, sys.executable, *hosts)
    )
    assert done.returncode == ExitCode.PREFLIGHT
    assert (
        "mac2: address: the hostfile gives it 10.77.0.99, which it does not have; it has 127.0.0.1, 10.77.0.2"
        in done.stdout
    )
    nothing_is_left(lab)


# ---------------------------------------------------------------- the real thing


def test_a_model_is_served_by_three_hosts_and_down_leaves_nothing(
    lab: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    hostfile = write_hosts(tmp_path / "hosts.yaml", tiny_llama, sys.executable, *THREE)
    done = lab.run("mac1", *MESH, "up", hostfile, "--detach", timeout_s=LIMIT_S)
    try:
        assert done.returncode == ExitCode.OK, done.stdout
        told = json.loads(lab.run("mac1", *MESH, "status", "lab", "--json").stdout)
        assert told["status"]["world_size"] == 3
        assert [rank["host"] for rank in told["ranks"]] == ["mac1", "mac2", "mac3"]
        answer = lab.run("mac1", *MESH, "chat", "lab", "--prompt", "Hello", "--max-tokens", 8)
        assert answer.returncode == ExitCode.OK, answer.stdout
        for rank in range(3):
            assert lab.run("mac1", *MESH, "logs", "lab", "--rank", rank).returncode == ExitCode.OK
    finally:
        down = lab.run("mac1", *MESH, "down", "lab")
    assert down.returncode == ExitCode.OK, down.stdout
    nothing_is_left(lab, "launcher.log")


def test_a_link_that_is_silent_for_25_s_costs_an_epoch_and_not_the_mesh(
    lab: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    hosts = (THREE[0], THREE[1])
    hostfile = write_hosts(tmp_path / "hosts.yaml", tiny_llama, sys.executable, *hosts)
    with up(lab, hostfile) as running:
        running.read_until("lab is ready")
        began = time.monotonic()
        lab.cut("mac2")
        running.read_until(r"Epoch 1 ended: .*mac2")
        with pytest.raises(subprocess.TimeoutExpired):
            running.process.wait(timeout=max(0.1, 25.0 - (time.monotonic() - began)))
        lab.heal("mac2")
        running.read_until("Ready again")
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == ExitCode.OK
    nothing_is_left(lab)


def test_killing_the_launcher_of_a_real_mesh_leaves_nothing(
    lab: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    hostfile = write_hosts(tmp_path / "hosts.yaml", tiny_llama, sys.executable, *THREE)
    with up(lab, hostfile) as running:
        running.read_until("lab is ready")
        assert len(lab.processes("mac2")) >= 2  # an agent and its engine
        running.process.kill()
    nothing_is_left(lab, "up.json")
