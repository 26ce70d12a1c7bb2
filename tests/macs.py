"""Imagined Macs: what macOS commands print on them, made up from published transcripts."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

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
        "uname -s": "Darwin\n",
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
        "sysctl hw.memsize machdep.cpu.brand_string iogpu.wired_limit_mb": (
            f"hw.memsize: {mac.memory_gb << 30}\nmachdep.cpu.brand_string: {mac.chip}\n"
            f"iogpu.wired_limit_mb: {mac.wired_limit_mb}\n"
        ),
        "sysctl hw.model": f"hw.model: {mac.model}\n",
        "sysctl vm.swapusage": (
            f"vm.swapusage: total = 2048.00M  used = {mac.swap_used}  free = 1024.00M  (encrypted)\n"
        ),
    }


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
