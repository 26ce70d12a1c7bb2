"""The two-Mac guide: every command in it is run as it stands there, in its order, between imagined Macs."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_mesh.mesh.errors import ExitCode

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "MLX_TWO_NODE_README.md").read_text("utf-8")
LIMIT_S = 240.0
MODEL = "mlx-community/Qwen3-30B-A3B-4bit"

IN_ENVIRONMENT = 'export PATH="$HOME/.venvs/mlx-mesh/bin:$PATH"'

EXCEPTIONS = {
    "git clone <this repository> mlx-mesh": "there is no network in the lab; CI runs in a clone",
    "python3.11 -m venv ~/.venvs/mlx-mesh": "this test's own environment stands for it",
    "~/.venvs/mlx-mesh/bin/pip install ./mlx-mesh": "no package index; CI's environment is made by pip",
    "ssh-keygen -t ed25519": "asks; the lab's user has a key",
    "ssh-copy-id mac2.local": "asks for a password, and the lab's hosts take none",
    "rdma_ctl enable": "is typed in macOS Recovery, at the Mac",
}
"""Commands that no lab can run, and why."""

ANSWERS = {"mlx-mesh trust mac2.local": b"yes\n"}
"""What a person types at the terminal."""

UNTIL = {"mlx-mesh up hosts.yaml": "studio is ready"}
"""Commands that go on until Ctrl-C, which comes after these words."""

SAYS = {
    "mlx-mesh trust mac2.local": r"mac2\.local shows ssh-ed25519 SHA256:\S+",
    f"mlx-mesh init mac2.local --install --name studio --model {MODEL}": r"(?s)mac2: packages: installed"
    r".*the Thunderbolt cable \(en2 and en2\) has no addresses.*wrote hosts\.yaml",
    "mlx-mesh doctor hosts.yaml": r"warn  mac1 - mac2: cable: .* has no addresses at both ends",
    "mlx-mesh net plan hosts.yaml": r"sudo networksetup -setmanual 'mlx-mesh en2' 10\.201\.77\.2",
    "mlx-mesh net plan hosts.yaml --apply": r"mac2: sudo networksetup -setmanual .*: done",
    "mlx-mesh doctor hosts.yaml --verbose": r"(?s)link: mac. en2 - mac. en2 \(thunderbolt"
    r".*dial: mac1 reaches mac2 at 10\.201\.77\.",
    "rdma_ctl status": r"disabled",
    "mlx-mesh up hosts.yaml --dry-run": r"(?s)backend ring: mac1 has no RDMA.*link mac1 en2 - mac2 en2",
    "mlx-mesh status studio": r"(?s)en2 \(Thunderbolt 1\).*ms.*GB/s",
    "mlx-mesh logs studio --rank 1": r"\[1",
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)


def commands() -> Iterator[str]:
    """In their order, without comments."""
    for block in blocks("sh"):
        for line in block.splitlines():
            command = re.sub(r"\s{2,}#.*", "", line).strip()
            if command:
                yield command


MANUAL = [command for command in commands() if command.startswith("RANK=")]


def test_every_command_of_the_guide_is_run_or_an_exception_with_its_reason() -> None:
    found = list(commands())
    assert len(found) > 25 and len(set(found)) == len(found)
    named = [*EXCEPTIONS, *ANSWERS, *UNTIL, *SAYS]
    assert [command for command in named if command not in found] == []
    assert all(EXCEPTIONS.values()) and len(MANUAL) == 2
    assert len([command for command in found if command not in EXCEPTIONS]) > 20
    # A fence in another language would hide commands.
    assert set(re.findall(r"^```(\w+)$", GUIDE, re.MULTILINE)) == {"sh", "ini"}


class Terminal:
    """A shell at one host, as in the guide: in the home folder, with the environment of step 2."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self._masters: list[int] = []

    def start(self, host: str, command: str, answer: bytes = b"") -> subprocess.Popen[str]:
        master, slave = pty.openpty()
        os.write(master, answer)
        home = self.lab.home(host)
        try:
            return subprocess.Popen(
                self.lab._inside(host, ["/bin/bash", "-c", f"cd; {IN_ENVIRONMENT}; exec {command}"]),
                stdin=slave,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env={
                    "HOME": str(home),
                    "PATH": f"{self.lab.programs(host)}:{os.environ['PATH']}:/usr/sbin:/sbin",
                    "USER": "root",
                    "LANG": "C.UTF-8",
                },
            )
        finally:
            os.close(slave)
            self._masters.append(master)

    def close(self) -> None:
        while self._masters:
            os.close(self._masters.pop())

    def run(self, host: str, command: str, answer: bytes = b"") -> str:
        process = self.start(host, command, answer)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        assert process.returncode == 0, (command, process.returncode, output)
        return output


class Going:
    """A command that goes on, and what it said."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.output = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + LIMIT_S
        while words not in self.output:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output[-3000:]
            self._reader.join(0.05)

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(LIMIT_S)
        self._reader.join(10)
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def terminal(mac_lab: Any, lab_wheels: ModuleType, tmp_path: Path, tiny_llama: Path) -> Iterator[Terminal]:
    """Two Macs as they come out of step 2: mlx-mesh on mac1, a package index for mac2, nobody's key known."""
    lab = mac_lab("tb5-2-nordma")
    (lab.home("mac1") / ".ssh" / "known_hosts").unlink()
    lab_wheels.fill(tmp_path / "index")
    lab_wheels.use(lab.home("mac2"), tmp_path / "index")
    venv = lab.home("mac1") / ".venvs" / "mlx-mesh"
    venv.parent.mkdir()
    venv.symlink_to(sys.prefix)
    for host in lab.hosts:  # the guide's model, in place of a download
        folder = lab.home(host) / MODEL
        folder.parent.mkdir()
        folder.symlink_to(tiny_llama)
    made = Terminal(lab)
    yield made
    made.close()


@pytest.mark.long
def test_the_commands_of_the_guide_work_in_their_order(terminal: Terminal) -> None:
    secret = ""
    for command in commands():
        if command in EXCEPTIONS or command == IN_ENVIRONMENT:
            continue
        if command == MANUAL[0]:
            run_manually(terminal, secret)
        elif command == MANUAL[1]:
            continue  # beside the first one
        elif command in UNTIL:
            going = Going(terminal.start("mac1", command))
            try:
                going.wait_for(UNTIL[command])
                assert going.interrupt() == ExitCode.OK, going.output
            finally:
                going.close()
        else:
            output = terminal.run("mac1", command, ANSWERS.get(command, b""))
            assert re.search(SAYS.get(command, ""), output), (command, output)
            if "token_hex" in command:
                secret = output.strip()


def run_manually(terminal: Terminal, secret: str) -> None:
    (settings,) = blocks("ini")
    assert "MLX_MESH_SECRET=..." in settings and len(secret) == 64
    going = []
    try:
        for host, command in zip(("mac1", "mac2"), MANUAL, strict=True):
            (terminal.lab.home(host) / ".env").write_text(settings.replace("...", secret))
            going.append(Going(terminal.start(host, f"env {command}")))
        going[0].wait_for("http://127.0.0.1:18000")
        terminal.run("mac1", "curl -sf http://127.0.0.1:18000/health")
        assert going[0].interrupt() == ExitCode.OK
    finally:
        for one in going:
            one.close()
