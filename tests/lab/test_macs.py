"""From nothing to a served model on imagined Macs, over real SSH and real cables: the commands of the two-Mac
guide in their order."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlx_mesh.mesh.errors import ExitCode

MESH = [sys.executable, "-I", "-u", "-m", "mlx_mesh.launcher"]
LIMIT_S = 240.0


class User:
    """Somebody at mac1."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.hosts = lab.home("mac1") / "hosts.yaml"

    def types(self, *words: object, status: int = 0) -> str:
        done = self.lab.run("mac1", *MESH, *words, timeout_s=LIMIT_S)
        assert done.returncode == status, (words, done.returncode, done.stdout)
        return str(done.stdout)

    def trusts_all(self) -> None:
        """Every host's key, after comparing it; another one is refused."""
        (self.lab.home("mac1") / ".ssh" / "known_hosts").unlink()
        told = self.types("init", *self.others, "-o", self.hosts, status=ExitCode.PREFLIGHT)
        assert told.count("UNKNOWN host key") == len(self.others) and not self.hosts.exists()
        for host in self.others:
            key = self.lab.folder / host / "host_key.pub"
            shown = subprocess.run(["ssh-keygen", "-lf", key], capture_output=True, text=True, check=True)
            wrong = self.types("trust", host, "--fingerprint", "SHA256:x", status=ExitCode.PREFLIGHT)
            assert "SHA256:x was asked for" in wrong
            self.types("trust", host, "--fingerprint", shown.stdout.split()[1])

    def sees_all(self) -> None:
        """Each host that waits is discovered, as the Mac that it is, and by its own name."""
        waiting = [self.lab.start(host, [*MESH, "agent", "--pair"]) for host in self.others]
        try:
            for agent in waiting:
                said = ""
                while "Announced as" not in said:
                    line = agent.stdout.readline()
                    assert line, said
                    said += line
            report = json.loads(self.types("discover", "--json", "--timeout", 3))
            seen = {row["name"]: row["verdict"]["what"] for row in report["hosts"]}
            assert {host: seen.get(host) for host in self.others} == dict.fromkeys(self.others, "usable")
        finally:
            for agent in waiting:
                agent.terminate()
                agent.communicate(timeout=LIMIT_S)

    @property
    def others(self) -> list[str]:
        return list(self.lab.hosts[1:])

    def writes_hosts(self, model: Path) -> str:
        return self.types(
            "init",
            *self.others,
            "-o",
            self.hosts,
            "--name",
            "lab",
            "--model",
            model,
            "--python",
            sys.executable,
        )

    def findings(self) -> list[dict[str, str]]:
        done = self.lab.run("mac1", *MESH, "doctor", self.hosts, "--json", timeout_s=LIMIT_S)
        found: list[dict[str, str]] = json.loads(done.stdout)
        assert not [f for f in found if f["level"] == "fail"], [f for f in found if f["level"] == "fail"]
        return found


def pairs_of(findings: list[dict[str, str]], check: str) -> dict[str, tuple[str, str]]:
    return {f["host"]: (f["level"], f["evidence"]) for f in findings if f["check"] == check}


@pytest.mark.long
def test_macs_in_a_bridge_are_set_up_by_their_own_commands(mac_lab: Any, tiny_llama: Path) -> None:
    user = User(mac_lab("tb5-2-bridge"))
    told = user.writes_hosts(tiny_llama)
    assert "mac2: Apple M4 Pro, 64 GB, macOS 26.2 (25C56)" in told
    assert "the Thunderbolt cable (en2 and en2) has no addresses of its own yet" in told
    user.types("net", "plan", user.hosts, "--apply")
    assert "Nothing is to be done." in user.types("net", "plan", user.hosts)


@pytest.mark.long
def test_what_is_left_to_a_user_which_links_are_planned_and_the_way_back(
    mac_lab: Any, tiny_llama: Path
) -> None:
    lab = mac_lab("tb5-2-bridge")
    user = User(lab)
    user.writes_hosts(tiny_llama)
    before = user.findings()
    assert pairs_of(before, "cable")["mac1 - mac2"][0] == "warn"
    state = lab.programs("mac2") / "mac.json"
    state.write_text(state.read_text().replace('"asks_for_password": false', '"asks_for_password": true'))
    told = user.types("net", "plan", user.hosts, "--apply", status=ExitCode.PREFLIGHT)
    assert "mac2: `sudo -n` does not work there (sudo: a password is required)" in told
    assert "mac1: sudo networksetup -setmanual 'mlx-mesh en2' 10.201.77.1 255.255.255.252: done" in told
    state.write_text(state.read_text().replace('"asks_for_password": true', '"asks_for_password": false'))
    user.types("net", "plan", user.hosts, "--apply")
    assert "Nothing is to be done." in user.types("net", "plan", user.hosts)
    after = user.findings()
    assert pairs_of(after, "cable")["mac1 - mac2"][0] == "ok"
    dialled = pairs_of(after, "dial")
    assert {level for level, _ in dialled.values()} == {"ok"} and "10.201.77." in dialled["mac1 - mac2"][1]
    dry = user.types("up", user.hosts, "--dry-run")
    assert "backend jaccl: every pair of hosts has an RDMA cable" in dry
    dry = user.types("up", user.hosts, "--dry-run", "--backend", "ring")
    assert re.search(r"link mac1 en2 - mac2 en2 \(thunderbolt, 10\.201\.77\.\d+\)", dry)
    dry = user.types("up", user.hosts, "--dry-run", "--backend", "ring", "--interface", "^en2")
    assert "link mac1 en0 - mac2 en0 (ethernet, 10.77.0.2)" in dry
    user.types("net", "plan", user.hosts, "--undo", "--apply")
    assert "Nothing is to be undone." in user.types("net", "plan", user.hosts, "--undo")
    assert [f["evidence"] for f in user.findings() if f["check"] == "bridge"] == [
        f["evidence"] for f in before if f["check"] == "bridge"
    ]


SPECIAL = {
    "tb5-2 with addresses": ("dial", "ok"),
    "M1 with Thunderbolt 4": ("rdma", "note"),
    "Wi-Fi only": ("interfaces", "fail"),
    "overlapping subnets": ("subnets", "fail"),
    "a VPN whose route covers the cable": ("vpn", "warn"),
    "a DHCP lease on bridge0": ("bridge", "fail"),
    "lid closed on battery": ("power", "warn"),
    "Rosetta Python": ("architecture", "fail"),
    "different macOS builds": ("system", "warn"),
}
"""What doctor has to say of hosts that are special, as its first failure if it is one."""


@pytest.mark.long
@pytest.mark.parametrize("name", SPECIAL)
def test_doctor_and_net_plan_over_ssh_say_what_is_special_about_hosts(
    name: str, mac_lab: Any, tiny_llama: Path
) -> None:
    check, level = SPECIAL[name]
    user = User(mac_lab(name))
    user.writes_hosts(tiny_llama)
    done = user.lab.run("mac1", *MESH, "doctor", user.hosts, "--json", timeout_s=LIMIT_S)
    found = json.loads(done.stdout)
    assert (check, level) in {(f["check"], f["level"]) for f in found}
    failures = [f["check"] for f in found if f["level"] == "fail"]
    assert failures[:1] == ([check] if level == "fail" else []), [f for f in found if f["level"] == "fail"]
    assert (done.returncode == 0) == (not failures)
    plan = json.loads(user.types("net", "plan", user.hosts, "--json"))
    is_done = not any(host["steps"] for host in plan["hosts"])
    assert is_done == (name not in ("overlapping subnets", "a DHCP lease on bridge0")), plan
    if name == "overlapping subnets":
        assert plan["cables"][0]["addresses"] == ["10.201.77.1/30", "10.201.77.2/30"]
    if name == "Wi-Fi only":
        assert plan["cables"] == [] and "no Thunderbolt cable" in plan["notes"][0]


@pytest.mark.long
@pytest.mark.parametrize("name", ["tb5-2", "tb5-4", "tb5-2-bridge", "tb5-2-nordma"])
def test_a_model_is_served_over_the_cables(name: str, mac_lab: Any, tiny_llama: Path) -> None:
    lab = mac_lab(name)
    user = User(lab)
    user.trusts_all()
    user.sees_all()
    shutil.copytree(tiny_llama, lab.home("mac1") / "models" / "tiny-llama")
    user.writes_hosts(Path("~/models/tiny-llama"))
    user.types("net", "plan", user.hosts, "--apply")
    assert "Nothing is to be done." in user.types("net", "plan", user.hosts)
    for host in user.others:
        assert not list(lab.home(host).glob("**/*.safetensors")), "only mac1 has the model so far"
    user.types("sync", "~/models/tiny-llama", user.hosts)
    for host in user.others:
        assert list((lab.home(host) / ".cache" / "mlx-mesh" / "delivered").glob("**/*.safetensors"))
    findings = user.findings()
    assert {level for level, _ in pairs_of(findings, "dial").values()} == {"ok"}
    has_rdma = name != "tb5-2-nordma"
    dry = user.types("up", user.hosts, "--dry-run")
    why = "every pair of hosts has an RDMA cable" if has_rdma else "mac1 has no RDMA devices"
    assert f"backend {'jaccl' if has_rdma else 'ring'}: {why}" in dry
    if not has_rdma:
        refused = user.types("up", user.hosts, "--backend", "jaccl", status=ExitCode.PREFLIGHT)
        assert "backend jaccl cannot be had: mac1 has no RDMA devices" in refused
    backend = ["--backend", "ring"] if has_rdma else []  # there is no RDMA in the lab
    served = user.types("up", user.hosts, "--detach", *backend)
    try:
        assert "lab is ready" in served
        told = json.loads(user.types("status", "lab", "--json"))
        links = [rank["link"] for rank in told["ranks"]]
        assert len(links) == len(lab.hosts)
        for link in links:
            assert (link["link_class"], link["evidence"][:11]) == ("thunderbolt", "Thunderbolt")
            assert link["peer_address"].startswith("10.201.77.") and re.fullmatch(r"en\d", link["interface"])
            assert link["rtt_ms"] > 0 and link["bandwidth_bytes_per_s"] > 0
        shown = user.types("status", "lab")
        assert "held awake: mac1 by caffeinate" in shown and "GB/s" in shown
        if not has_rdma:
            assert "backend ring (mac1 has no RDMA devices" in shown
        user.types("chat", "lab", "--prompt", "Hello", "--max-tokens", 4)
        for host in lab.hosts:
            (awake,) = [line for line in lab.processes(host).values() if "caffeinate" in line]
            assert re.search(r"-i -m -s -w \d+$", awake)
    finally:
        user.types("down", "lab")
    assert {host: lab.processes(host) for host in lab.hosts} == {host: {} for host in lab.hosts}
    user.types("net", "plan", user.hosts, "--undo", "--apply")
