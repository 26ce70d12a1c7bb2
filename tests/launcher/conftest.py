"""A Python with a pretended mlx-mesh, and SSH servers on loopback with keys and settings of their own."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
VERSIONS = {"mlx_mesh": "0.1.0", "mlx": "0.32.4", "mlx_lm": "0.32.2", "python": "3.11.4", "protocol": 1}
FACTS: dict[str, Any] = {
    "hostname": "pretended",
    "system": "Linux",
    "machine": "x86_64",
    "chip": "none",
    "memory_bytes": 8 * 10**9,
    "usable_memory_bytes": 8 * 10**9,
    "addresses": ["127.0.0.1"],
    "versions": VERSIONS,
    "model_digest": "d" * 64,
    "model_error": "",
}
LAYER = {"weights_bytes": 10**6, "kv_bytes_per_token": 100}
FOOTPRINT = {
    "model_type": "llama",
    "model_digest": "d" * 64,
    "num_layers": 4,
    "layers": [LAYER] * 4,
    "embedding_bytes": 10**6,
    "head_bytes": 10**6,
    "tied_embedding": False,
    "legal_cuts": [1, 2, 3],
    "cut_reason": "",
    "hidden_bytes_per_token": 64,
    "context_length": 2048,
    "vocab_size": 100,
    "tensor": {
        "attention_units": 2,
        "attention_bytes": 10**6,
        "mlp_units": 8,
        "mlp_bytes": 3 * 10**6,
        "replicated_bytes": 2 * 10**6,
    },
}


@dataclass
class FakePython:
    """An interpreter in which `mlx_mesh` is a pretended one; what its agents do is told by `behaviour`."""

    folder: Path
    python: str
    site: Path

    def set_facts(self, **changes: Any) -> None:
        self._write("facts.json", {**FACTS, **changes})

    def set_behaviour(self, **behaviour: Any) -> None:
        self._write("behaviour.json", behaviour)

    def _write(self, name: str, data: Any) -> None:
        (self.folder / name).write_text(json.dumps(data))

    def agents(self) -> list[dict[str, Any]]:
        """What each started agent noted: pid, argv, config."""
        return [json.loads(path.read_text()) for path in sorted(self.folder.glob("agent-*.json"))]


@pytest.fixture
def fake_python(tmp_path: Path) -> Callable[..., FakePython]:
    """Makes interpreters: `fake_python("a")`. `without` names modules that it does not have."""

    def make(name: str, without: tuple[str, ...] = ()) -> FakePython:
        folder = tmp_path / f"python-{name}"
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        site = folder / "lib" / version / "site-packages"
        site.mkdir(parents=True)
        (folder / "bin").mkdir()
        base = Path(sys.executable).resolve()
        (folder / "bin" / "python").symlink_to(base)
        (folder / "pyvenv.cfg").write_text(f"home = {base.parent}\ninclude-system-site-packages = false\n")
        for module in ("mlx", "mlx_lm", "zmq", "fastapi", "uvicorn", "transformers"):
            if module not in without:
                (site / module).mkdir()
                (site / module / "__init__.py").touch()
        if "mlx" not in without:
            (site / "mlx" / "core.py").touch()
        (site / "msgspec.py").write_text(
            "import json as _json\n\n\nclass json:\n    @staticmethod\n    def encode(value):\n"
            "        return _json.dumps(value).encode()\n"
        )
        if "mlx_mesh" not in without:
            package = site / "mlx_mesh"
            (package / "node" / "engine").mkdir(parents=True)
            for place in (package, package / "node", package / "node" / "engine"):
                (place / "__init__.py").touch()
            shutil.copy(HERE / "support" / "fake_agent.py", package / "node" / "__main__.py")
            reader = f"import json, pathlib\nFOLDER = pathlib.Path({str(folder)!r})\n"
            (package / "node" / "facts.py").write_text(
                reader
                + "def gather_facts(*asked):\n    return json.loads((FOLDER / 'facts.json').read_text())\n"
            )
            (package / "node" / "engine" / "inspect.py").write_text(
                reader + "print((FOLDER / 'footprint.json').read_text())\n"
            )
        fake = FakePython(folder, str(folder / "bin" / "python"), site)
        fake.set_facts()
        fake.set_behaviour()
        fake._write("footprint.json", FOOTPRINT)
        return fake

    return make


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass
class Sshd:
    """An SSH server on 127.0.0.1 and this user's settings to reach it."""

    folder: Path
    port: int
    host_key: Path
    user_key: Path
    known_hosts: Path
    config: Path
    process: subprocess.Popen[bytes]
    aliases: list[str] = field(default_factory=list)

    def add_host(
        self, alias: str, *lines: str, port: int | None = None, host_name: str = "127.0.0.1"
    ) -> None:
        """A Host block in the settings file; `lines` come first and so win."""
        block = [f"Host {alias}", *(f"  {line}" for line in lines)]
        block += [
            f"  HostName {host_name}",
            f"  Port {port or self.port}",
            f"  IdentityFile {self.user_key}",
            "  IdentitiesOnly yes",
            "  IdentityAgent none",
            f"  UserKnownHostsFile {self.known_hosts}",
            "  GlobalKnownHostsFile none",
            "",
        ]
        with self.config.open("a") as file:
            file.write("\n".join(block) + "\n")

    def public_host_key(self) -> str:
        return Path(f"{self.host_key}.pub").read_text().strip()


def make_key(path: Path, *options: str) -> Path:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path), *options], check=True, timeout=30
    )
    return path


@pytest.fixture
def start_sshd(tmp_path: Path) -> Iterator[Callable[..., Sshd]]:
    """Starts SSH servers: `start_sshd("a", "MaxAuthTries 2")`; all end with the test."""
    if SSHD is None or shutil.which("ssh-keygen") is None:
        pytest.skip("needs sshd and ssh-keygen")
    if os.geteuid() == 0 and sys.platform == "linux":
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    started: list[Sshd] = []

    def start(name: str, *settings: str) -> Sshd:
        folder = tmp_path / f"sshd-{name}"
        folder.mkdir()
        host_key, user_key = make_key(folder / "host_key"), make_key(folder / "user_key")
        authorized = folder / "authorized_keys"
        shutil.copy(f"{user_key}.pub", authorized)
        for _ in range(5):  # the port was free a moment ago
            port = free_port()
            config = folder / "sshd_config"
            config.write_text(
                "\n".join(
                    [
                        *settings,
                        f"Port {port}",
                        "ListenAddress 127.0.0.1",
                        f"HostKey {host_key}",
                        "PidFile none",
                        f"AuthorizedKeysFile {authorized}",
                        "StrictModes no",
                        "PermitRootLogin yes",
                        "PasswordAuthentication no",
                        "KbdInteractiveAuthentication no",
                        "UsePAM no",
                        "UseDNS no",
                        "",
                    ]
                )
            )
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(
                    [SSHD or "", "-D", "-e", "-f", str(config)],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            if wait_for_banner(port, process):
                break
        else:
            pytest.fail((folder / "log").read_text())
        known = folder / "known_hosts"
        public = Path(f"{host_key}.pub").read_text().split()
        known.write_text(f"[127.0.0.1]:{port} {public[0]} {public[1]}\n")
        sshd = Sshd(folder, port, host_key, user_key, known, folder / "ssh_config", process)
        started.append(sshd)
        return sshd

    yield start
    for sshd in started:
        sshd.process.kill()
        sshd.process.wait()


def wait_for_banner(port: int, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
                return sock.recv(4) == b"SSH-"
        except OSError:
            time.sleep(0.02)
    return False


@pytest.fixture
def state_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state root of this test alone."""
    home = tmp_path / "state"
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    return home
