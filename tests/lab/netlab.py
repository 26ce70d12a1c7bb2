"""A few hosts on one Linux machine: a network namespace each, joined by a bridge in one more, with an sshd,
a home, an /etc/hosts and an /etc/passwd of their own. Files, CPU and pids are shared.

No host has a way out of its /24, and the machine's own network is not touched: whatever a test does on a host
stays in the lab. `stop` works from what is really there, so also after a failed `start`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.77.0"
TOOLS = ("ip", "sshd", "ssh", "ssh-keygen", "unshare")
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
DEADLINE_S = 15.0


def why_not() -> str:
    """Why there can be no lab here; '' when there can."""
    if sys.platform != "linux":
        return "the lab needs Linux's network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
    if missing:
        return f"the lab needs {', '.join(missing)}"
    probe = subprocess.run(
        ["ip", "netns", "add", f"mmprobe{os.getpid()}"], capture_output=True, text=True, check=False
    )
    if probe.returncode != 0:
        return f"no network namespaces here: {probe.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", f"mmprobe{os.getpid()}"], check=False)
    return ""


class Lab:
    """Hosts mac1 .. macN at 10.77.0.1 .. N. Use as a context manager."""

    def __init__(self, folder: Path, num_hosts: int, shells: dict[str, str] | None = None) -> None:
        self.folder = folder
        self.hosts = [f"mac{number}" for number in range(1, num_hosts + 1)]
        self._shells = shells or {}
        self._tag = f"mm{os.getpid()}"
        self._switch = f"{self._tag}-switch"
        self._sshds: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Lab:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    # ------------------------------------------------------------ names and places

    def address(self, host: str) -> str:
        return f"{NETWORK}.{host[3:]}"

    def home(self, host: str) -> Path:
        return self.folder / host / "home"

    def programs(self, host: str) -> Path:
        """A folder that is first on that host's PATH, also over SSH."""
        return self.folder / host / "bin"

    def namespace(self, host: str) -> str:
        return f"{self._tag}-{host}"

    # ------------------------------------------------------------ use

    def start(self, host: str, words: Sequence[object]) -> subprocess.Popen[str]:
        """A process on a host, with that host's home and a plain environment."""
        path = f"{self.programs(host)}:{PATH}"
        environment = {"HOME": str(self.home(host)), "PATH": path, "USER": "root", "LANG": "C.UTF-8"}
        return subprocess.Popen(
            self._inside(host, words),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd="/",
        )

    def run(self, host: str, *words: object, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """A command on a host, to its end; both streams in stdout."""
        process = self.start(host, words)
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except BaseException:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess([str(word) for word in words], process.returncode, output, "")

    def processes(self, host: str) -> dict[int, str]:
        """{pid: command line} of what lives on a host, without its sshd and the sessions of it."""
        inode = Path(f"/run/netns/{self.namespace(host)}").stat().st_ino
        found: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or (entry / "ns/net").stat().st_ino != inode:
                    continue
                command = (
                    (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
                )
                if command and not command.startswith(
                    ("sshd:", "/usr/sbin/sshd", str(shutil.which("sshd", path=PATH)))
                ):
                    found[int(entry.name)] = command
        return found

    def listening(self, host: str) -> set[int]:
        """TCP ports that somebody listens on there, without sshd's."""
        return {port for _, port in self.listening_at(host)}

    def listening_at(self, host: str) -> set[tuple[str, int]]:
        """The same with the address of each, which is "0.0.0.0" for all of them."""
        found: set[tuple[str, int]] = set()
        for name in ("tcp", "tcp6"):
            for line in self.run(host, "cat", f"/proc/self/net/{name}").stdout.splitlines()[1:]:
                _, local, _, state, *_ = line.split()
                address, _, port = local.rpartition(":")
                if state == "0A" and int(port, 16) != 22:
                    numbers = reversed(bytes.fromhex(address[-8:]))
                    found.add((".".join(map(str, numbers)), int(port, 16)))
        return found

    def files(self, host: str) -> set[str]:
        """Files in a host's home but for ~/.ssh and the shell's."""
        home = self.home(host)
        names = {str(path.relative_to(home)) for path in home.rglob("*") if not path.is_dir()}
        return {name for name in names if not name.startswith((".ssh/", ".bashrc"))}

    def join(self, one: str, interface: str, other: str, peer: str) -> None:
        """A cable between two hosts, with an interface at each end that has no address yet."""
        self._ip(
            *("-n", self.namespace(one), "link", "add", interface, "type", "veth"),
            *("peer", "name", peer, "netns", self.namespace(other)),
        )
        for host, name in ((one, interface), (other, peer)):
            self._ip("-n", self.namespace(host), "link", "set", name, "up")

    def add_interface(self, host: str, interface: str) -> None:
        """One that leads nowhere, as a tunnel's."""
        space = self.namespace(host)
        self._ip("-n", space, "link", "add", interface, "type", "veth", "peer", "name", f"{interface}x")
        for name in (interface, f"{interface}x"):
            self._ip("-n", space, "link", "set", name, "up")

    def add_route(self, host: str, network: str, interface: str) -> None:
        self._ip("-n", self.namespace(host), "route", "add", network, "dev", interface)

    def give_address(self, host: str, interface: str, address: str) -> None:
        """`address` with prefix, as in "10.9.0.1/24"."""
        self._ip("-n", self.namespace(host), "addr", "add", address, "dev", interface)

    def copy_identity(self, source: str, host: str) -> None:
        """As if one's disk had been cloned to the other: the same SSH host key."""
        key = "ssh/ssh_host_ed25519_key.pub"
        etc = Path("/etc/netns")
        shutil.copy(etc / self.namespace(source) / key, etc / self.namespace(host) / key)

    def cut(self, host: str) -> None:
        """Take a host off the bridge: nobody is told, packets just vanish."""
        self._ip("-n", self._switch, "link", "set", host, "nomaster")

    def heal(self, host: str) -> None:
        self._ip("-n", self._switch, "link", "set", host, "master", "br0")

    # ------------------------------------------------------------ start and stop

    def _start(self) -> None:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()
        self._ip("netns", "add", self._switch)
        self._ip("-n", self._switch, "link", "add", "br0", "type", "bridge", "forward_delay", "0")
        self._ip("-n", self._switch, "link", "set", "br0", "up")
        self._make_keys()
        for host in self.hosts:
            self._make_host(host)
        for host in self.hosts:
            self._wait_for_sshd(host)

    def _make_keys(self) -> None:
        for host in self.hosts:
            (self.folder / host).mkdir()
            self._make_key(self.folder / host / "host_key")
        self._make_key(self.folder / "user_key")
        self._known_hosts = "".join(
            f"{host},{host}.local,{self.address(host)} "
            + " ".join((self.folder / host / "host_key.pub").read_text().split()[:2])
            + "\n"
            for host in self.hosts
        )

    def _make_key(self, path: Path) -> None:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, timeout=30
        )

    def _make_host(self, host: str) -> None:
        folder, etc, space = (
            self.folder / host,
            Path("/etc/netns") / self.namespace(host),
            self.namespace(host),
        )
        self.programs(host).mkdir()
        ssh = self.home(host) / ".ssh"
        ssh.mkdir(parents=True, mode=0o700)
        for name in ("user_key", "user_key.pub"):
            shutil.copy(self.folder / name, ssh / name.replace("user_key", "id_ed25519"))
        (ssh / "known_hosts").write_text(self._known_hosts)
        etc.mkdir(parents=True)
        shell = self._shells.get(host, "/bin/bash")
        others = [
            line for line in Path("/etc/passwd").read_text().splitlines() if not line.startswith("root:")
        ]
        (etc / "passwd").write_text("\n".join([f"root:x:0:0:root:{self.home(host)}:{shell}", *others, ""]))
        (etc / "shadow").write_text("root:*:19000:0:99999:7:::\n")
        names = "".join(f"{self.address(other)} {other} {other}.local\n" for other in self.hosts)
        (etc / "hosts").write_text("127.0.0.1 localhost\n" + names)
        (etc / "resolv.conf").write_text("# no name server in the lab\n")
        (etc / "ssh").mkdir()
        shutil.copy(folder / "host_key.pub", etc / "ssh" / "ssh_host_ed25519_key.pub")
        self._ip("netns", "add", space)
        self._ip(
            "-n", self._switch, "link", "add", host, "type", "veth", "peer", "name", "en0", "netns", space
        )
        self._ip("-n", space, "link", "set", "lo", "up")
        self._ip("-n", space, "addr", "add", f"{self.address(host)}/24", "dev", "en0")
        self._ip("-n", space, "link", "set", "en0", "up")
        self._ip("-n", self._switch, "link", "set", host, "master", "br0", "up")
        config = folder / "sshd_config"
        config.write_text(
            f"Port 22\nHostKey {folder}/host_key\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/user_key.pub\n"
            f"SetEnv PATH={self.programs(host)}:{PATH}\n"
            "StrictModes no\nPermitRootLogin prohibit-password\nPasswordAuthentication no\nUsePAM no\n"
            "KbdInteractiveAuthentication no\nUseDNS no\n"
        )
        with (folder / "sshd.log").open("wb") as log:
            self._sshds[host] = subprocess.Popen(
                self._inside(host, [shutil.which("sshd", path=PATH), "-D", "-e", "-f", config]),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                env={"PATH": PATH},
            )

    def _wait_for_sshd(self, host: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            lines = self.run(host, "cat", "/proc/self/net/tcp").stdout.splitlines()[1:]
            if any(line.split()[1].endswith(":0016") and line.split()[3] == "0A" for line in lines):
                return
            if time.monotonic() > deadline:
                raise TimeoutError((self.folder / host / "sshd.log").read_text())
            time.sleep(0.05)

    def stop(self) -> None:
        """End everything that lives in the lab's namespaces, and remove them."""
        for name in (*map(self.namespace, self.hosts), self._switch):
            self._remove(name)
        for sshd in self._sshds.values():
            sshd.wait()
        self._sshds.clear()

    def _remove(self, name: str) -> None:
        if Path(f"/run/netns/{name}").exists():
            self._kill_all(name)
            self._ip("netns", "del", name)
        shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)

    def _remove_leftovers(self) -> None:
        """Of labs whose test run was killed: their names carry its pid."""
        for path in Path("/run/netns").glob("mm*-*"):
            pid = path.name.removeprefix("mm").partition("-")[0]
            if pid.isdigit() and not Path(f"/proc/{pid}").exists():
                self._remove(path.name)

    def _kill_all(self, space: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while pids := subprocess.run(
            ["ip", "netns", "pids", space], capture_output=True, text=True, check=False
        ).stdout.split():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for sshd in self._sshds.values():
                sshd.poll()  # a zombie still counts
            if time.monotonic() > deadline:
                raise TimeoutError(f"{pids} in {space} do not end")
            time.sleep(0.02)

    def _inside(self, host: str, words: Sequence[object]) -> list[str]:
        """A process keeps the pid: every one of these execs the next."""
        name = ["sh", "-c", 'echo "$0" > /proc/sys/kernel/hostname; exec "$@"', host]
        return ["ip", "netns", "exec", self.namespace(host), "unshare", "--uts", *name, *map(str, words)]

    def _ip(self, *words: str) -> None:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")
