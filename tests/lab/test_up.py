"""`mlx-mesh up` from one host over real SSH to the others: it comes up, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
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
NUM_TOKENS = 150


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
        assert self.process.stdout is not None
        # Not by communicate: that forgets what was read ahead of the lines that were asked for.
        self.output += self.process.stdout.read()
        return self.process.wait(LIMIT_S)


@contextmanager
def up(lab: Any, hostfile: Path, *arguments: object) -> Iterator[Running]:
    process = lab.start("mac1", [*MESH, "up", hostfile, *arguments])
    try:
        yield Running(process)
    finally:
        process.kill()
        process.communicate()


def write_hosts(path: Path, model: object, python: str, *hosts: str, deadlines: str = "{}") -> Path:
    lines = "".join(f"  - {host}\n" for host in hosts)
    path.write_text(
        f"name: lab\nmodel: {model}\nserve: {{port: 18000}}\ndefaults: {{python: {python}}}\n"
        f"deadlines: {deadlines}\nhosts:\n{lines}"
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
    (lab.home("mac1") / ".ssh" / "config").write_text("ServerAliveInterval 1\nServerAliveCountMax 2\n")
    deadlines = "{heartbeat_timeout_s: 3, rejoin_timeout_s: 4, stop_s: 1}"
    hostfile = write_hosts(tmp_path / "hosts.yaml", "/m", fake.python, *THREE, deadlines=deadlines)
    with up(lab, hostfile) as running:
        running.read_until("lab is ready")
        lab.cut("mac2")
        running.read_until(r"The SSH connection to mac2 was lost \(no answer for 4 s\)")
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


GREET = """
import socket, sys
try:
    with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n")
        connection.settimeout(2)
        print(connection.recv(1000))
except OSError as error:
    print(repr(error))
"""
"""What a server says to an HTTP request."""


def only_the_leader_serves_http(lab: Any) -> None:
    """And only where it was asked to; all other ports are on the chosen links, and speak no HTTP."""
    http = ("127.0.0.1", 18000)
    for host in lab.hosts:
        ports = lab.listening_at(host)
        assert (http in ports) == (host == "mac1")
        assert {address for address, _ in ports - {http}} <= {lab.address(host)}
        for address, port in [*ports, (lab.address(host), 18000)]:
            told = lab.run(host, sys.executable, "-I", "-c", GREET, address, port).stdout
            assert told.startswith("b'HTTP/1.1 200 OK") == ((address, port) == http), (host, port, told)
            assert told.startswith("b'HTTP") == ((address, port) == http), (host, port, told)


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
        only_the_leader_serves_http(lab)
    finally:
        down = lab.run("mac1", *MESH, "down", "lab")
    assert down.returncode == ExitCode.OK, down.stdout
    nothing_is_left(lab, "launcher.log")


ASK = """
import http.client, json, sys
connection = http.client.HTTPConnection("127.0.0.1", 18000, timeout=120)
body = {"messages": [{"role": "user", "content": "Tell me a long story"}], "stream": True, "temperature": 0,
        "max_tokens": %d, "logit_bias": {"0": -100, "2": -100}}
connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
response = connection.getresponse()
for line in response:
    if line.startswith(b"data: {"):
        event = json.loads(line[6:])
        assert "error" not in event, event
        print(json.dumps(event["choices"][0]["delta"].get("content", "")), flush=True)
    elif line.startswith(b"data: [DONE]"):
        print("done", flush=True)
"""
"""Streams an answer that no end-of-text token ends early; a line per piece."""


class Answer:
    """An answer that a client on mac1 is reading."""

    def __init__(self, lab: Any) -> None:
        self._process = lab.start("mac1", [sys.executable, "-I", "-u", "-c", ASK % NUM_TOKENS])
        self._lines: list[str] = []

    def begins(self) -> None:
        assert self._process.stdout is not None
        while len(self._lines) < 4:
            self._lines.append(self._process.stdout.readline())

    def whole(self) -> str:
        assert self._process.stdout is not None
        self._lines += self._process.stdout.readlines()
        assert self._process.wait(LIMIT_S) == 0 and self._lines[-1] == "done\n", self._lines[-5:]
        return "".join(json.loads(line) for line in self._lines[:-1])

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def elastic_mesh(lab: Any, tmp_path: Path, model: Path, *hosts: str, rejoin_s: int) -> Iterator[Running]:
    """Ready, with short deadlines; goes down by Ctrl-C and leaves nothing."""
    (lab.home("mac1") / ".ssh" / "config").write_text("ServerAliveInterval 1\nServerAliveCountMax 2\n")
    deadlines = f"{{heartbeat_timeout_s: 3, rejoin_timeout_s: {rejoin_s}}}"
    hostfile = write_hosts(tmp_path / "hosts.yaml", model, sys.executable, *hosts, deadlines=deadlines)
    with up(lab, hostfile, "--elastic") as running:
        running.read_until("lab is ready")
        yield running
        running.process.send_signal(signal.SIGINT)
        assert running.wait() == ExitCode.OK, running.output[-2000:]
    nothing_is_left(lab)


def test_answers_go_on_when_an_agent_is_killed_and_when_a_link_is_cut(
    lab: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    with elastic_mesh(lab, tmp_path, tiny_llama, *THREE[:2], rejoin_s=8) as running:
        with contextlib.closing(Answer(lab)) as answer:
            undisturbed = answer.whole()
        with contextlib.closing(Answer(lab)) as answer:
            answer.begins()
            [agent] = [pid for pid, command in lab.processes("mac2").items() if "--launched" in command]
            os.kill(agent, signal.SIGKILL)
            running.read_until("Reached mac2 again")
            running.read_until(r"Ready again .*\(epoch 2\)\.")
            assert answer.whole() == undisturbed
        with contextlib.closing(Answer(lab)) as answer:
            answer.begins()
            lab.cut("mac2")
            running.read_until(r"Epoch 2 ended: host mac2, .*heartbeat_timeout_s is 3")
            running.read_until(r"Ready again .*serving with 1 of 2 hosts since .*mac2 is gone")
            assert answer.whole() == undisturbed
        lab.heal("mac2")
        running.read_until("Epoch 3 ended: mac2 came back")
        running.read_until(r"Ready again .*\(epoch 4\)\.")


@pytest.mark.long
def test_answers_go_on_when_a_host_freezes_a_short_cut_heals_and_hosts_are_drained(
    lab: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    with elastic_mesh(lab, tmp_path, tiny_llama, *THREE, rejoin_s=30) as running:
        with contextlib.closing(Answer(lab)) as answer:
            undisturbed = answer.whole()
        with contextlib.closing(Answer(lab)) as answer:
            answer.begins()
            frozen = list(lab.processes("mac2"))
            for pid in frozen:
                os.kill(pid, signal.SIGSTOP)
            running.read_until("Epoch 1 ended: host mac2")
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)
            running.read_until(r"Ready again .*\(epoch 2\)\.")
            assert answer.whole() == undisturbed
        with contextlib.closing(Answer(lab)) as answer:
            answer.begins()
            lab.cut("mac3")
            running.read_until(r"Epoch 2 ended: host mac3, .*heartbeat_timeout_s is 3")
            lab.heal("mac3")
            running.read_until(r"Ready again .*\(epoch 3\)\.")
            assert answer.whole() == undisturbed
        with contextlib.closing(Answer(lab)) as answer:
            answer.begins()
            done = lab.run("mac1", *MESH, "node", "drain", "mac2")
            assert done.returncode == ExitCode.OK and "mac2 is drained" in done.stdout, done.stdout
            assert answer.whole() == undisturbed
        done = lab.run("mac1", *MESH, "node", "add", "mac2")
        assert done.returncode == ExitCode.OK and "Ready again: 3 ranks" in done.stdout, done.stdout


def test_killing_the_launcher_of_a_real_mesh_leaves_nothing(
    lab: Any, tmp_path: Path, tiny_llama: Path
) -> None:
    hostfile = write_hosts(tmp_path / "hosts.yaml", tiny_llama, sys.executable, *THREE)
    with up(lab, hostfile) as running:
        running.read_until("lab is ready")
        assert len(lab.processes("mac2")) >= 2  # an agent and its engine
        running.process.kill()
    nothing_is_left(lab, "up.json")
