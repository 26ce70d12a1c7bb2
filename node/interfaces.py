"""This host's network interfaces, each with its kind of link."""

from __future__ import annotations

import contextlib
import ipaddress
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ifaddr

from mlx_mesh.mesh.interfaces import Interface, LinuxEntry, linux_interface, mac_interfaces
from mlx_mesh.mesh.macos import parse_hardware_ports, parse_ifconfig, parse_rdma_devices, parse_thunderbolt
from mlx_mesh.node.system import ask, is_mac

_LOOPBACK = "772"  # ARPHRD_LOOPBACK
_NET = Path("/sys/class/net")


def own_interfaces() -> tuple[Interface, ...]:
    """All of them, foreign ones included: `status` and `doctor` show what was not considered."""
    return _of_mac() if is_mac() else _of_linux()


def glance_at_interfaces() -> object:
    """Something cheap that is another one when links or addresses are: on a Mac what `ifconfig` says of them,
    without the names of ports and the rates of cables."""
    return parse_ifconfig(ask(["ifconfig", "-a"])) if is_mac() else _of_linux()


def _of_mac() -> tuple[Interface, ...]:
    with ThreadPoolExecutor(4) as pool:  # system_profiler alone takes a second
        entries, ports, thunderbolt, devices = pool.map(
            ask,
            (
                ["ifconfig", "-a"],
                ["networksetup", "-listallhardwareports"],
                ["system_profiler", "SPThunderboltDataType", "-json"],
                ["ibv_devices"],
            ),
        )
    return mac_interfaces(
        parse_ifconfig(entries),
        parse_hardware_ports(ports),
        parse_thunderbolt(thunderbolt),
        parse_rdma_devices(devices),
    )


def _of_linux() -> tuple[Interface, ...]:
    found = []
    for adapter in ifaddr.get_adapters(include_unconfigured=True):
        addresses = tuple(
            f"{ipaddress.IPv4Address(ip.ip)}/{ip.network_prefix}"
            for ip in adapter.ips
            if ip.is_IPv4 and isinstance(ip.ip, str)
        )
        found.append(linux_interface(_linux_entry(adapter.name, addresses)))
    return tuple(found)


def _linux_entry(name: str, addresses: tuple[str, ...]) -> LinuxEntry:
    folder = _NET / name
    driver = folder / "device" / "driver"
    speed = _read(folder / "speed")
    return LinuxEntry(
        name=name,
        addresses=addresses,
        is_loopback=_read(folder / "type") == _LOOPBACK
        or all(a.startswith("127.") for a in addresses or ("",)),
        is_wireless=(folder / "wireless").is_dir() or (folder / "phy80211").exists(),
        driver=driver.resolve().name if driver.exists() else "",
        # Switched off, it cannot say whether it has a carrier; nor can one of a system without these files.
        is_active=_read(folder / "carrier") in ("1", "") and _read(folder / "operstate") != "down",
        mtu=int(_read(folder / "mtu") or 0),
        mbits=int(speed) if speed.isdigit() else 0,
    )


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
