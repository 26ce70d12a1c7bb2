"""Planted faults, and the line that names each of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any, cast

import msgspec
import pytest

from mlx_mesh.mesh.doctor import (
    EXIT_STATUS,
    Area,
    Examined,
    Finding,
    Level,
    Question,
    check_names,
    duplicates,
    examine,
    exit_status,
    first_failure,
)
from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.types import Backend, Versions

GB = 10**9
VERSIONS = Versions(mlx_mesh="0.1.0", mlx="0.32.4", mlx_lm="0.32.2", python="3.12.1")

Report = Callable[..., HostReport]


@pytest.fixture
def report_of(macs: ModuleType) -> Report:
    """A Mac's report, by the parsers that a real one's answers go through."""
    return cast("Report", macs.report_of)


def plain(macs: ModuleType, report_of: Report, **change: Any) -> list[Examined]:
    """Two Macs on a cable with a subnet of its own, in order; `change` is to the second one."""
    one, other = macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2))
    one = replace(one, thunderbolt={"en2": ("10.0.0.1/30",)})
    other = replace(other, **{"thunderbolt": {"en2": ("10.0.0.2/30",)}, **change})
    return [
        Examined(name="mac1", report=report_of(one), is_leader=True),
        Examined(name="mac2", report=report_of(other)),
    ]


def findings_of(hosts: list[Examined], backend: Backend = Backend.AUTO) -> list[Finding]:
    return examine(hosts, Question(backend=backend, num_hosts=len(hosts)))


def test_two_macs_on_a_cable_have_nothing_wrong(macs: ModuleType, report_of: Report) -> None:
    findings = findings_of(plain(macs, report_of))
    assert [str(finding) for finding in findings if finding.level is not Level.OK] == []
    assert exit_status(findings) == 0 and len(findings) == 2 * len(check_names())


MAC_FAULTS: dict[str, tuple[dict[str, Any], str, Level]] = {
    "another build of macOS": ({"build": "25C57"}, "system", Level.WARN),
    "a macOS that is too old": ({"version": "13.6", "build": "25C56"}, "system", Level.FAIL),
    "a chip that nobody knows": ({"chip": "Apple M99"}, "chip", Level.NOTE),
    "much swap in use": ({"swap_used": "9.00G"}, "swap", Level.WARN),
    "it goes to sleep": ({"sleep_minutes": 10}, "sleep", Level.WARN),
    "it runs on battery": ({"is_on_battery": True}, "power", Level.WARN),
    "its lid is closed": ({"is_lid_closed": True}, "lid", Level.WARN),
    "only Wi-Fi": (
        {"ethernet_is_wifi": True, "thunderbolt": {}, "ethernet": ("192.168.1.2/24",)},
        "interfaces",
        Level.FAIL,
    ),
    "no address at all": ({"ethernet": (), "thunderbolt": {}}, "interfaces", Level.FAIL),
    "the cable's subnet is part of the home network": (
        {"ethernet": ("10.0.0.77/16",)},
        "subnets",
        Level.FAIL,
    ),
    "the default route goes over the cable": (
        {"routes": (("default", "10.0.0.1", "en2"),)},
        "default route",
        Level.FAIL,
    ),
    "the ports are in the bridge": (
        {"is_bridged": True, "bridge": ("169.254.2.2/16",)},
        "bridge",
        Level.NOTE,
    ),
    "a slow cable": ({"cable_gbits": 40}, "thunderbolt", Level.WARN),
    "another MTU": ({"mtu": 9000}, "mtu", Level.WARN),
    "the Studio's port next to Ethernet": ({"model": "Mac15,14"}, "thunderbolt", Level.WARN),
    "Thunderbolt 4": ({"generation": 4}, "rdma", Level.NOTE),
    "RDMA was never enabled": ({"has_rdma": False}, "rdma", Level.NOTE),
}


@pytest.mark.parametrize("planted", MAC_FAULTS)
def test_what_is_planted_on_a_mac_is_named(planted: str, macs: ModuleType, report_of: Report) -> None:
    change, check, level = MAC_FAULTS[planted]
    findings = findings_of(plain(macs, report_of, **change))
    named = [f for f in findings if f.host == "mac2" and f.level is not Level.OK]
    assert (named[0].check, named[0].level) == (check, level), [str(f) for f in named]
    assert not [str(f) for f in findings if f.host == "mac1" and f.level is Level.FAIL]


FACT_FAULTS: dict[str, tuple[dict[str, Any], str, Area]] = {
    "an Intel Mac": ({"machine": "x86_64"}, "architecture", Area.SOFTWARE),
    "the model is missing": ({"model_digest": "", "model_error": "no such folder."}, "model", Area.MODEL),
    "another model": ({"model_digest": "bb" * 32}, "model", Area.MODEL),
    "the adapter is missing": ({"adapter_error": "no such folder"}, "adapter", Area.MODEL),
    "another adapter": ({"adapter_digest": "cc" * 32}, "adapter", Area.MODEL),
    "no memory is left": ({"usable_memory_bytes": 0}, "memory", Area.MACHINE),
}
VERSION_FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "an old mlx": ({"mlx": "0.20.1"}, "mlx version"),
    "no mlx": ({"mlx": ""}, "mlx version"),
    "a newer mlx": ({"mlx": "0.33.0"}, "mlx version"),
    "another mlx-lm": ({"mlx_lm": "0.32.3"}, "mlx-lm version"),
    "another mlx-mesh": ({"mlx_mesh": "0.2.0"}, "mlx-mesh version"),
    "another protocol": ({"protocol": 99}, "mlx-mesh version"),
}
REPORT_FAULTS: dict[str, tuple[dict[str, Any], str, Level]] = {
    "Rosetta": ({"is_translated": True}, "architecture", Level.FAIL),
    "a setting that locks up the GPU": ({"fast_synch": "1"}, "fast synch", Level.WARN),
    "no OpenBLAS": ({"has_openblas": False}, "fast matrix library", Level.WARN),
    "a full disk": ({"disk_free_bytes": GB}, "disk", Level.WARN),
    "few open files": ({"max_open_files": 256}, "open files", Level.WARN),
    "no data port": ({"has_data_ports": False}, "data ports", Level.FAIL),
    "stale ranks": ({"leftovers": ("rank 1 of mesh x (pid 3)",)}, "left over", Level.WARN),
    "the firewall blocks everything": ({"firewall": "all"}, "firewall", Level.FAIL),
    "the firewall asks": ({"firewall": "on"}, "firewall", Level.WARN),
    "a foreign helper": ({"helpers": ("io.exo.networksetup",)}, "helpers", Level.WARN),
}


@pytest.mark.parametrize("planted", FACT_FAULTS)
def test_what_is_planted_in_a_hosts_facts_is_named(planted: str, macs: ModuleType, report_of: Report) -> None:
    change, check, area = FACT_FAULTS[planted]
    leader, other = plain(macs, report_of)
    facts = msgspec.structs.replace(other.report.facts, **change)
    other = msgspec.structs.replace(other, report=msgspec.structs.replace(other.report, facts=facts))
    failure = first_failure(found := findings_of([leader, other]))
    assert failure is not None and (failure.host, failure.check, failure.area) == ("mac2", check, area)
    assert failure.fix and exit_status(found) == EXIT_STATUS[area]


@pytest.mark.parametrize("planted", VERSION_FAULTS)
def test_another_version_is_named_with_the_command(planted: str, macs: ModuleType, report_of: Report) -> None:
    change, check = VERSION_FAULTS[planted]
    leader, other = plain(macs, report_of)
    facts = msgspec.structs.replace(other.report.facts, versions=msgspec.structs.replace(VERSIONS, **change))
    other = msgspec.structs.replace(other, report=msgspec.structs.replace(other.report, facts=facts))
    failure = first_failure(findings_of([leader, other]))
    fix = "init mac2 --install" if "mlx-mesh" in check else "pip install"
    assert failure is not None and failure.check == check and fix in failure.fix


@pytest.mark.parametrize("planted", REPORT_FAULTS)
def test_what_is_planted_in_a_report_is_named(planted: str, macs: ModuleType, report_of: Report) -> None:
    change, check, level = REPORT_FAULTS[planted]
    leader, other = plain(macs, report_of)
    other = msgspec.structs.replace(other, report=msgspec.structs.replace(other.report, **change))
    named = [f for f in findings_of([leader, other]) if f.host == "mac2" and f.level is not Level.OK]
    assert (named[0].check, named[0].level) == (check, level)


def test_what_only_the_leader_needs_is_asked_of_the_leader(macs: ModuleType, report_of: Report) -> None:
    leader, other = plain(macs, report_of)

    def broken(host: Examined) -> Examined:
        facts = msgspec.structs.replace(host.report.facts, tokenizer_error="no tokenizer.json.")
        report = msgspec.structs.replace(host.report, facts=facts, port_holder="pid 7 (nginx)")
        return msgspec.structs.replace(host, report=report)

    assert first_failure(findings_of([leader, broken(other)])) is None
    named = [f.check for f in findings_of([broken(leader), other]) if f.level is Level.FAIL]
    assert named == ["tokenizer", "http port"]


def test_a_clock_that_is_wrong_is_named(macs: ModuleType, report_of: Report) -> None:
    leader, other = plain(macs, report_of)
    late = msgspec.structs.replace(other, skew_s=-3600.0)
    (named,) = [f for f in findings_of([leader, late]) if f.level is not Level.OK]
    assert named.check == "clock" and "-3600 s" in named.evidence


@pytest.mark.parametrize(
    ("change", "check"),
    [
        ({"build": "25C57"}, "system"),
        ({"is_bridged": True, "bridge": ("169.254.2.2/16",)}, "bridge"),
        ({"generation": 4}, "rdma"),
        ({"has_rdma": False}, "rdma"),
    ],
)
def test_what_the_ring_can_live_with_stops_rdma(
    change: dict[str, Any], check: str, macs: ModuleType, report_of: Report
) -> None:
    hosts = plain(macs, report_of, **change)
    assert first_failure(findings_of(hosts, Backend.RING)) is None
    failure = first_failure(findings_of(hosts, Backend.JACCL))
    assert failure is not None and (failure.host, failure.check) == ("mac2", check)


def test_recovery_is_no_advice_for_a_mac_without_thunderbolt_5(macs: ModuleType, report_of: Report) -> None:
    (named,) = [f for f in findings_of(plain(macs, report_of, generation=4)) if f.level is Level.NOTE]
    assert "Recovery" not in str(named)


def test_a_lease_on_the_bridge_is_a_failure(macs: ModuleType, report_of: Report) -> None:
    leader, other = plain(macs, report_of, is_bridged=True, bridge=("192.168.7.9/24",))
    other = msgspec.structs.replace(other, report=msgspec.structs.replace(other.report, dhcp=("bridge0",)))
    failure = first_failure(findings_of([leader, other]))
    assert failure is not None and failure.check == "bridge" and "DHCP" in failure.evidence


def test_one_machine_with_two_names_and_a_copied_key_are_refused(macs: ModuleType, report_of: Report) -> None:
    leader, other = plain(macs, report_of)
    assert list(duplicates([(leader, ""), (other, "ssh-ed25519 B")])) == []
    twin = msgspec.structs.replace(leader, name="mac3")
    (named,) = duplicates([(leader, ""), (twin, "ssh-ed25519 A")])
    assert named.host == "mac3" and "mac1" in named.evidence and "hardware id" in named.evidence
    third = msgspec.structs.replace(other, name="mac4")
    third = msgspec.structs.replace(third, report=msgspec.structs.replace(third.report, hardware_uuid="X"))
    (named,) = duplicates([(other, "ssh-ed25519 B"), (third, "ssh-ed25519 B")])
    assert "host key" in named.evidence and named.area is Area.REACH
