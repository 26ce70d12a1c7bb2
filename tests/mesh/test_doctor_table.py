"""Faults that are planted, and doctor's first line that is not right: the table of docs/doctor.md.

`MLX_MESH_WRITE_DOCS=1` with this test writes the table; without, the test fails when the page says otherwise.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.doctor import (
    Examined,
    Finding,
    Level,
    Question,
    duplicates,
    examine,
    first_failure,
)
from mlx_mesh.mesh.pair_checks import Dialled, PairHost, dial_finding, neighbours, pair_findings
from mlx_mesh.mesh.types import Backend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "doctor.md"
BEGIN, END = "<!-- made by tests/mesh/test_doctor_table.py -->", "<!-- end -->"
GB = 10**9

Hosts = list[Examined]


class Planted:
    """Two hosts with one thing wrong, how doctor is asked, and the check that has to say it first."""

    def __init__(
        self,
        check: str,
        level: Level,
        hosts: Callable[[ModuleType], Hosts],
        *,
        backend: Backend = Backend.AUTO,
        keys: tuple[str, str] = ("", "ssh-ed25519 B"),
        dialled: Dialled | None = None,
        rules: tuple[str, ...] = (),
    ) -> None:
        self.check, self.level = check, level
        self._hosts, self._backend, self._keys = hosts, backend, keys
        self._dialled, self._rules = dialled, rules

    def findings(self, macs: ModuleType) -> list[Finding]:
        hosts = self._hosts(macs)
        found = examine(hosts, Question(backend=self._backend, num_hosts=len(hosts)))
        found += duplicates(list(zip(hosts, self._keys, strict=True)))
        pairs = [PairHost(examined=host, rules=self._rules) for host in hosts]
        found += pair_findings(pairs)
        if self._dialled is not None:
            found.append(dial_finding(pairs[0], pairs[1], "10.0.0.2", self._dialled))
        return found


def examined(macs: ModuleType, made: Sequence[Any]) -> Hosts:
    return [
        Examined(name=f"mac{mac.number}", report=macs.report_of(mac), is_leader=index == 0)
        for index, mac in enumerate(made)
    ]


def fixture(name: str) -> Callable[[ModuleType], Hosts]:
    return lambda macs: examined(macs, macs.fixtures()[name])


def mac(**change: Any) -> Callable[[ModuleType], Hosts]:
    """The second of two Macs on a cable is changed."""

    def made(macs: ModuleType) -> Hosts:
        one, other = macs.on_cable(macs.Mac())
        return examined(macs, [one, replace(other, **change)])

    return made


def both(**change: Any) -> Callable[[ModuleType], Hosts]:
    """`change` is to both Macs; `@` in an address becomes the number of each."""

    def numbered(value: Any, number: int) -> Any:
        return tuple(text.replace("@", str(number)) for text in value) if isinstance(value, tuple) else value

    return lambda macs: examined(
        macs,
        [
            replace(m, **{key: numbered(value, m.number) for key, value in change.items()})
            for m in macs.on_cable(macs.Mac())
        ],
    )


def report(**change: Any) -> Callable[[ModuleType], Hosts]:
    def made(macs: ModuleType) -> Hosts:
        one, other = mac()(macs)
        return [one, msgspec.structs.replace(other, report=msgspec.structs.replace(other.report, **change))]

    return made


def facts(is_leaders: bool = False, **change: Any) -> Callable[[ModuleType], Hosts]:
    def made(macs: ModuleType) -> Hosts:
        hosts = mac()(macs)
        at = 0 if is_leaders else 1
        own = hosts[at].report
        changed = msgspec.structs.replace(own, facts=msgspec.structs.replace(own.facts, **change))
        hosts[at] = msgspec.structs.replace(hosts[at], report=changed)
        return hosts

    return made


def versions(**change: Any) -> Callable[[ModuleType], Hosts]:
    return lambda macs: facts(versions=msgspec.structs.replace(macs.VERSIONS, **change))(macs)


def leader(**change: Any) -> Callable[[ModuleType], Hosts]:
    def made(macs: ModuleType) -> Hosts:
        one, other = mac()(macs)
        return [msgspec.structs.replace(one, report=msgspec.structs.replace(one.report, **change)), other]

    return made


def skewed(*skews: float) -> Callable[[ModuleType], Hosts]:
    return lambda macs: [
        msgspec.structs.replace(host, skew_s=skew) for host, skew in zip(mac()(macs), skews, strict=True)
    ]


def twins(macs: ModuleType) -> Hosts:
    one, _ = mac()(macs)
    return [one, msgspec.structs.replace(one, name="mac2", is_leader=False)]


FAIL, WARN, NOTE = Level.FAIL, Level.WARN, Level.NOTE
JACCL = Backend.JACCL

FAULTS: dict[str, Planted] = {
    # software
    "Python under Rosetta": Planted("architecture", FAIL, fixture("Rosetta Python")),
    "an Intel Mac": Planted("architecture", FAIL, facts(machine="x86_64")),
    "an mlx that hangs when a peer dies": Planted("mlx version", FAIL, versions(mlx="0.20.1")),
    "no mlx": Planted("mlx version", FAIL, versions(mlx="")),
    "another mlx": Planted("mlx version", FAIL, versions(mlx="0.33.0")),
    "another mlx-lm": Planted("mlx-lm version", FAIL, versions(mlx_lm="0.32.3")),
    "another mlx-mesh": Planted("mlx-mesh version", FAIL, versions(mlx_mesh="0.2.0")),
    "another protocol": Planted("mlx-mesh version", FAIL, versions(protocol=99)),
    "another minor version of Python": Planted("python version", WARN, versions(python="3.11.9")),
    "different macOS builds": Planted("system", WARN, fixture("different macOS builds")),
    "different macOS builds, jaccl asked for": Planted(
        "system", FAIL, fixture("different macOS builds"), backend=JACCL
    ),
    "a macOS that is too old": Planted("system", FAIL, both(version="13.6", build="22G1")),
    "MLX_METAL_FAST_SYNCH is set": Planted("fast synch", WARN, report(fast_synch="1")),
    "no OpenBLAS (Linux)": Planted("fast matrix library", WARN, report(has_openblas=False)),
    # the model
    "the model is missing": Planted("model", FAIL, facts(model_digest="", model_error="no such folder.")),
    "another model": Planted("model", FAIL, facts(model_digest="bb" * 32)),
    "no tokenizer on the leader": Planted(
        "tokenizer", FAIL, facts(is_leaders=True, tokenizer_error="there is no tokenizer.json.")
    ),
    "the adapter is missing": Planted("adapter", FAIL, facts(adapter_error="no such folder")),
    "another adapter": Planted("adapter", FAIL, facts(adapter_digest="cc" * 32)),
    "a full disk": Planted("disk", WARN, report(disk_free_bytes=GB)),
    # the machine
    "a chip that nobody knows": Planted("chip", NOTE, mac(chip="Apple M99")),
    "no memory is left": Planted("memory", FAIL, facts(usable_memory_bytes=0)),
    "much swap in use": Planted("swap", WARN, mac(swap_used="9.00G")),
    "few open files": Planted("open files", WARN, report(max_open_files=256)),
    "the HTTP port is taken": Planted("http port", FAIL, leader(port_holder="pid 7 (nginx)")),
    "no data port": Planted("data ports", FAIL, report(has_data_ports=False)),
    "ranks of an earlier mesh": Planted("left over", WARN, report(leftovers=("rank 1 of studio (pid 3)",))),
    "it goes to sleep": Planted("sleep", WARN, mac(sleep_minutes=10)),
    "lid closed on battery": Planted("power", WARN, fixture("lid closed on battery")),
    "lid closed": Planted("lid", WARN, mac(is_lid_closed=True)),
    "a clock that is wrong": Planted("clock", WARN, skewed(0.0, -3600.0)),
    "two clocks that differ": Planted("pair clock", WARN, skewed(25.0, -25.0)),
    # the network
    "no address": Planted("interfaces", FAIL, mac(ethernet=(), thunderbolt={})),
    "Wi-Fi only": Planted("interfaces", FAIL, fixture("Wi-Fi only")),
    "overlapping subnets": Planted("subnets", FAIL, fixture("overlapping subnets")),
    "the default route goes over the cable": Planted(
        "default route", FAIL, mac(routes=(("default", "10.0.0.1", "en2"),))
    ),
    "a VPN's route covers the cable": Planted("vpn", WARN, fixture("a VPN whose route covers the cable")),
    "a DHCP lease on bridge0": Planted("subnets", FAIL, fixture("a DHCP lease on bridge0")),
    "a DHCP lease on bridge0, in a network of its own": Planted(
        "bridge", FAIL, mac(is_bridged=True, bridge=("192.168.7.9/24",), is_bridge_leased=True)
    ),
    "ports in Thunderbolt Bridge": Planted(
        "bridge", NOTE, both(is_bridged=True, thunderbolt={}, bridge=("169.254.2.@/16",))
    ),
    "ports in Thunderbolt Bridge, jaccl asked for": Planted(
        "bridge", FAIL, fixture("tb5-2-bridge"), backend=JACCL
    ),
    "another MTU": Planted("mtu", WARN, mac(mtu=9000)),
    "the firewall blocks everything": Planted("firewall", FAIL, report(firewall="all")),
    "the firewall asks on the screen": Planted("firewall", WARN, report(firewall="on")),
    "another program's network helper": Planted("helpers", WARN, report(helpers=("io.exo.networksetup",))),
    "a slow cable": Planted("thunderbolt", WARN, mac(cable_gbits=40)),
    "the Studio's port next to Ethernet": Planted("thunderbolt", WARN, mac(model="Mac15,14")),
    "M1 with Thunderbolt 4": Planted("rdma", NOTE, fixture("M1 with Thunderbolt 4")),
    "M1 with Thunderbolt 4, jaccl asked for": Planted(
        "rdma", FAIL, fixture("M1 with Thunderbolt 4"), backend=JACCL
    ),
    "RDMA was never enabled": Planted("rdma", NOTE, both(has_rdma=False)),
    "RDMA was never enabled, jaccl asked for": Planted("rdma", FAIL, fixture("tb5-2-nordma"), backend=JACCL),
    # two hosts together
    "one machine with two names": Planted("identity", FAIL, twins),
    "an SSH host key that was copied with its disk": Planted(
        "identity", FAIL, mac(), keys=("ssh-ed25519 A", "ssh-ed25519 A")
    ),
    "a cable without addresses": Planted("cable", WARN, fixture("tb5-2")),
    "two subnets on one cable": Planted("cable", FAIL, mac(thunderbolt={"en2": ("10.0.7.2/30",)})),
    "no network in common": Planted(
        "link", WARN, mac(cables=(), thunderbolt={}, ethernet=("172.16.0.9/24",))
    ),
    "`interfaces` leaves out all but Wi-Fi": Planted(
        "link",
        FAIL,
        both(wifi=("192.168.9.@/24",)),
        rules=("en1",),
    ),
    "a packet filter between them": Planted(
        "dial", FAIL, mac(), dialled=Dialled(error="ETIMEDOUT", said="no answer within 8 s")
    ),
    "Local Network privacy refuses": Planted(
        "local network", FAIL, mac(), dialled=Dialled(error="EHOSTUNREACH", said="No route to host")
    ),
    "no route": Planted(
        "dial", FAIL, mac(), dialled=Dialled(error="EHOSTUNREACH", said="No route to host", has_route=False)
    ),
    "an address that is gone": Planted(
        "dial", FAIL, mac(), dialled=Dialled(not_listening="Cannot assign requested address")
    ),
}


def first_line(findings: Sequence[Finding]) -> Finding:
    """What a reader of the whole output acts on first: the first failure, else the first warning, else the
    first note."""
    for level in (FAIL, WARN, NOTE):
        for finding in findings:
            if finding.level is level:
                return finding
    raise AssertionError("nothing was found")


@pytest.mark.parametrize("planted", FAULTS)
def test_the_first_line_names_what_was_planted(planted: str, macs: ModuleType) -> None:
    fault = FAULTS[planted]
    findings = fault.findings(macs)
    line = first_line(findings)
    told = [str(finding) for finding in findings if finding.level is not Level.OK]
    assert (line.check, line.level) == (fault.check, fault.level), told
    assert line.evidence and (line.fix or line.level is not FAIL)
    if fault.level is FAIL:
        assert first_failure(findings) == line


def test_two_macs_on_a_cable_with_addresses_have_nothing_wrong(macs: ModuleType) -> None:
    fine = Planted("", Level.OK, fixture("tb5-2 with addresses"), dialled=Dialled())
    assert [str(f) for f in fine.findings(macs) if f.level is not Level.OK] == []


def test_only_hosts_that_follow_each_other_and_answered_are_pairs(macs: ModuleType) -> None:
    """In a ring of four the first and the third never meet, also when the second does not answer."""
    ring = [PairHost(examined=host) for host in examined(macs, macs.on_cable(macs.Mac(num_ports=4), 4))]
    assert [(a.name, b.name) for a, b in neighbours([ring[0], None, *ring[2:]])] == [
        ("mac4", "mac1"),
        ("mac3", "mac4"),
    ]
    assert {f.host for f in pair_findings(ring[:2])} == {"mac1 - mac2"}
    assert list(neighbours(ring[:1])) == []


def table(macs: ModuleType) -> str:
    rows = ["| planted | first line |", "|---|---|"]
    for name, fault in FAULTS.items():
        line = re.sub(r"\s+", " ", str(first_line(fault.findings(macs)))).replace("|", "\\|")
        rows.append(f"| {name} | {line} |")
    return "\n".join(rows)


def test_the_page_has_this_table(macs: ModuleType) -> None:
    assert len(FAULTS) >= 30
    text = PAGE.read_text("utf-8")
    before, begin, rest = text.partition(BEGIN)
    old, end, after = rest.partition(END)
    assert begin and end
    new = f"\n{table(macs)}\n"
    if os.environ.get("MLX_MESH_WRITE_DOCS") == "1":
        PAGE.write_text(before + begin + new + end + after, "utf-8")
        return
    assert old == new, "run this test once with MLX_MESH_WRITE_DOCS=1"
