"""Which kind each interface is, which link two hosts use, and which backend that allows."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from mlx_mesh.mesh.errors import BringUpError, PreflightError
from mlx_mesh.mesh.interfaces import Interface, LinkClass, LinuxEntry, linux_interface, mac_interfaces
from mlx_mesh.mesh.link_plan import links_between, overlapping_subnets, ring_links
from mlx_mesh.mesh.macos import parse_hardware_ports, parse_ifconfig, parse_rdma_devices, parse_thunderbolt
from mlx_mesh.mesh.rdma import choose_backend, pick_backend
from mlx_mesh.mesh.types import Backend

Seen = Callable[[Any], tuple[Interface, ...]]


@pytest.fixture
def seen(macs: ModuleType) -> Seen:
    """A Mac's interfaces, by the road that a real one's take."""

    def of(mac: Any) -> tuple[Interface, ...]:
        lines = macs.transcript(mac)
        return mac_interfaces(
            parse_ifconfig(lines["ifconfig -a"]),
            parse_hardware_ports(lines["networksetup -listallhardwareports"]),
            parse_thunderbolt(lines["system_profiler SPThunderboltDataType -json"]),
            parse_rdma_devices(lines["ibv_devices"]),
        )

    return of


def named(interfaces: tuple[Interface, ...]) -> dict[str, Interface]:
    return {interface.name: interface for interface in interfaces}


# ---------------------------------------------------------------- classes


def test_the_class_comes_from_the_hardware_port(macs: ModuleType, seen: Seen) -> None:
    studio = named(seen(macs.Mac(vpn=("100.64.0.2/32",))))
    assert studio["en0"].link_class is LinkClass.ETHERNET
    assert studio["en1"].link_class is LinkClass.WIFI
    assert studio["en2"].link_class is LinkClass.THUNDERBOLT and studio["en2"].evidence == "Thunderbolt 1"
    assert studio["bridge0"].link_class is LinkClass.THUNDERBOLT
    assert studio["awdl0"].link_class is studio["utun4"].link_class is LinkClass.FOREIGN
    assert studio["lo0"].link_class is LinkClass.LOOPBACK
    laptop = named(seen(macs.Mac(ethernet_is_wifi=True)))
    assert laptop["en0"].link_class is LinkClass.WIFI


def test_a_self_assigned_address_makes_no_thunderbolt(macs: ModuleType, seen: Seen) -> None:
    assert named(seen(macs.Mac(ethernet=("169.254.9.9/16",))))["en0"].link_class is LinkClass.ETHERNET


def test_an_adapter_on_a_thunderbolt_plug_is_ethernet() -> None:
    entries = parse_ifconfig("en8: flags=8863<UP,RUNNING> mtu 1500\n\tstatus: active\n")
    (found,) = mac_interfaces(entries, {"en8": "Thunderbolt Ethernet Slot 0"}, (), ())
    assert found.link_class is LinkClass.ETHERNET


def test_an_interface_without_a_port_is_not_used() -> None:
    entries = parse_ifconfig("en8: flags=8863<UP,RUNNING> mtu 1500\n\tstatus: active\n")
    (found,) = mac_interfaces(entries, {}, (), ())
    assert found.link_class is LinkClass.FOREIGN and "no hardware port" in found.what


@pytest.mark.parametrize(
    ("entry", "link_class"),
    [
        (LinuxEntry(name="lo", is_loopback=True), LinkClass.LOOPBACK),
        (LinuxEntry(name="wlp3s0", is_wireless=True, driver="iwlwifi"), LinkClass.WIFI),
        (LinuxEntry(name="thunderbolt0", driver="thunderbolt-net"), LinkClass.THUNDERBOLT),
        (LinuxEntry(name="enp3s0", driver="r8169"), LinkClass.ETHERNET),
        (LinuxEntry(name="eth0"), LinkClass.ETHERNET),
        (LinuxEntry(name="docker0"), LinkClass.FOREIGN),
        (LinuxEntry(name="br-12ab"), LinkClass.FOREIGN),
        (LinuxEntry(name="veth12ab"), LinkClass.FOREIGN),
        (LinuxEntry(name="tailscale0"), LinkClass.FOREIGN),
    ],
)
def test_kinds_of_linux_interfaces(entry: LinuxEntry, link_class: LinkClass) -> None:
    assert linux_interface(entry).link_class is link_class


# ---------------------------------------------------------------- links


def pair_on_cable(macs: ModuleType, **addresses: Any) -> list[Any]:
    """Two Macs with a Thunderbolt cable between their first ports, with a subnet of its own on it."""
    one, other = macs.mesh_of(macs.Mac(**addresses), 2, macs.full_mesh(2))
    return [
        replace(one, thunderbolt={"en2": ("10.0.0.1/30",)}),
        replace(other, thunderbolt={"en2": ("10.0.0.2/30",)}),
    ]


def test_the_cable_is_taken_before_the_switch_from_both_sides(macs: ModuleType, seen: Seen) -> None:
    one, other = (("mac" + str(mac.number), seen(mac)) for mac in pair_on_cable(macs))
    links = ring_links([one, other], allow_wifi=False)
    assert (links["mac2"].dials.address, links["mac2"].listens.address) == ("10.0.0.1", "10.0.0.2")
    assert (links["mac1"].dials.address, links["mac1"].listens.address) == ("10.0.0.2", "10.0.0.1")
    assert links["mac1"].link_class is LinkClass.THUNDERBOLT and links["mac1"].generation == 5
    both = links_between(one, other, allow_wifi=False)
    assert [link.link_class for link in both] == [LinkClass.THUNDERBOLT, LinkClass.ETHERNET]


def test_self_assigned_addresses_count_on_a_cable_and_not_on_a_switch(macs: ModuleType, seen: Seen) -> None:
    one, other = macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2))
    on_cable = [
        ("mac1", seen(replace(one, thunderbolt={"en2": ("169.254.1.1/16",)}, ethernet=()))),
        ("mac2", seen(replace(other, thunderbolt={"en2": ("169.254.7.7/16",)}, ethernet=()))),
    ]
    assert ring_links(on_cable, allow_wifi=False)["mac2"].listens.address == "169.254.7.7"
    on_switch = [
        ("mac1", seen(replace(one, ethernet=("169.254.1.1/16",)))),
        ("mac2", seen(replace(other, ethernet=("169.254.7.7/16",)))),
    ]
    assert ring_links(on_switch, allow_wifi=False) == {}


def test_self_assigned_addresses_on_two_ports_lead_nowhere(macs: ModuleType, seen: Seen) -> None:
    cables = [((1, 1), (2, 1)), ((1, 2), (2, 2))]
    hosts = [
        (
            f"mac{mac.number}",
            seen(
                replace(
                    mac,
                    thunderbolt={
                        "en2": (f"169.254.1.{mac.number}/16",),
                        "en3": (f"169.254.2.{mac.number}/16",),
                    },
                )
            ),
        )
        for mac in macs.mesh_of(macs.Mac(), 2, cables)
    ]
    assert ring_links(hosts, allow_wifi=False)["mac2"].link_class is LinkClass.ETHERNET


def test_the_users_address_is_kept_whatever_else_there_is(macs: ModuleType, seen: Seen) -> None:
    one, other = (("mac" + str(mac.number), seen(mac)) for mac in pair_on_cable(macs))
    links = ring_links([one, other], allow_wifi=False, pinned={"mac2": "192.168.1.2"})
    assert (
        links["mac2"].link_class is LinkClass.ETHERNET and links["mac1"].link_class is LinkClass.THUNDERBOLT
    )
    assert "mac2" not in ring_links([one, other], allow_wifi=False, pinned={"mac2": "172.16.0.9"})


def test_ports_whose_cables_lead_elsewhere_do_not_meet(macs: ModuleType, seen: Seen) -> None:
    """Same subnet on both, but the cable of mac1's port ends at mac3."""
    cables = [((1, 1), (3, 1)), ((1, 2), (2, 2))]
    one, other, _ = macs.mesh_of(macs.Mac(), 3, cables)
    links = links_between(
        ("mac1", seen(replace(one, thunderbolt={"en2": ("10.0.0.1/24",)}))),
        ("mac2", seen(replace(other, thunderbolt={"en3": ("10.0.0.2/24",)}))),
        allow_wifi=False,
    )
    assert [link.link_class for link in links] == [LinkClass.ETHERNET]


def test_a_bridge_is_a_link_and_its_members_are_not(macs: ModuleType, seen: Seen) -> None:
    one, other = macs.mesh_of(macs.Mac(is_bridged=True), 2, macs.full_mesh(2))
    hosts = [
        ("mac1", seen(replace(one, bridge=("169.254.1.1/16",), thunderbolt={"en2": ("10.0.0.1/30",)}))),
        ("mac2", seen(replace(other, bridge=("169.254.2.2/16",), thunderbolt={"en2": ("10.0.0.2/30",)}))),
    ]
    link = ring_links(hosts, allow_wifi=False)["mac2"]
    assert (link.listens.interface, link.listens.address) == ("bridge0", "169.254.2.2")


def test_wifi_is_taken_when_allowed_and_named_when_not(macs: ModuleType, seen: Seen) -> None:
    hosts = [
        (
            f"mac{number}",
            seen(macs.Mac(number=number, ethernet_is_wifi=True, ethernet=(f"10.1.1.{number}/24",))),
        )
        for number in (1, 2)
    ]
    with pytest.raises(BringUpError, match=r"Wi-Fi is the only network .* --allow-wifi"):
        ring_links(hosts, allow_wifi=False)
    assert ring_links(hosts, allow_wifi=True)["mac2"].link_class is LinkClass.WIFI


def test_hosts_in_different_subnets_have_no_link(macs: ModuleType, seen: Seen) -> None:
    hosts = [(f"mac{n}", seen(macs.Mac(number=n, ethernet=(f"192.168.{n}.9/24",)))) for n in (1, 2)]
    assert ring_links(hosts, allow_wifi=True) == {}


def test_each_rank_listens_on_the_cable_to_the_one_before_it(macs: ModuleType, seen: Seen) -> None:
    cables = [((1, 1), (2, 1)), ((2, 2), (3, 1)), ((3, 2), (1, 2))]
    nets = ["10.0.0.{}/30", "10.0.0.{}/30", "10.0.0.{}/30"]
    one, two, three = macs.mesh_of(macs.Mac(), 3, cables)
    hosts = [
        ("mac1", seen(replace(one, thunderbolt={"en2": (nets[0].format(1),), "en3": (nets[2].format(10),)}))),
        ("mac2", seen(replace(two, thunderbolt={"en2": (nets[0].format(2),), "en3": (nets[1].format(5),)}))),
        (
            "mac3",
            seen(replace(three, thunderbolt={"en2": (nets[1].format(6),), "en3": (nets[2].format(9),)})),
        ),
    ]
    links = ring_links(hosts, allow_wifi=False)
    assert {host: link.listens.address for host, link in links.items()} == {
        "mac1": "10.0.0.10",
        "mac2": "10.0.0.2",
        "mac3": "10.0.0.6",
    }


def test_overlapping_subnets_are_named(macs: ModuleType, seen: Seen) -> None:
    mac = macs.Mac(
        ethernet=("192.168.0.7/16",), thunderbolt={"en2": ("192.168.5.1/30",)}, cables=(((1, 1), (2, 1)),)
    )
    (words,) = overlapping_subnets("mac1", seen(mac))
    assert "en0 (Ethernet)" in words and "en2 (Thunderbolt 1)" in words and "192.168.5.0/30" in words
    assert overlapping_subnets("mac1", seen(macs.Mac())) == []


# ---------------------------------------------------------------- backends


def test_a_full_mesh_of_rdma_cables_gives_jaccl(macs: ModuleType, seen: Seen) -> None:
    hosts = [
        (f"mac{mac.number}", seen(mac)) for mac in macs.mesh_of(macs.Mac(num_ports=3), 4, macs.full_mesh(4))
    ]
    choice = choose_backend(hosts)
    assert choice.backend is Backend.JACCL
    assert choice.devices[0] == (None, "rdma_en2", "rdma_en3", "rdma_en4")
    assert choice.devices[3] == ("rdma_en2", "rdma_en3", "rdma_en4", None)


def test_a_ring_of_cables_gives_jaccl_over_a_ring(macs: ModuleType, seen: Seen) -> None:
    cables = [((1, 1), (2, 1)), ((2, 2), (3, 1)), ((3, 2), (4, 1)), ((4, 2), (1, 2))]
    hosts = [(f"mac{mac.number}", seen(mac)) for mac in macs.mesh_of(macs.Mac(), 4, cables)]
    choice = choose_backend(hosts)
    assert choice.backend is Backend.JACCL_RING
    assert choice.devices[0] == (None, "rdma_en2", None, "rdma_en3")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"has_rdma": False}, "mac1 has no RDMA devices .optional"),
        ({"generation": 4}, "mac1 has Thunderbolt 4 or older"),  # the devices are there, and lie
        ({"is_bridged": True}, "members of a bridge"),
        ({"num_ports": 0}, "mac1 has no Thunderbolt port"),
    ],
)
def test_what_is_missing_for_rdma_is_said(
    macs: ModuleType, seen: Seen, change: dict[str, Any], reason: str
) -> None:
    hosts = [
        (f"mac{mac.number}", seen(mac)) for mac in macs.mesh_of(macs.Mac(**change), 2, macs.full_mesh(2))
    ]
    choice = choose_backend(hosts)
    assert choice.backend is Backend.RING and choice.devices == ()
    assert re.search(reason, choice.reason), choice.reason


def test_without_a_cable_it_is_said_between_whom(macs: ModuleType, seen: Seen) -> None:
    hosts = [(f"mac{mac.number}", seen(mac)) for mac in macs.mesh_of(macs.Mac(), 2, [])]
    assert choose_backend(hosts).reason == "no Thunderbolt cable joins mac1 and mac2"


# ---------------------------------------------------------------- asked for, or chosen


def test_a_backend_that_was_asked_for_and_cannot_be_had_is_an_error_with_its_reason(
    macs: ModuleType, seen: Seen
) -> None:
    made = macs.mesh_of(macs.Mac(has_rdma=False), 2, macs.full_mesh(2))
    hosts = [(f"mac{mac.number}", seen(mac)) for mac in made]
    with pytest.raises(PreflightError, match=r"backend jaccl cannot be had: mac1 has no RDMA devices"):
        pick_backend(Backend.JACCL, hosts, world_size=2)
    choice = pick_backend(Backend.AUTO, hosts, world_size=2)
    assert choice.backend is Backend.RING and "mac1 has no RDMA devices" in choice.reason
    told = ((None, "rdma_en9"), ("rdma_en9", None))
    assert pick_backend(Backend.JACCL, hosts, world_size=2, told=told).devices == told


def test_jaccl_over_a_ring_is_no_full_jaccl(macs: ModuleType, seen: Seen) -> None:
    cables = [((1, 1), (2, 1)), ((2, 2), (3, 1)), ((3, 2), (4, 1)), ((4, 2), (1, 2))]
    hosts = [(f"mac{mac.number}", seen(mac)) for mac in macs.mesh_of(macs.Mac(), 4, cables)]
    assert pick_backend(Backend.JACCL_RING, hosts, world_size=4).backend is Backend.JACCL_RING
    with pytest.raises(PreflightError, match="jaccl cannot be had"):
        pick_backend(Backend.JACCL, hosts, world_size=4)


@pytest.mark.parametrize(
    ("media", "mbits"),
    [
        ("media: autoselect (10Gbase-T <full-duplex>)", 10_000),
        ("media: autoselect (1000baseT <full-duplex,flow-control>)", 1000),
        ("media: autoselect (2500Base-T <full-duplex>)", 2500),
        ("media: autoselect <full-duplex>", 0),
        ("media: <unknown type>", 0),
    ],
)
def test_the_rate_of_ethernet_is_read(media: str, mbits: int) -> None:
    (entry,) = parse_ifconfig(f"en0: flags=8863<UP,RUNNING> mtu 1500\n\t{media}\n\tstatus: active\n")
    assert entry.mbits == mbits
    (made,) = mac_interfaces([entry], {"en0": "Ethernet"}, [], [])
    assert made.mbits == mbits
