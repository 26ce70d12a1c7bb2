"""Reading what macOS commands print."""

from __future__ import annotations

import json
from dataclasses import replace
from types import ModuleType

import pytest

from mlx_mesh.mesh.macos import (
    is_lid_closed,
    is_on_battery,
    parse_hardware_ports,
    parse_ifconfig,
    parse_pmset,
    parse_rdma_devices,
    parse_routes,
    parse_swap_used,
    parse_thunderbolt,
)


def test_hardware_ports_are_read_by_device(macs: ModuleType) -> None:
    ports = parse_hardware_ports(macs.transcript(macs.Mac())["networksetup -listallhardwareports"])
    assert (
        ports["en2"] == "Thunderbolt 1"
        and ports["en1"] == "Wi-Fi"
        and ports["bridge0"] == "Thunderbolt Bridge"
    )


def test_interfaces_have_addresses_members_and_state(macs: ModuleType) -> None:
    mac = macs.Mac(is_bridged=True, bridge=("169.254.3.4/16",), cables=(((1, 1), (2, 1)),))
    entries = {entry.name: entry for entry in parse_ifconfig(macs.transcript(mac)["ifconfig -a"])}
    assert entries["bridge0"].members == ("en2", "en3", "en4")
    assert entries["bridge0"].addresses == ("169.254.3.4/16",)
    assert entries["en2"].is_active and not entries["en3"].is_active
    assert entries["en0"].addresses == ("192.168.1.1/24",) and entries["en0"].mtu == 1500
    assert "LOOPBACK" in entries["lo0"].flags


def test_point_to_point_addresses_and_dotted_masks_are_read() -> None:
    (entry,) = parse_ifconfig(
        "utun4: flags=8051<UP,POINTOPOINT,RUNNING,MULTICAST> mtu 1380\n"
        "\tinet 100.64.0.2 --> 100.64.0.2 netmask 255.255.255.255\n"
    )
    assert entry.addresses == ("100.64.0.2/32",)
    assert entry.is_active  # it says no status, and runs


def test_a_cable_is_known_at_both_ends(macs: ModuleType) -> None:
    one, other = macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2))
    key = "system_profiler SPThunderboltDataType -json"
    here, there = (parse_thunderbolt(macs.transcript(mac)[key]) for mac in (one, other))
    assert here[0].peer_id == there[0].own_id and there[0].peer_id == here[0].own_id
    assert here[0].gbits == 80 and here[0].generation == 5 and here[0].is_connected
    assert here[1].peer_id == "" and here[1].gbits == 120 and not here[1].is_connected


def test_thunderbolt_4_is_no_5(macs: ModuleType) -> None:
    key = "system_profiler SPThunderboltDataType -json"
    ports = parse_thunderbolt(macs.transcript(macs.Mac(generation=4))[key])
    assert {port.generation for port in ports} == {4}


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", '{"SPThunderboltDataType": 3}'])
def test_a_report_that_is_none_has_no_ports(text: str) -> None:
    assert parse_thunderbolt(text) == ()


def test_a_disk_on_the_cable_is_no_host_and_a_bus_without_id_is_left_out() -> None:
    bus = {
        "domain_uuid_key": "A",
        "receptacle_1_tag": {"receptacle_id_key": "2", "current_speed_key": "40 Gb/s"},
        "_items": [{"device_name_key": "Disk"}],
    }
    text = json.dumps({"SPThunderboltDataType": [bus, {"receptacle_1_tag": {}}, "odd"]})
    (port,) = parse_thunderbolt(text)
    assert (port.receptacle, port.peer_id, port.generation) == (2, "", 4)


def test_rdma_devices_are_those_below_the_header(macs: ModuleType) -> None:
    assert parse_rdma_devices(macs.transcript(macs.Mac())["ibv_devices"]) == (
        "rdma_en2",
        "rdma_en3",
        "rdma_en4",
    )
    assert parse_rdma_devices(macs.transcript(macs.Mac(has_rdma=False))["ibv_devices"]) == ()


def test_routes_have_their_left_out_zeros(macs: ModuleType) -> None:
    routes = parse_routes(macs.transcript(macs.Mac())["netstat -rn -f inet"])
    assert [(route.network, route.interface) for route in routes] == [
        ("0.0.0.0/0", "en0"),
        ("192.168.1.0/24", "en0"),
    ]
    (odd,) = parse_routes("10.77/16  link#9  UCS  en3\nInternet: is no route\n1.2.3.4.5 a b c\n300/8 a b c")
    assert odd.network == "10.77.0.0/16"


def test_power_settings_are_read(macs: ModuleType) -> None:
    lines = macs.transcript(replace(macs.Mac(), sleep_minutes=10, is_on_battery=True, is_lid_closed=True))
    assert parse_pmset(lines["pmset -g"])["sleep"] == "10"
    assert is_on_battery(lines["pmset -g batt"])
    assert is_lid_closed(lines["ioreg -r -k AppleClamshellState -d 4"])
    plain = macs.transcript(macs.Mac())
    assert not is_on_battery(plain["pmset -g batt"])
    assert not is_lid_closed(plain["ioreg -r -k AppleClamshellState -d 4"])


def test_swap_is_read_in_bytes(macs: ModuleType) -> None:
    assert parse_swap_used(macs.transcript(macs.Mac(swap_used="1.50G"))["sysctl vm.swapusage"]) == 1610612736
    assert parse_swap_used("nothing of the kind") == 0
