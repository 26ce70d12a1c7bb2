"""Imagined Macs: what macOS commands print on them, made up from published transcripts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.interfaces import Interface, mac_interfaces
from mlx_mesh.mesh.macos import (
    is_lid_closed,
    is_on_battery,
    parse_hardware_ports,
    parse_ifconfig,
    parse_key_values,
    parse_network_services,
    parse_pmset,
    parse_rdma_devices,
    parse_routes,
    parse_swap_used,
    parse_thunderbolt,
)
from mlx_mesh.mesh.types import HostFacts, Versions

VERSIONS = Versions(mlx_mesh="0.1.0", mlx="0.32.4", mlx_lm="0.32.2", python="3.12.1")

Cable = tuple[tuple[int, int], tuple[int, int]]  # (host, Thunderbolt port) at both ends, counted from 1


@dataclass(frozen=True)
class Mac:
    """One host. `thunderbolt` maps a port's device to its addresses, "10.0.0.1/30" each."""

    number: int = 1
    model: str = "Mac16,11"
    chip: str = "Apple M4 Pro"
    memory_gb: int = 64
    num_ports: int = 3
    generation: int = 5
    version: str = "26.2"
    build: str = "25C56"
    has_rdma: bool = True
    is_bridged: bool = False
    ethernet: tuple[str, ...] = ("192.168.1.1/24",)
    ethernet_is_wifi: bool = False  # a laptop: en0 is Wi-Fi and there is no Ethernet port
    wifi: tuple[str, ...] = ()
    thunderbolt: dict[str, tuple[str, ...]] = field(default_factory=dict)
    bridge: tuple[str, ...] = ()
    vpn: tuple[str, ...] = ()
    routes: tuple[tuple[str, str, str], ...] = ()  # destination, gateway, interface
    sleep_minutes: int = 0
    mtu: int = 1500
    cable_gbits: int = 0  # 0 = what the Mac can
    is_on_battery: bool = False
    is_lid_closed: bool = False
    wired_limit_mb: int = 0
    swap_used: str = "0.00M"
    is_translated: bool = False  # its Python runs under Rosetta
    is_bridge_leased: bool = False  # bridge0 holds a DHCP lease
    services: tuple[tuple[str, str], ...] = ()  # (device, name) of network services beside the usual ones
    cables: tuple[Cable, ...] = ()

    @property
    def ports(self) -> list[str]:
        """Devices of the Thunderbolt ports: en0 and en1 are taken."""
        return [f"en{number + 1}" for number in range(1, self.num_ports + 1)]

    def own_id(self, port: int) -> str:
        return str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{self.number}.{port}.mac.test")).upper()

    def peer_of(self, port: int) -> tuple[int, int] | None:
        ends = dict(self.cables) | {there: here for here, there in self.cables}
        return ends.get((self.number, port))


def mesh_of(mac: Mac, count: int, cables: Sequence[Cable]) -> list[Mac]:
    """So many Macs of one kind with these cables between them, on one Ethernet."""
    return [
        replace(mac, number=number, cables=tuple(cables), ethernet=(f"192.168.1.{number}/24",))
        for number in range(1, count + 1)
    ]


def full_mesh(count: int) -> list[Cable]:
    """A cable for each pair; each host uses its ports from the first on."""
    free = dict.fromkeys(range(1, count + 1), 1)
    cables = []
    for one in range(1, count + 1):
        for other in range(one + 1, count + 1):
            cables.append(((one, free[one]), (other, free[other])))
            free[one] += 1
            free[other] += 1
    return cables


def transcript(mac: Mac) -> dict[str, str]:
    """Command line -> what it prints."""
    return {
        "uname": "Darwin\n",
        "uname -r": "25.2.0\n",
        "uname -rs": "Darwin 25.2.0\n",
        "uname -s": "Darwin\n",
        "uname -m": "x86_64\n" if mac.is_translated else "arm64\n",
        "sysctl -n sysctl.proc_translated": f"{int(mac.is_translated)}\n",
        "sw_vers": f"ProductName:\t\tmacOS\nProductVersion:\t\t{mac.version}\nBuildVersion:\t\t{mac.build}\n",
        "system_profiler SPThunderboltDataType -json": json.dumps({"SPThunderboltDataType": _buses(mac)}),
        "networksetup -listallhardwareports": _hardware_ports(mac),
        "ifconfig -a": _ifconfig(mac),
        "ibv_devices": _rdma_devices(mac),
        "rdma_ctl status": "enabled\n" if mac.has_rdma else "disabled\n",
        "netstat -rn -f inet": _routes(mac),
        "pmset -g": f"System-wide power settings:\nCurrently in use:\n sleep  {mac.sleep_minutes}\n",
        "pmset -g batt": f"Now drawing from '{'Battery' if mac.is_on_battery else 'AC'} Power'\n",
        "ioreg -r -k AppleClamshellState -d 4": (
            f'  "AppleClamshellState" = {"Yes" if mac.is_lid_closed else "No"}\n'
        ),
        "sysctl hw.memsize": f"hw.memsize: {mac.memory_gb << 30}\n",
        "sysctl machdep.cpu.brand_string": f"machdep.cpu.brand_string: {mac.chip}\n",
        "sysctl iogpu.wired_limit_mb": f"iogpu.wired_limit_mb: {mac.wired_limit_mb}\n",
        "sysctl -n hw.model": f"{mac.model}\n",
        "system_profiler SPHardwareDataType -json": json.dumps(
            {"SPHardwareDataType": [{"machine_model": mac.model, "platform_UUID": mac.own_id(0)}]}, indent=1
        ),
        "networksetup -listnetworkserviceorder": _services(mac),
        "sysctl vm.swapusage": (
            f"vm.swapusage: total = 2048.00M  used = {mac.swap_used}  free = 1024.00M  (encrypted)\n"
        ),
    } | (_lease(mac) if mac.is_bridge_leased else {})


def _lease(mac: Mac) -> dict[str, str]:
    return {"ipconfig getpacket bridge0": "op = BOOTREPLY\nhtype = 1\nyiaddr = 192.168.1.77\n"}


def _services(mac: Mac) -> str:
    """networksetup's list: a service of the bridge, of Ethernet and of Wi-Fi; a port has one of its own only
    when it was made by hand."""
    hardware = dict((device, port) for port, device in _port_names(mac))
    rows = [
        (port, port, device, True) for device, port in hardware.items() if not port.startswith("Thunderbolt")
    ]
    rows.append(("Thunderbolt Bridge", "Thunderbolt Bridge", "bridge0", mac.is_bridged))
    rows += [(name, hardware[device], device, True) for device, name in mac.services]
    lines = ["An asterisk (*) denotes that a network service is disabled."]
    for number, (name, port, device, is_on) in enumerate(rows, 1):
        lines += [f"({number if is_on else '*'}) {name}", f"(Hardware Port: {port}, Device: {device})", ""]
    return "\n".join(lines) + "\n"


def _buses(mac: Mac) -> list[dict[str, Any]]:
    return [_bus(mac, port) for port in range(1, mac.num_ports + 1)]


def _bus(mac: Mac, port: int) -> dict[str, Any]:
    peer = mac.peer_of(port)
    linked, idle = ("80 Gb/s", "Up to 120 Gb/s") if mac.generation == 5 else ("40 Gb/s", "Up to 40 Gb/s")
    bus: dict[str, Any] = {
        "_name": f"thunderboltusb4_bus_{port - 1}",
        "device_name_key": mac.model,
        "domain_uuid_key": mac.own_id(port),
        "receptacle_1_tag": {
            "current_speed_key": (f"{mac.cable_gbits} Gb/s" if mac.cable_gbits else linked) if peer else idle,
            "receptacle_id_key": str(port),
            "receptacle_status_key": f"receptacle_{'' if peer else 'no_devices_'}connected",
        },
    }
    if peer:
        host, other = peer
        bus["_items"] = [
            {"device_name_key": mac.model, "domain_uuid_key": replace(mac, number=host).own_id(other)}
        ]
    return bus


def _port_names(mac: Mac) -> list[tuple[str, str]]:
    names = [("Wi-Fi", "en0")] if mac.ethernet_is_wifi else [("Ethernet", "en0"), ("Wi-Fi", "en1")]
    names += [(f"Thunderbolt {number}", device) for number, device in enumerate(mac.ports, 1)]
    return [*names, ("Thunderbolt Bridge", "bridge0")]


def _hardware_ports(mac: Mac) -> str:
    blocks = [
        f"\nHardware Port: {port}\nDevice: {device}\nEthernet Address: 02:00:00:00:00:01\n"
        for port, device in _port_names(mac)
    ]
    return "".join(blocks) + "\nVLAN Configurations\n===================\n"


def _ifconfig(mac: Mac) -> str:
    blocks = ["lo0: flags=8049<UP,LOOPBACK,RUNNING,MULTICAST> mtu 16384\n\tinet 127.0.0.1 netmask 0xff000000"]
    blocks.append(_interface("en0", mac.ethernet, is_active=bool(mac.ethernet), mtu=mac.mtu))
    if not mac.ethernet_is_wifi:
        blocks.append(_interface("en1", mac.wifi, is_active=bool(mac.wifi)))
    for number, device in enumerate(mac.ports, 1):
        is_active = mac.peer_of(number) is not None
        blocks.append(_interface(device, mac.thunderbolt.get(device, ()), is_active=is_active))
    members = "".join(f"\n\tmember: {device} flags=3<LEARNING,DISCOVER>" for device in mac.ports)
    bridge = _interface("bridge0", mac.bridge, is_active=mac.is_bridged)
    blocks.append(bridge + (members if mac.is_bridged else ""))
    blocks.append("awdl0: flags=8943<UP,BROADCAST,RUNNING> mtu 1500\n\tstatus: active")
    if mac.vpn:
        blocks.append(_interface("utun4", mac.vpn, is_active=True))
    return "\n".join(blocks) + "\n"


def _interface(name: str, addresses: Sequence[str], *, is_active: bool, mtu: int = 1500) -> str:
    flags = "8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST>"
    lines = [f"{name}: flags={flags} mtu {mtu}", "\tether 02:00:00:00:00:01"]
    for text in addresses:
        address, _, length = text.partition("/")
        mask = (0xFFFFFFFF << (32 - int(length))) & 0xFFFFFFFF
        lines.append(f"\tinet {address} netmask {mask:#010x} broadcast {address}")
    return "\n".join([*lines, f"\tstatus: {'active' if is_active else 'inactive'}"])


def _rdma_devices(mac: Mac) -> str:
    rows = [f"    rdma_{device}         \t80{index}4c42000000000" for index, device in enumerate(mac.ports)]
    header = ["    device          \t   node GUID", "    ------          \t----------------"]
    return "\n".join([*header, *(rows if mac.has_rdma else [])]) + "\n"


def _routes(mac: Mac) -> str:
    lines = [
        "Routing tables",
        "",
        "Internet:",
        "Destination        Gateway            Flags     Netif Expire",
    ]
    routes = mac.routes or (("default", "192.168.1.254", "en0"), ("192.168.1", "link#4", "en0"))
    lines += [
        f"{destination:<18} {gateway:<18} UGScg  {interface}" for destination, gateway, interface in routes
    ]
    return "\n".join(lines) + "\n"


def interfaces_of(mac: Mac) -> tuple[Interface, ...]:
    lines = transcript(mac)
    return mac_interfaces(
        parse_ifconfig(lines["ifconfig -a"]),
        parse_hardware_ports(lines["networksetup -listallhardwareports"]),
        parse_thunderbolt(lines["system_profiler SPThunderboltDataType -json"]),
        parse_rdma_devices(lines["ibv_devices"]),
    )


def report_of(mac: Mac) -> HostReport:
    """What `mlx_mesh.node.examine` would say on it, by the parsers that a real one's answers go through."""
    lines = transcript(mac)
    version, power = parse_key_values(lines["sw_vers"]), parse_pmset(lines["pmset -g"])
    return HostReport(
        facts=HostFacts(
            hostname=f"mac{mac.number}",
            system="Darwin",
            machine="x86_64" if mac.is_translated else "arm64",
            chip=mac.chip,
            memory_bytes=mac.memory_gb << 30,
            usable_memory_bytes=(mac.memory_gb << 30) * 7 // 8,
            addresses=(),
            versions=VERSIONS,
            interfaces=interfaces_of(mac),
            model_digest="aa" * 32,
        ),
        now_s=1.0,
        is_translated=lines["sysctl -n sysctl.proc_translated"].strip() == "1",
        os_version=version["ProductVersion"],
        os_build=version["BuildVersion"],
        hardware_model=mac.model,
        hardware_uuid=mac.own_id(0),
        swap_used_bytes=parse_swap_used(lines["sysctl vm.swapusage"]),
        disk_free_bytes=500 * 10**9,
        max_open_files=10240,
        sleep_minutes=int(power["sleep"]),
        is_on_battery=is_on_battery(lines["pmset -g batt"]),
        is_lid_closed=is_lid_closed(lines["ioreg -r -k AppleClamshellState -d 4"]),
        firewall="off",
        rdma_status=lines["rdma_ctl status"].strip(),
        dhcp=("bridge0",) if "op = " in lines.get("ipconfig getpacket bridge0", "") else (),
        routes=parse_routes(lines["netstat -rn -f inet"]),
        services=parse_network_services(lines["networksetup -listnetworkserviceorder"]),
    )


def on_cable(mac: Mac, count: int = 2) -> list[Mac]:
    """Macs of one kind, each two on a cable that has a network of its own."""
    made = mesh_of(mac, count, full_mesh(count))
    for number, ((one, port), (other, peer)) in enumerate(full_mesh(count)):
        for index, (host, at) in enumerate(((one, port), (other, peer)), 1):
            own = dict(made[host - 1].thunderbolt) | {f"en{at + 1}": (f"10.0.{number}.{index}/30",)}
            made[host - 1] = replace(made[host - 1], thunderbolt=own)
    return made


def fixtures() -> dict[str, list[Mac]]:
    """Sets of hosts, by what is special about them."""
    plain, second = on_cable(Mac())
    laptop = Mac(model="MacBookPro18,2", chip="Apple M1 Max", num_ports=3, generation=4, has_rdma=True)
    return {
        "tb5-2": mesh_of(Mac(), 2, full_mesh(2)),
        "tb5-4": mesh_of(
            Mac(model="Mac15,14", chip="Apple M3 Ultra", memory_gb=512, num_ports=6), 4, full_mesh(4)
        ),
        "tb5-2-bridge": mesh_of(Mac(is_bridged=True), 2, full_mesh(2)),
        "tb5-2-nordma": mesh_of(Mac(has_rdma=False), 2, full_mesh(2)),
        "tb5-2 with addresses": [plain, second],
        "M1 with Thunderbolt 4": on_cable(laptop),
        "Wi-Fi only": [
            replace(mac, cables=(), ethernet_is_wifi=True) for mac in mesh_of(Mac(), 2, full_mesh(2))
        ],
        "overlapping subnets": [plain, replace(second, ethernet=("10.0.0.77/16",))],
        "a VPN whose route covers the cable": [
            plain,
            replace(
                second,
                vpn=("10.8.0.2/24",),
                routes=(("default", "192.168.1.254", "en0"), ("10", "10.8.0.1", "utun4")),
            ),
        ],
        "a DHCP lease on bridge0": mesh_of(
            Mac(is_bridged=True, bridge=("192.168.1.77/24",), is_bridge_leased=True), 2, full_mesh(2)
        ),
        "lid closed on battery": [plain, replace(second, is_on_battery=True, is_lid_closed=True)],
        "Rosetta Python": [plain, replace(second, is_translated=True)],
        "different macOS builds": [plain, replace(second, build="25D60", version="26.3")],
    }
