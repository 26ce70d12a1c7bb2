"""`mlx-mesh up` and the commands around it, as processes, against pretended agents here and over real SSH."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.launcher.programs.processes import started
from mlx_mesh.launcher.revival import pause_s
from mlx_mesh.mesh.errors import ExitCode

MESH = [sys.executable, "-I", "-u", "-m", "mlx_mesh.launcher"]
KEY = "a-key-that-nobody-may-see"
LIMIT_S = 60.0

pytestmark = pytest.mark.usefixtures("state_home")


@dataclass
class Running:
    """A `mlx-mesh up` in the foreground, and what it has printed."""

    process: subprocess.Popen[str]
    output: str = ""

    def read_until(self, pattern: str) -> re.Match[str]:
        """Wait for the output to match; its end before that fails the test."""
        assert self.process.stdout is not None
        while not (match := re.search(pattern, self.output)):
            line = self.process.stdout.readline()
            assert line, f"ended without {pattern!r}:\n{self.output}"
            self.output += line
        return match

    def end(self, number: int = signal.SIGINT) -> int:
        """Send a signal, read the rest, wait."""
        self.process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self.process.stdout is not None
        # Not by communicate: that forgets what was read ahead of the lines that were asked for.
        self.output += self.process.stdout.read()
        return self.process.wait(LIMIT_S)


@contextlib.contextmanager
def up(*arguments: object) -> Iterator[Running]:
    process = subprocess.Popen(
        [*MESH, "up", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield Running(process)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def mesh(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MESH, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={**os.environ, **environment},
    )


def wait_until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    return not started(pid)


@pytest.fixture
def local(fake_python: Callable[..., Any], tmp_path: Path) -> tuple[Path, Any]:
    """A hostfile of this machine with two slots, and its pretended interpreter."""
    fake = fake_python("local")
    hostfile = tmp_path / "hosts.yaml"
    hostfile.write_text(
        f"name: studio\nmodel: /m\nserve: {{port: 0}}\ndefaults: {{python: {fake.python}}}\n"
        "hosts: [{name: mac1, local: true, slots: 2}]\n"
    )
    return hostfile, fake


@pytest.fixture
def over_ssh(
    fake_python: Callable[..., Any], start_sshd: Callable[..., Any], tmp_path: Path
) -> tuple[list[object], Any, Any]:
    """Arguments for three hosts over SSH, their pretended interpreter, and the server."""
    fake, sshd = fake_python("remote"), start_sshd("a")
    for alias in ("one", "two", "three"):
        sshd.add_host(alias)
    hostfile = tmp_path / "three.yaml"
    hosts = "".join(f"  - {{name: mac{n}, ssh: {ssh}}}\n" for n, ssh in enumerate(("one", "two", "three"), 1))
    hostfile.write_text(
        f"name: three\nmodel: /m\nserve: {{port: 0}}\ndefaults: {{python: {fake.python}}}\nhosts:\n{hosts}"
    )
    return [hostfile, "--ssh-config", sshd.config], fake, sshd


# ---------------------------------------------------------------- up and down


def test_up_shows_plan_progress_logs_and_url_and_ctrl_c_ends_it_cleanly(
    local: tuple[Path, Any], state_home: Path
) -> None:
    hostfile, fake = local
    with up(hostfile) as running:
        running.read_until(r"is ready: http://127.0.0.1:\d+/v1")
        assert running.end() == ExitCode.OK
    output = running.output
    assert re.search(r"Plan: /m, 2 ranks, sharding \w+", output)
    assert re.search(r"rank +host +part +weights", output)
    assert "[0 mac1] loading 0/4\n" in output and "[0 mac1] loading 4/4\n" in output
    assert "[0 mac1] red words" in output  # without its escape sequences
    assert (
        "[agent mac1] a line before anything framed" in output and "[agent mac1] a line on stderr" in output
    )
    assert "Mesh studio is down." in output
    told = json.loads((fake.folder / "farewell-mac1").read_bytes())
    assert told == {"reason": "Ctrl-C", "is_failure": False, "drain": True}
    (agent,) = fake.agents()
    assert is_gone(agent["pid"])
    assert not (state_home / "mlx-mesh" / "studio").exists()


def test_the_agent_is_told_everything_on_stdin_and_no_secret_anywhere_else(local: tuple[Path, Any]) -> None:
    hostfile, fake = local
    key_file = hostfile.with_name("key")
    key_file.write_text(KEY + "\n")
    os.environ["MLX_MESH_API_KEY"] = KEY
    try:
        with up(hostfile, "--api-key-file", key_file, "--context", 512, "--max-sequences", 3) as running:
            running.read_until("is ready")
            (agent,) = fake.agents()
            assert running.end(signal.SIGTERM) == ExitCode.OK
    finally:
        del os.environ["MLX_MESH_API_KEY"]
    config = agent["config"]
    assert len(bytes.fromhex(config["secret"])) >= 32
    assert (config["coordinator"], config["slots"], config["world_size"]) == ("", 2, 2)
    told = config["mesh"]
    assert told["api_keys"] == [KEY]
    assert (told["context_length"], told["plan_context"], told["max_sequences"], told["plan_sequences"]) == (
        512,
        512,
        3,
        3,
    )
    outside = json.dumps([agent["cmdline"], agent["environ"]]) + running.output
    assert KEY not in outside and config["secret"] not in outside


def test_three_hosts_over_ssh_come_up_with_one_coordinator_and_go_down(
    over_ssh: tuple[list[object], Any, Any],
) -> None:
    arguments, fake, _ = over_ssh
    with up(*arguments) as running:
        running.read_until("is ready")
        running.read_until(r"on mac1 only; from here: ssh -L")
        agents = fake.agents()
        assert running.end() == ExitCode.OK
    leader, *followers = sorted(agents, key=lambda agent: str(agent["host"]))
    assert leader["config"]["coordinator"] == "127.0.0.1:0" and len(leader["config"]["mesh"]["hosts"]) == 3
    assert [follower["config"]["coordinator"] for follower in followers] == ["127.0.0.1:4242"] * 2
    assert all(follower["config"]["mesh"] is None for follower in followers)
    assert len({agent["config"]["secret"] for agent in agents}) == 1
    assert len({agent["config"]["marker"] for agent in agents}) == 3
    assert all(is_gone(agent["pid"]) for agent in agents)


def test_killing_the_launcher_leaves_no_agent_here_or_over_ssh(
    local: tuple[Path, Any], over_ssh: tuple[list[object], Any, Any]
) -> None:
    arguments, fake, _ = over_ssh
    with up(*arguments) as running, up(local[0]) as other:
        running.read_until("is ready")
        other.read_until("is ready")
        agents = fake.agents() + local[1].agents()
        assert len(agents) == 4
        running.process.kill()
        other.process.kill()
        for agent in agents:
            wait_until(functools.partial(is_gone, agent["pid"]))
    done = mesh("status", "three")
    assert done.returncode == ExitCode.NOT_RUNNING
    done = mesh(
        "down",
        "three",
    )
    assert done.returncode == ExitCode.OK and "gone without having cleaned up" in done.stdout
    with up(local[0]) as again:  # a stale state file is no obstacle
        again.read_until("is ready")
        assert again.end() == ExitCode.OK


def test_an_agent_that_ignores_the_end_of_its_stdin_is_killed_by_identity(
    over_ssh: tuple[list[object], Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments, fake, _ = over_ssh
    fake.set_behaviour(mac2={"ignore_eof": True, "ignore_term": True})
    with up(*arguments) as running:
        running.read_until("is ready")
        agents = fake.agents()
        began = time.monotonic()
        assert running.end() == ExitCode.OK
    assert time.monotonic() - began < 40
    assert all(is_gone(agent["pid"]) for agent in agents)


def test_a_second_ctrl_c_does_not_wait_for_agents_that_will_not_end(local: tuple[Path, Any]) -> None:
    hostfile, fake = local
    fake.set_behaviour(mac1={"ignore_eof": True, "ignore_term": True})
    with up(hostfile) as running:
        running.read_until("is ready")
        running.process.send_signal(signal.SIGINT)
        running.read_until("Stopping")
        began = time.monotonic()
        assert running.end() == ExitCode.OK
    assert time.monotonic() - began < 5
    assert is_gone(fake.agents()[0]["pid"])


# ---------------------------------------------------------------- what goes wrong


def test_an_agents_own_reason_and_exit_status_are_the_launchers(local: tuple[Path, Any]) -> None:
    hostfile, fake = local
    fake.set_behaviour(mac1={"fail": "Rank 1 did not connect within 30 s.", "exit_code": 5})
    with up(hostfile) as running:
        assert running.wait() == ExitCode.BRING_UP
    assert "mlx-mesh: Rank 1 did not connect within 30 s." in running.output
    assert "Traceback" not in running.output


def test_an_agent_that_crashes_is_told_with_its_last_lines(local: tuple[Path, Any]) -> None:
    hostfile, fake = local
    fake.set_behaviour(mac1={"crash": "boom"})
    with up(hostfile) as running:
        assert running.wait() == ExitCode.BRING_UP
    assert re.search(
        r"mlx-mesh: The agent on mac1 is gone: it ended with status 1\. .*RuntimeError: boom",
        running.output,
        re.DOTALL,
    )


def test_a_followers_agent_that_was_killed_is_started_anew(
    over_ssh: tuple[list[object], Any, Any], tmp_path: Path
) -> None:
    arguments, fake, _ = over_ssh
    now = tmp_path / "now"
    fake.set_behaviour(mac3={"die_on": str(now)})
    with up(*arguments) as running:
        running.read_until("is ready")
        agent = agent_of(fake, "mac3")
        others = {host: agent_of(fake, host) for host in ("mac1", "mac2")}
        now.touch()
        wait_until(functools.partial(is_gone, agent))
        fake.set_behaviour()
        running.read_until(r"warning: The agent on mac3 is gone: it was ended by .*rejoin_timeout_s")
        running.read_until("Reached mac3 again; its agent is started anew")
        wait_until(lambda: agent_of(fake, "mac3") != agent)
        fresh = agent_of(fake, "mac3")
        assert not any(is_gone(pid) for pid in (fresh, *others.values()))
        assert running.end() == ExitCode.OK
    assert is_gone(fresh)


def test_a_follower_that_says_why_it_ends_does_not_end_the_mesh(
    over_ssh: tuple[list[object], Any, Any], tmp_path: Path
) -> None:
    arguments, fake, _ = over_ssh
    now, then = tmp_path / "now", tmp_path / "then"
    fake.set_behaviour(mac2={"fail_on": str(now), "then": str(then)})
    with up(*arguments) as running:
        running.read_until("is ready")
        now.touch()
        wait_until(then.exists)
        fake.set_behaviour()
        running.read_until("the coordinator is gone")
        running.read_until("Reached mac2 again")
        assert running.end() == ExitCode.OK


def test_a_follower_that_the_coordinator_sent_away_is_not_started_again(
    over_ssh: tuple[list[object], Any, Any], tmp_path: Path
) -> None:
    arguments, fake, _ = over_ssh
    fake.set_behaviour(mac2={"leave_on": str(tmp_path / "now")})
    with up(*arguments) as running:
        running.read_until("is ready")
        (tmp_path / "now").touch()
        assert running.wait() == ExitCode.FAILED
    assert "The agent on mac2 is gone: it ended with status 0" in running.output
    told = json.loads((fake.folder / "farewell-mac1").read_bytes())  # for the clients of open streams
    assert told["is_failure"] and told["reason"].startswith("The agent on mac2 is gone")


@pytest.mark.parametrize(
    ("num_tries", "seconds"), [(0, 0.0), (1, 1.0), (2, 2.0), (5, 16.0), (6, 30.0), (4000, 30.0)]
)
def test_pauses_between_tries_to_reach_a_host_grow_to_half_a_minute(num_tries: int, seconds: float) -> None:
    assert pause_s(num_tries) == seconds


def test_node_drain_and_add_ask_the_leader_and_wait_until_it_serves_again(local: tuple[Path, Any]) -> None:
    with up(local[0]) as running:
        running.read_until("is ready")
        done = mesh("node", "drain", "mac2", "studio")
        assert done.returncode == ExitCode.OK, done.stderr
        assert done.stdout.splitlines() == [
            "drain: mac2",
            "Ready again: 2 ranks, sharding pipeline, epoch 2; serving with 1 of 2 hosts.",
        ]
        assert mesh("node", "add", "mac2").stdout.startswith("add: mac2\n")
        refused = mesh("node", "drain", "mac1", "studio")
        assert refused.returncode == ExitCode.PLACEMENT and "1.0 GB are missing (mac1)" in refused.stderr
        assert running.end() == ExitCode.OK


def test_how_the_leaders_agent_ended_is_told_and_not_what_a_follower_says_of_it(
    over_ssh: tuple[list[object], Any, Any], tmp_path: Path
) -> None:
    arguments, fake, _ = over_ssh
    now, then = str(tmp_path / "now"), str(tmp_path / "then")
    fake.set_behaviour(mac1={"die_on": then}, mac2={"fail_on": now, "then": then})
    with up(*arguments) as running:
        running.read_until("is ready")
        Path(now).touch()
        assert running.wait() == ExitCode.FAILED
    assert "mlx-mesh: The agent on mac1 is gone: it was ended by" in running.output


def test_the_run_file_of_a_killed_agent_is_removed(
    local: tuple[Path, Any], state_home: Path, tmp_path: Path
) -> None:
    hostfile, fake = local
    fake.set_behaviour(mac1={"die_on": str(tmp_path / "now"), "run_file": True})
    with up(hostfile) as running:
        running.read_until("is ready")
        wait_until(lambda: (state_home / "mlx-mesh" / "studio" / "agent-mac1.json").exists())
        (tmp_path / "now").touch()
        assert running.wait() == ExitCode.FAILED
    assert "The agent on mac1 is gone: it was ended by SIGKILL" in running.output
    assert not (state_home / "mlx-mesh" / "studio").exists()


# ---------------------------------------------------------------- connections that break


@pytest.fixture
def impatient(
    fake_python: Callable[..., Any], start_sshd: Callable[..., Any], tmp_path: Path
) -> tuple[list[object], Any]:
    """Two hosts, the follower over an SSH connection that counts as dead after 2 s."""
    fake, sshd = fake_python("remote"), start_sshd("a")
    sshd.add_host("one")
    sshd.add_host("two", "ServerAliveInterval 1", "ServerAliveCountMax 2")
    hostfile = tmp_path / "two.yaml"
    hostfile.write_text(
        f"name: two\nmodel: /m\nserve: {{port: 0}}\ndefaults: {{python: {fake.python}}}\n"
        "hosts: [{name: mac1, ssh: one}, {name: mac2, ssh: two}]\n"
    )
    return [hostfile, "--ssh-config", sshd.config], fake


def agent_of(fake: Any, host: str) -> int:
    return int(next(agent["pid"] for agent in fake.agents() if agent["host"] == host))


def connection_of(pid: int) -> int:
    """The sshd process that holds the connection of a command."""
    done = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_a_connection_that_is_silent_for_a_while_does_not_end_the_mesh(
    impatient: tuple[list[object], Any],
) -> None:
    arguments, fake = impatient
    with up(*arguments) as running:
        running.read_until("is ready")
        agent = agent_of(fake, "mac2")
        silent = connection_of(agent)
        os.kill(silent, signal.SIGSTOP)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                running.process.wait(timeout=6.0)
        finally:
            os.kill(silent, signal.SIGCONT)
        assert agent_of(fake, "mac2") == agent and not is_gone(agent)
        assert running.end() == ExitCode.OK
    assert "lost" not in running.output
    assert is_gone(agent)


def test_a_connection_that_broke_is_made_again_and_the_agent_started_anew(
    impatient: tuple[list[object], Any],
) -> None:
    arguments, fake = impatient
    with up(*arguments) as running:
        running.read_until("is ready")
        agent = agent_of(fake, "mac2")
        os.kill(connection_of(agent), signal.SIGKILL)
        running.read_until("warning: The SSH connection to mac2 was lost")
        running.read_until("Reached mac2 again; its agent is started anew")
        wait_until(lambda: agent_of(fake, "mac2") != agent)
        fresh = agent_of(fake, "mac2")
        assert is_gone(agent) and not is_gone(fresh)
        assert running.end() == ExitCode.OK
    assert is_gone(fresh)


def test_ctrl_c_while_coming_up_leaves_nothing(local: tuple[Path, Any], state_home: Path) -> None:
    hostfile, fake = local
    fake.set_behaviour(mac1={"hang": True})
    with up(hostfile) as running:
        wait_until(fake.agents)
        running.read_until("a line before")
        assert running.end() == ExitCode.INTERRUPTED
    assert is_gone(fake.agents()[0]["pid"])
    assert not (state_home / "mlx-mesh" / "studio").exists()


@pytest.mark.parametrize("module", ["cli", "commands.up"])
def test_ctrl_c_during_the_imports_ends_without_a_traceback(module: str) -> None:
    code = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, path, target=None):\n"
        f"        if name == 'mlx_mesh.launcher.{module}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        "from mlx_mesh.launcher.__main__ import main\n"
        "sys.exit(main())\n"
    )
    words = [sys.executable, "-I", "-c", code, "up", "--help"]
    done = subprocess.run(words, capture_output=True, timeout=LIMIT_S)
    assert (done.returncode, done.stdout, done.stderr) == (ExitCode.INTERRUPTED, b"", b"")


def test_a_leader_without_a_tokenizer_is_told_before_anything_starts(local: tuple[Path, Any]) -> None:
    hostfile, fake = local
    fake.set_facts(tokenizer_error="/m has no tokenizer.")
    done = mesh("up", hostfile, "--dry-run")
    assert done.returncode == ExitCode.PREFLIGHT
    assert "mac1: model: /m has no tokenizer; the first host of the hostfile serves HTTP" in done.stderr
    assert fake.agents() == []


def test_up_of_a_running_name_is_refused_with_its_url(local: tuple[Path, Any]) -> None:
    with up(local[0]) as running:
        url = running.read_until(r"is ready: (\S+)/v1")[1]
        for extra in ([], ["--detach"]):
            again = mesh("up", local[0], *extra)
            assert again.returncode == ExitCode.ALREADY_RUNNING
            assert f"runs already at {url}" in again.stderr
        assert mesh("up", local[0], "--dry-run").returncode == ExitCode.OK
        assert running.end() == ExitCode.OK


def test_a_split_that_is_impossible_is_refused_before_anything_starts(local: tuple[Path, Any]) -> None:
    hostfile, fake = local
    hostfile.write_text(hostfile.read_text().replace("slots: 2", "slots: 5"))
    done = mesh("up", hostfile, "--sharding", "pipeline")
    assert done.returncode == ExitCode.PLACEMENT and "at most 4" in done.stderr.lower()
    assert fake.agents() == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["up"], "Give a hostfile, --sim N or --discover"),
        (["up", "none.yaml"], "none.yaml: cannot be read"),
        (["up", "--sim", "2"], "No model is named"),
        (["up", "--sim", "0", "--model", "m"], "out of range"),
        (["up", "--sim", "65", "--model", "m"], "out of range"),
        (["plan", "x" * 300], "too many for a path or a hub id"),
        (["up", "--sim", "2", "--sharding", "diag"], "'diag' is not known; use auto, tensor or pipeline"),
        (["chat", "--url", "http://127.0.0.1:no", "-p", "x"], "is no http:// address"),
        (["up", "--sim", "2", "--model", "m", "--backend", "mpi"], "are no MPI job"),
        (["up", "--sim", "2", "--model", "m", "--host", "0.0.0.0"], "there is no API key"),
        (["serve", "--model", "m", "--api-key-file", "/no/such"], "cannot be read"),
        (["status", "../not/there.yaml"], "cannot be read"),
        (["status", ".."], "must be 1 to 63"),
    ],
)
def test_bad_words_are_a_usage_error_without_a_traceback(arguments: list[str], words: str) -> None:
    done = mesh(*arguments)
    assert done.returncode == ExitCode.USAGE
    assert words in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["down", "status", "logs", "chat"])
@pytest.mark.parametrize("target", [[], ["nobody"]])
def test_what_does_not_run_is_told_so(command: str, target: list[str]) -> None:
    done = mesh(command, *target)
    assert done.returncode == ExitCode.NOT_RUNNING
    assert "No mesh" in done.stderr and "Traceback" not in done.stderr


def test_a_dry_run_shows_the_plan_and_writes_nothing(local: tuple[Path, Any], state_home: Path) -> None:
    done = mesh("up", local[0], "--dry-run")
    assert done.returncode == ExitCode.OK
    assert "rank" in done.stdout and "Dry run: nothing was started." in done.stdout
    assert not state_home.exists() and local[1].agents() == []


def test_debug_shows_a_traceback() -> None:
    assert "Traceback" in mesh("up", "none.yaml", "--debug").stderr


# ---------------------------------------------------------------- the other commands


def test_a_detached_mesh_is_shown_asked_and_taken_down(local: tuple[Path, Any], state_home: Path) -> None:
    hostfile, fake = local
    done = mesh("up", hostfile, "--detach")
    try:
        assert done.returncode == ExitCode.OK, done.stderr
        assert re.search(r"studio is ready: http://127.0.0.1:\d+/v1", done.stdout)
        assert "[0 mac1] loading 4/4" in done.stdout
        (agent,) = fake.agents()
        shown = mesh("status", hostfile)
        assert shown.returncode == ExitCode.OK and "studio: ready" in shown.stdout
        told = json.loads(mesh("status", "--json").stdout)
        assert told["status"]["world_size"] == 2 and told["ranks"][0]["host"] == "mac1"
        assert mesh("chat", "studio", "--prompt", "good day").stdout == "echo good day\n"
        logs = state_home / "mlx-mesh" / "studio" / "logs"
        logs.mkdir()
        (logs / "rank-1.log").write_text("2026-01-01 [1 mac1] first\n2026-01-01 [1 mac1] second\n")
        assert mesh("logs", "studio", "-n", 1).stdout == "2026-01-01 [1 mac1] second\n"
        wrong = mesh("logs", "studio", "--rank", 7)
        assert wrong.returncode == ExitCode.USAGE and "no rank 7; its ranks are 1." in wrong.stderr
    finally:
        down = mesh("down", "studio")
    assert down.returncode == ExitCode.OK and "Mesh studio is down." in down.stdout
    assert is_gone(agent["pid"])
    assert not (state_home / "mlx-mesh" / "studio" / "up.json").exists()


def test_a_detached_mesh_that_fails_tells_its_cause_and_leaves_nothing(local: tuple[Path, Any]) -> None:
    hostfile, fake = local
    fake.set_behaviour(mac1={"fail": "No memory for rank 1.", "exit_code": 5})
    done = mesh("up", hostfile, "--detach")
    assert done.returncode == ExitCode.BRING_UP
    assert "mlx-mesh: No memory for rank 1." in done.stderr
    assert is_gone(fake.agents()[0]["pid"])
    for command in (["status", "studio"], ["down", "studio"], ["status"]):
        asked = mesh(*command)
        assert asked.returncode == ExitCode.NOT_RUNNING
        assert re.search(r"The last one ended: No memory for rank 1 \(see .*launcher\.log\)", asked.stderr)


def test_a_leader_elsewhere_is_asked_through_ssh(over_ssh: tuple[list[object], Any, Any]) -> None:
    arguments, fake, sshd = over_ssh
    with up(*arguments) as running:
        running.read_until("is ready")
        wait_until(lambda: len(fake.agents()) == 3)
        shown = mesh("status", "three")
        assert shown.returncode == ExitCode.OK and "three: ready" in shown.stdout
        assert mesh("chat", "three", "--prompt", "hello").stdout == "echo hello\n"
        assert running.end() == ExitCode.OK
    assert "direct-tcpip" in (sshd.folder / "log").read_text() or shown.stdout


def test_a_detached_launcher_that_was_killed_is_cleaned_up_by_down(
    over_ssh: tuple[list[object], Any, Any], state_home: Path
) -> None:
    arguments, fake, _ = over_ssh
    fake.set_behaviour(mac2={"ignore_eof": True})
    assert mesh("up", *arguments, "--detach").returncode == ExitCode.OK
    state = json.loads((state_home / "mlx-mesh" / "three" / "up.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    wait_until(lambda: is_gone(state["pid"]))
    assert "Of three the launcher was killed" in mesh("status").stderr
    done = mesh("down")
    assert done.returncode == ExitCode.OK, done.stderr
    assert "The agent on mac2" in done.stdout and "was ended" in done.stdout
    assert all(is_gone(agent["pid"]) for agent in fake.agents())


def test_logs_are_followed_until_the_mesh_ends(local: tuple[Path, Any], state_home: Path) -> None:
    logs = state_home / "mlx-mesh" / "studio" / "logs"
    with up(local[0]) as running:
        running.read_until("is ready")
        logs.mkdir(parents=True)
        (logs / "rank-0.log").write_text("first\n")
        follower = subprocess.Popen([*MESH, "logs", "-f", "studio"], stdout=subprocess.PIPE, text=True)
        assert follower.stdout is not None
        assert follower.stdout.readline() == "[0] first\n"
        with (logs / "rank-0.log").open("a") as file:
            file.write("second\n")
        assert follower.stdout.readline() == "[0] second\n"
        assert running.end() == ExitCode.OK
        assert follower.wait(30) == ExitCode.OK
        follower.stdout.close()
