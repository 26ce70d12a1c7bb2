"""Addresses for cables: what is planned for imagined Macs, and that a plan which was carried out is done."""

from __future__ import annotations

import ipaddress
from dataclasses import replace
from types import ModuleType
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.interfaces import Interface
from mlx_mesh.mesh.link_plan import links_between, overlapping_subnets
from mlx_mesh.mesh.macos import NetworkService, Route
from mlx_mesh.mesh.net_plan import SERVICE_PREFIX, HostSteps, NetPlan, Step, plan_network, plan_undo
from mlx_mesh.mesh.rdma import device_between

Hosts = list[tuple[str, HostReport]]


def hosts_of(macs: ModuleType, *made: Any) -> Hosts:
    return [(f"mac{mac.number}", macs.report_of(mac)) for mac in made]


def pair(macs: ModuleType, **change: Any) -> Hosts:
    """Two Macs on one cable; `change` is to both."""
    return hosts_of(macs, *macs.mesh_of(macs.Mac(**change), 2, macs.full_mesh(2)))


def commands(plan: NetPlan, host: str) -> list[str]:
    (own,) = [steps for steps in plan.hosts if steps.host == host]
    return [step.command for step in own.steps]


# ---------------------------------------------------------------- a Mac that obeys


def carry_out(report: HostReport, steps: list[tuple[str, ...]]) -> HostReport:
    """What the host would say of itself after these commands, as macOS's documents tell."""
    for words in steps:
        report = _one(report, words)
    return report


def _one(report: HostReport, words: tuple[str, ...]) -> HostReport:
    services, interfaces = list(report.services), list(report.facts.interfaces)

    def set_interfaces(**changes: dict[str, Any]) -> list[Interface]:
        return [msgspec.structs.replace(i, **changes[i.name]) if i.name in changes else i for i in interfaces]

    name = words[2]
    service = next((s for s in services if s.name == name), None)
    match words[1]:
        case "-createnetworkservice":
            assert service is None
            device = next(i.name for i in interfaces if i.evidence == words[3])
            services.append(NetworkService(name=name, port=words[3], device=device))
        case "-removenetworkservice":
            assert service is not None
            services.remove(service)
            interfaces = set_interfaces(**{service.device: {"addresses": ()}})
        case "-setmanual":
            assert service is not None
            prefix = ipaddress.IPv4Network(f"0.0.0.0/{words[4]}").prefixlen
            interfaces = set_interfaces(**{service.device: {"addresses": (f"{words[3]}/{prefix}",)}})
        case "-setdhcp" | "-setv4off":
            assert service is not None
            interfaces = set_interfaces(**{service.device: {"addresses": ()}})
        case "-setnetworkserviceenabled":
            assert service is not None
            services[services.index(service)] = msgspec.structs.replace(service, is_enabled=words[3] == "on")
            if words[3] == "off":
                freed = {i.name: {"bridge": ""} for i in interfaces if i.bridge == service.device}
                interfaces = set_interfaces(
                    **freed, **{service.device: {"addresses": (), "is_active": False}}
                )
        case _:
            raise AssertionError(words)
    facts = msgspec.structs.replace(report.facts, interfaces=tuple(interfaces))
    return msgspec.structs.replace(report, facts=facts, services=tuple(services))


def after(hosts: Hosts, plan: NetPlan) -> Hosts:
    steps = {own.host: [step.words for step in own.steps] for own in plan.hosts}
    return [(name, carry_out(report, steps[name])) for name, report in hosts]


def networks(plan: NetPlan) -> list[Any]:
    return [ipaddress.ip_interface(cable.addresses[0]).network for cable in plan.cables]


# ---------------------------------------------------------------- plans


def test_a_cable_gets_a_service_and_an_address_at_each_end(macs: ModuleType) -> None:
    plan = plan_network(pair(macs))
    (cable,) = plan.cables
    assert cable.addresses == ("10.201.77.1/30", "10.201.77.2/30") and not cable.is_in_place
    assert commands(plan, "mac1") == [
        "sudo networksetup -createnetworkservice 'mlx-mesh en2' 'Thunderbolt 1'",
        "sudo networksetup -setmanual 'mlx-mesh en2' 10.201.77.1 255.255.255.252",
    ]
    assert commands(plan, "mac2")[1].endswith("10.201.77.2 255.255.255.252")
    undo = [step.undo_command for step in plan.hosts[0].steps]
    assert undo[0] == "sudo networksetup -removenetworkservice 'mlx-mesh en2'"


SITUATIONS: dict[str, dict[str, Any]] = {
    "nothing set up": {},
    "ports in the bridge": {"is_bridged": True},
    "ports in the bridge, self-assigned": {"is_bridged": True, "bridge": ("169.254.3.4/16",)},
    "a DHCP lease on the bridge": {
        "is_bridged": True,
        "bridge": ("192.168.1.77/24",),
        "is_bridge_leased": True,
    },
    "self-assigned on the port": {"thunderbolt": {"en2": ("169.254.9.9/16",)}},
    "one address at both ends": {
        "thunderbolt": {"en2": ("10.9.9.1/30",)},
        "services": (("en2", "My cable"),),
    },
    "a service of the user's": {"services": (("en2", "My cable"),)},
    "a VPN's routes": {
        "vpn": ("10.8.0.2/24",),
        "routes": (("default", "192.168.1.254", "en0"), ("10", "10.8.0.1", "utun4")),
    },
    "a VPN in place of the default route": {
        "vpn": ("10.8.0.2/24",),
        "routes": (("0/1", "10.8.0.1", "utun4"), ("128.0/1", "10.8.0.1", "utun4")),
    },
    "a home network where we would begin": {"ethernet": ("10.201.77.9/16",)},
    "Wi-Fi only": {"ethernet_is_wifi": True},
    "Thunderbolt 4": {"generation": 4, "has_rdma": False},
}


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("situation", SITUATIONS)
def test_whatever_is_there_a_plan_that_was_carried_out_works_and_is_done(
    situation: str, count: int, macs: ModuleType
) -> None:
    change = SITUATIONS[situation]
    made = macs.mesh_of(macs.Mac(**change), count, macs.full_mesh(count))
    if "ethernet" in change:  # mesh_of gave each its usual one
        made = [replace(mac, ethernet=(f"10.201.77.{mac.number}/16",)) for mac in made]
    hosts = hosts_of(macs, *made)
    plan = plan_network(hosts)
    assert not plan.is_done and len(plan.cables) == count * (count - 1) // 2
    taken = [
        ipaddress.ip_network(route.network)
        for _, report in hosts
        for route in report.routes
        if ipaddress.ip_network(route.network).prefixlen > 1
    ]
    assert not [(n, t) for n in networks(plan) for t in taken if n.overlaps(t)]
    done = after(hosts, plan)
    again = plan_network(done)
    assert again.is_done and all(cable.is_in_place for cable in again.cables)
    assert [cable.addresses for cable in again.cables] == [cable.addresses for cable in plan.cables]
    for index, (name, report) in enumerate(done):
        assert overlapping_subnets(name, report.facts.interfaces) == []
        for other, its in done[index + 1 :]:
            best = links_between((name, report.facts.interfaces), (other, its.facts.interfaces), False)[0]
            assert best.link_class == "thunderbolt" and not best.dials.address.startswith("169.254")
            can_rdma = change.get("generation") != 4
            assert bool(device_between(report.facts.interfaces, its.facts.interfaces)) == can_rdma


@pytest.mark.parametrize("situation", SITUATIONS)
def test_undoing_it_in_reverse_brings_back_what_was_there(situation: str, macs: ModuleType) -> None:
    hosts = pair(macs, **{k: v for k, v in SITUATIONS[situation].items() if k != "ethernet"})
    plan = plan_network(hosts)
    for (_, before), (_, report), own in zip(hosts, after(hosts, plan), plan.hosts, strict=True):
        back = carry_out(report, [step.undo for step in reversed(own.steps)])
        assert back.services == before.services
        routable = [
            [a for a in i.addresses if not a.startswith("169.254")]
            for i in before.facts.interfaces
            if i.name.startswith("en")
        ]
        assert routable == [list(i.addresses) for i in back.facts.interfaces if i.name.startswith("en")]


def test_undo_without_a_note_removes_what_was_made_and_brings_the_bridge_back(macs: ModuleType) -> None:
    hosts = pair(macs, is_bridged=True)
    done = after(hosts, plan_network(hosts))
    undo = plan_undo(done)
    assert commands(undo, "mac1") == [
        "sudo networksetup -removenetworkservice 'mlx-mesh en2'",
        "sudo networksetup -setnetworkserviceenabled 'Thunderbolt Bridge' on",
    ]
    assert [r.services for _, r in after(done, undo)] == [report.services for _, report in hosts]
    assert plan_undo(hosts).is_done and plan_undo(after(done, undo)).is_done


def test_the_bridge_is_left_before_its_ports_get_addresses_and_its_lease_is_told(macs: ModuleType) -> None:
    plan = plan_network(
        pair(
            macs,
            is_bridged=True,
            bridge=("192.168.1.77/24",),
            is_bridge_leased=True,
            routes=(("default", "192.168.1.254", "bridge0"),),
        )
    )
    first, *rest = commands(plan, "mac1")
    assert first == "sudo networksetup -setnetworkserviceenabled 'Thunderbolt Bridge' off" and len(rest) == 2
    assert any("mac1: bridge0 holds a DHCP lease" in note for note in plan.notes)
    assert any("mac2: its default route goes over the bridge" in note for note in plan.notes)


def test_a_mac_without_a_cable_of_ours_keeps_its_bridge(macs: ModuleType) -> None:
    mac = macs.Mac(is_bridged=True)
    one, other = macs.mesh_of(mac, 2, macs.full_mesh(2))
    alone = replace(mac, number=3, cables=())
    plan = plan_network(hosts_of(macs, one, other, alone))
    assert commands(plan, "mac3") == [] and commands(plan, "mac1")


def test_what_works_already_is_kept_whatever_its_range(macs: ModuleType) -> None:
    one, other, third = macs.mesh_of(macs.Mac(), 3, macs.full_mesh(3))
    one = replace(one, thunderbolt={"en2": ("192.168.99.1/24",)})
    other = replace(other, thunderbolt={"en2": ("192.168.99.2/24",)})
    plan = plan_network(hosts_of(macs, one, other, third))
    assert [cable.is_in_place for cable in plan.cables] == [True, False, False]
    assert plan.cables[0].addresses == ("192.168.99.1/24", "192.168.99.2/24")
    assert not networks(plan)[0].overlaps(networks(plan)[1])


def test_a_cable_whose_subnet_another_port_has_too_is_planned_anew(macs: ModuleType) -> None:
    one, other = macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2))
    one = replace(one, thunderbolt={"en2": ("192.168.1.201/24",)})  # the home network's range
    other = replace(other, thunderbolt={"en2": ("192.168.1.202/24",)})
    plan = plan_network(hosts_of(macs, one, other))
    assert not plan.cables[0].is_in_place and plan.cables[0].addresses[0] == "10.201.77.1/30"


def test_the_first_free_network_of_all_hosts_is_taken(macs: ModuleType) -> None:
    hosts = pair(macs)
    routes = (
        Route(network="10.201.77.0/30", gateway="x", interface="en0"),
        Route(network="10.201.77.4/32", gateway="x", interface="utun4"),
    )
    hosts[1] = ("mac2", msgspec.structs.replace(hosts[1][1], routes=routes))  # the other host's count, too
    assert plan_network(hosts).cables[0].addresses[0] == "10.201.77.9/30"


def test_without_a_free_range_the_reason_is_told(macs: ModuleType) -> None:
    hosts = pair(macs)
    routes = tuple(
        Route(network=network, gateway="x", interface="utun4")
        for network in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    )
    hosts[0] = ("mac1", msgspec.structs.replace(hosts[0][1], routes=routes))
    with pytest.raises(BringUpError, match="no private range is free"):
        plan_network(hosts)


def test_hosts_without_cables_and_other_systems_are_told(macs: ModuleType) -> None:
    (name, report), other = hosts_of(macs, macs.Mac(number=1), macs.Mac(number=2))
    linux = msgspec.structs.replace(
        report, facts=msgspec.structs.replace(report.facts, system="Linux", interfaces=())
    )
    plan = plan_network([(name, linux), other])
    assert plan.is_done and "mac1 is no Mac" in plan.notes[0] and "no Thunderbolt cable" in plan.notes[1]


def test_ports_with_two_digits_come_after_those_with_one(macs: ModuleType) -> None:
    made = macs.mesh_of(macs.Mac(num_ports=10), 2, [((1, 9), (2, 9)), ((1, 1), (2, 1))])
    plan = plan_network(hosts_of(macs, *made))
    assert [cable.interfaces for cable in plan.cables] == [("en2", "en2"), ("en10", "en10")]


def test_a_plan_can_be_written_and_read(macs: ModuleType) -> None:
    plan = plan_network(pair(macs, is_bridged=True))
    assert msgspec.json.decode(msgspec.json.encode(plan), type=NetPlan) == plan
    step = Step(words=("a b",), undo=("c",), why="w")
    assert step.command == "sudo 'a b'" and not NetPlan(hosts=(HostSteps(host="x", steps=(step,)),)).is_done
    assert SERVICE_PREFIX.endswith(" ")


def test_addresses_that_cannot_carry_a_mesh_are_not_kept(macs: ModuleType) -> None:
    """Self-assigned ones change, and those of a bridge's member are not its own."""
    one, other = macs.mesh_of(macs.Mac(), 2, macs.full_mesh(2))
    selves = [replace(mac, thunderbolt={"en2": (f"169.254.9.{mac.number}/16",)}) for mac in (one, other)]
    assert not plan_network(hosts_of(macs, *selves)).cables[0].is_in_place
    members = [replace(mac, is_bridged=True) for mac in macs.on_cable(macs.Mac())]
    plan = plan_network(hosts_of(macs, *members))
    assert not plan.cables[0].is_in_place and "Bridge" in commands(plan, "mac1")[0]
