"""Whole meshes on this machine, started by the command that users type."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

READY_WITHIN_S = 120.0
GONE_WITHIN_S = 30.0


@dataclass(frozen=True)
class Mesh:
    """A mesh that is ready."""

    name: str
    url: str
    launcher: subprocess.Popen[bytes]
    output: Path

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=240)

    def processes(self) -> set[int]:
        """Linux: pids of the launcher and of all that descend from it."""
        parents = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                with contextlib.suppress(OSError):
                    stat = (folder / "stat").read_text()
                    parents[int(folder.name)] = int(stat.rpartition(")")[2].split()[1])
        family = {self.launcher.pid}
        while more := {pid for pid, parent in parents.items() if parent in family} - family:
            family |= more
        return family

    def wait_until_asked(self) -> None:
        """A request is open: it has no token yet, or has just got its first ones."""
        deadline = time.monotonic() + 60
        while "mlx_mesh_requests_open 0.0" in httpx.get(f"{self.url}/metrics", timeout=10).text:
            assert time.monotonic() < deadline
            time.sleep(0.02)  # the poll interval of a wait that has a deadline

    def stop(self) -> int:
        """Ctrl-C, and the exit status."""
        self.launcher.send_signal(signal.SIGINT)
        return self.launcher.wait(GONE_WITHIN_S)


StartMesh = Callable[..., contextlib.AbstractContextManager[Mesh]]


@pytest.fixture
def start_mesh(tmp_path: Path) -> StartMesh:
    """`start_mesh("up", "--sim", "2", "--model", folder)`: a context manager that gives a Mesh."""

    @contextlib.contextmanager
    def start(command: str, *arguments: str) -> Iterator[Mesh]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        output = tmp_path / f"launcher-{port}.log"
        name = f"test-{port}"
        program = [sys.executable, "-I", "-u", "-m", "mlx_mesh.launcher", command]
        environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")}
        with output.open("wb") as log:
            launcher = subprocess.Popen(
                [*program, *arguments, "--name", name, "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
            )
        mesh = Mesh(name, f"http://127.0.0.1:{port}", launcher, output)
        try:
            _wait_until_ready(mesh)
            yield mesh
        finally:
            if launcher.poll() is None:
                launcher.send_signal(signal.SIGINT)
                try:
                    launcher.wait(GONE_WITHIN_S)
                except subprocess.TimeoutExpired:
                    launcher.kill()
                    launcher.wait()

    return start


def _wait_until_ready(mesh: Mesh) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{mesh.url}/ready", timeout=5).status_code == 200:
                return
        if mesh.launcher.poll() is not None or time.monotonic() > deadline:
            pytest.fail(f"the mesh did not become ready:\n{mesh.output.read_text()}")
        time.sleep(0.1)  # the poll interval of a wait that has a deadline
