"""What macOS commands print, as values. Pure.

Each parser takes the whole output of one command and ignores lines that it does not know: newer systems add
some. Formats are those of published transcripts; none has been read on a Mac by this program yet.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec


class IfconfigEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One interface of `ifconfig -a`. `addresses` are IPv4 with their prefix, as in "10.0.0.2/24"."""

    name: str
    flags: tuple[str, ...]
    mtu: int = 0
    addresses: tuple[str, ...] = ()
    members: tuple[str, ...] = ()  # of a bridge
    status: str = ""  # active, inactive; '' = not said
    mbits: int = 0  # that Ethernet agreed on; 0 = not said

    @property
    def is_active(self) -> bool:
        return self.status == "active" or (not self.status and "RUNNING" in self.flags)


class ThunderboltPort(msgspec.Struct, frozen=True, kw_only=True):
    """One receptacle of `system_profiler SPThunderboltDataType -json`.

    `own_id` and `peer_id` are domain UUIDs: a cable joins two hosts when each port's peer is the other's own
    (so does `mlx.distributed_config`).
    """

    receptacle: int  # N of the hardware port "Thunderbolt N"
    own_id: str
    peer_id: str = ""  # '' = no host at the other end of the cable
    peer_name: str = ""
    is_connected: bool = False
    gbits: int = 0  # of the link, or of the idle port; 0 = not said

    @property
    def generation(self) -> int:
        """5 from 80 Gb/s on, else 4 (which stands for Thunderbolt 3, 4 and USB4); 0 = not known. An idle port
        tells what it could do."""
        if not self.gbits:
            return 0
        return 5 if self.gbits >= 80 else 4


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """One line of `netstat -rn -f inet`. `network` is "0.0.0.0/0" for the default route."""

    network: str
    gateway: str
    interface: str


class NetworkService(msgspec.Struct, frozen=True, kw_only=True):
    """One service of `networksetup -listnetworkserviceorder`: what macOS keeps settings for."""

    name: str
    port: str  # hardware port, as in "Thunderbolt 1"
    device: str
    is_enabled: bool = True


def parse_network_services(text: str) -> tuple[NetworkService, ...]:
    """All services in their order. A disabled one has an asterisk for its number."""
    found = re.findall(r"^\((\d+|\*)\) (.+)\n\(Hardware Port: (.+), Device: ([^)]*)\)", text, re.MULTILINE)
    return tuple(
        NetworkService(name=name.strip(), port=port.strip(), device=device, is_enabled=number != "*")
        for number, name, port, device in found
    )


def parse_hardware_ports(text: str) -> dict[str, str]:
    """Device -> hardware port of `networksetup -listallhardwareports`, as in en2 -> "Thunderbolt 1"."""
    pairs = re.findall(r"^Hardware Port: (.+)\nDevice: (\S+)", text, re.MULTILINE)
    return {device: port.strip() for port, device in pairs}


def parse_ifconfig(text: str) -> tuple[IfconfigEntry, ...]:
    """All interfaces, in the order of the output."""
    return tuple(
        _interface(block) for block in re.split(r"^(?=\S)", text, flags=re.MULTILINE) if ":" in block
    )


def _interface(block: str) -> IfconfigEntry:
    name = block.partition(":")[0].strip()
    flags = re.search(r"flags=\w+<([^>]*)>", block)
    mtu = re.search(r"\bmtu (\d+)", block)
    status = re.search(r"^\s+status: (\S+)", block, re.MULTILINE)
    inet = re.findall(r"^\s+inet (\S+)(?: --> \S+)? netmask (\S+)", block, re.MULTILINE)
    return IfconfigEntry(
        name=name,
        flags=tuple(flags[1].split(",")) if flags and flags[1] else (),
        mtu=int(mtu[1]) if mtu else 0,
        addresses=tuple(f"{address}/{_prefix_length(mask)}" for address, mask in inet),
        members=tuple(re.findall(r"^\s+member: (\S+)", block, re.MULTILINE)),
        status=status[1] if status else "",
        mbits=_media_mbits(block),
    )


def _media_mbits(block: str) -> int:
    """Of `media: autoselect (10Gbase-T <full-duplex>)`, 1000baseT, 2500Base-T and the like."""
    media = re.search(r"^\s+media: .*?(\d+)(G?)base", block, re.MULTILINE | re.IGNORECASE)
    return int(media[1]) * (1000 if media[2] else 1) if media else 0


def _prefix_length(mask: str) -> int:
    """Of a netmask in hex (macOS) or in dots."""
    value = int(mask, 16) if mask.startswith("0x") else int(ipaddress.IPv4Address(mask))
    return value.bit_count()


def parse_thunderbolt(text: str) -> tuple[ThunderboltPort, ...]:
    """All receptacles that belong to a bus with an id, in the order of the output; () when it is no JSON."""
    try:
        buses = json.loads(text)["SPThunderboltDataType"]
    except (ValueError, KeyError, TypeError):
        return ()
    return tuple(port for bus in _mappings(buses) for port in _ports_of(bus))


def _mappings(value: object) -> Iterator[Mapping[str, Any]]:
    if isinstance(value, list):
        yield from (item for item in value if isinstance(item, dict))


def _ports_of(bus: Mapping[str, Any]) -> Iterator[ThunderboltPort]:
    own_id, tag = bus.get("domain_uuid_key"), bus.get("receptacle_1_tag")
    if not isinstance(own_id, str) or not isinstance(tag, dict):
        return
    number = str(tag.get("receptacle_id_key", ""))
    if not number.isdigit():
        return
    # Only a host has a domain of its own; behind a dock it is nested deeper and no direct cable.
    peer = next((item for item in _mappings(bus.get("_items")) if item.get("domain_uuid_key")), {})
    speed = re.search(r"(\d+) Gb/s", str(tag.get("current_speed_key", "")))
    yield ThunderboltPort(
        receptacle=int(number),
        own_id=own_id,
        peer_id=str(peer.get("domain_uuid_key", "")),
        peer_name=str(peer.get("device_name_key", "")),
        is_connected=tag.get("receptacle_status_key") == "receptacle_connected",
        gbits=int(speed[1]) if speed else 0,
    )


def parse_rdma_devices(text: str) -> tuple[str, ...]:
    """Device names of `ibv_devices`: two header lines, then one device each."""
    rows = (line.split() for line in text.splitlines())
    return tuple(row[0] for row in rows if len(row) == 2 and re.fullmatch(r"[0-9a-fA-F:]{16,}", row[1]))


def parse_routes(text: str) -> tuple[Route, ...]:
    """IPv4 routes of `netstat -rn -f inet`; lines that are none are left out."""
    routes = []
    for line in text.splitlines():
        words = line.split()
        if len(words) < 4:
            continue
        network = _network_of(words[0])
        if network:
            routes.append(Route(network=network, gateway=words[1], interface=words[3]))
    return tuple(routes)


def _network_of(destination: str) -> str:
    """netstat leaves out zeros at the end: "10.77/16", "169.254", "default"; '' = no IPv4 destination."""
    if destination == "default":
        return "0.0.0.0/0"
    address, _, length = destination.partition("/")
    parts = address.split(".")
    if len(parts) > 4 or not all(part.isdigit() and int(part) < 256 for part in parts):
        return ""
    if not length:
        length = str(8 * len(parts))
    if not length.isdigit() or int(length) > 32:
        return ""
    full = ".".join([*parts, *["0"] * (4 - len(parts))])
    return str(ipaddress.ip_network(f"{full}/{length}", strict=False))


def parse_key_values(text: str) -> dict[str, str]:
    """`key: value` lines, as sysctl and sw_vers print them."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {key.strip(): value.strip() for key, colon, value in pairs if colon}


def parse_pmset(text: str) -> dict[str, str]:
    """Settings of `pmset -g`: name -> first word of the value, as in sleep -> "0"."""
    rows = (line.split() for line in text.splitlines() if line.startswith(" "))
    return {row[0]: row[1] for row in rows if len(row) > 1}


def is_on_battery(text: str) -> bool:
    """Of `pmset -g batt`: "Now drawing from 'Battery Power'"."""
    return "'Battery Power'" in text


def is_lid_closed(text: str) -> bool:
    """Of `ioreg -r -k AppleClamshellState -d 4`."""
    return re.search(r'"AppleClamshellState"\s*=\s*Yes', text) is not None


def parse_swap_used(text: str) -> int:
    """Bytes in use, of `sysctl vm.swapusage` ("total = 3072.00M  used = 1021.50M ..."); 0 when not said."""
    match = re.search(r"used = ([\d.]+)([KMGT])", text)
    return round(float(match[1]) * 1024 ** ("KMGT".index(match[2]) + 1)) if match else 0
