"""Stand-ins for macOS's commands on a host of the lab: put a Mac of tests/macs.py there.

What never changes is printed as that Mac's transcript has it. What a network set-up changes is real: the
stand-in of networksetup gives addresses to the host's interfaces (the ends of the lab's cables), and that of
ifconfig tells what they have. Called as a program by the name of the command.
"""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NAMES = [
    *(
        "uname",
        "sw_vers",
        "system_profiler",
        "networksetup",
        "ifconfig",
        "ibv_devices",
        "rdma_ctl",
        "netstat",
    ),
    *("pmset", "ioreg", "sysctl", "ipconfig", "launchctl", "caffeinate", "sudo", "route"),
]
BRIDGE_SERVICE = "Thunderbolt Bridge"


def place(programs: Path, transcript: dict[str, str], is_bridged: bool, services: list[list[str]]) -> None:
    """Make a Mac of the host with that folder on its PATH. `services`: [name, hardware port, device]."""
    state = {
        "transcript": transcript,
        "is_bridged": is_bridged,
        "services": [[*service, True] for service in services],
        "asks_for_password": False,
    }
    (programs / "mac.json").write_text(json.dumps(state))
    for name in NAMES:
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -I {__file__} "$0" "$@"\n')
        program.chmod(0o755)


class Host:
    """This host as it is now."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / "mac.json"
        self.state: dict[str, Any] = json.loads(self._file.read_text())
        self.transcript: dict[str, str] = self.state["transcript"]

    def save(self) -> None:
        self._file.write_text(json.dumps(self.state))

    # ------------------------------------------------------------ what changes

    def ifconfig(self) -> str:
        """The transcript's blocks, each with the addresses that the real interface has."""
        real = {
            item["ifname"]: [(a["local"], a["prefixlen"]) for a in item["addr_info"] if a["family"] == "inet"]
            for item in json.loads(output("ip", "-j", "addr"))
        }
        blocks: list[list[str]] = []
        for line in self.transcript["ifconfig -a"].splitlines():
            if not line[:1].isspace():
                blocks.append([])
            if line[:1].isspace() and line.split()[0] in ("inet", "member:"):
                continue
            blocks[-1].append(line)
        ports = [name for _, name in self.thunderbolt_ports()]
        for block in blocks:
            name = block[0].partition(":")[0]
            for address, length in real.get("lo" if name == "lo0" else name, ()):
                mask = int(ipaddress.IPv4Network(f"0.0.0.0/{length}").netmask)
                block.insert(1, f"\tinet {address} netmask {mask:#010x} broadcast {address}")
            if name == "bridge0" and self.state["is_bridged"]:
                block += [f"\tmember: {port} flags=3<LEARNING,DISCOVER>" for port in ports]
        return "\n".join("\n".join(block) for block in blocks) + "\n"

    def thunderbolt_ports(self) -> list[tuple[str, str]]:
        """(hardware port, device) of each."""
        lines = self.transcript["networksetup -listallhardwareports"].splitlines()
        pairs = [
            (line.partition(": ")[2], after.partition(": ")[2])
            for line, after in itertools.pairwise(lines)
            if line.startswith("Hardware Port: Thunderbolt ") and after.startswith("Device: en")
        ]
        return pairs

    def service_order(self) -> str:
        lines = ["An asterisk (*) denotes that a network service is disabled."]
        for number, (name, port, device, is_on) in enumerate(self.state["services"], 1):
            lines += [
                f"({number if is_on else '*'}) {name}",
                f"(Hardware Port: {port}, Device: {device})",
                "",
            ]
        return "\n".join(lines) + "\n"

    def netstat(self) -> str:
        lines = [
            "Routing tables",
            "",
            "Internet:",
            "Destination        Gateway            Flags     Netif Expire",
        ]
        for route in json.loads(output("ip", "-j", "route")):
            gateway = route.get("gateway", "link#4")
            lines.append(f"{route['dst']:<18} {gateway:<18} UCS  {route['dev']}")
        return "\n".join(lines) + "\n"

    # ------------------------------------------------------------ networksetup

    def networksetup(self, words: list[str]) -> str:
        services = self.state["services"]
        if words[0].startswith(("-set", "-create", "-remove")) and os.environ.get("MAC_ROOT") != "1":
            fail("** Error: Command requires admin privileges.")
        own = next((service for service in services if service[0] == words[1]), None) if words[1:] else None
        match words:
            case ["-listnetworkserviceorder"]:
                return self.service_order()
            case ["-createnetworkservice", name, port]:
                device = dict(self.thunderbolt_ports()).get(port)
                if own is not None or device is None:
                    fail(f"** Error: {name} on {port} cannot be made.")
                services.append([name, port, device, True])
            case ["-removenetworkservice", _] if own is not None:
                services.remove(own)
                output("ip", "addr", "flush", "dev", own[2])
            case ["-setmanual", _, address, mask] if own is not None:
                if self.state["is_bridged"]:
                    fail(f"** Error: {own[2]} is a member of bridge0.")
                length = ipaddress.IPv4Network(f"0.0.0.0/{mask}").prefixlen
                output("ip", "addr", "flush", "dev", own[2])
                output("ip", "addr", "add", f"{address}/{length}", "dev", own[2])
            case ["-setv4off" | "-setdhcp", _] if own is not None:
                output("ip", "addr", "flush", "dev", own[2])
            case ["-setnetworkserviceenabled", _, "on" | "off" as value] if own is not None:
                own[3] = value == "on"
                if own[0] == BRIDGE_SERVICE:
                    self.state["is_bridged"] = own[3]
            case _:
                fail(f"** Error: The parameters were not valid: {words}")
        self.save()
        return ""


def output(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def fail(text: str) -> None:
    print(text)
    sys.exit(4)


def sudo(host: Host, words: list[str]) -> None:
    if host.state["asks_for_password"]:
        print("sudo: a password is required", file=sys.stderr)
        sys.exit(1)
    if words[:1] == ["-n"]:
        words = words[1:]
    os.environ["MAC_ROOT"] = "1"
    os.execvp(words[0], words)


def caffeinate(words: list[str]) -> None:
    pid = int(words[words.index("-w") + 1])
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.2)


def main(program: str, words: list[str]) -> None:
    folder = Path(program).resolve().parent
    host, name = Host(folder), Path(program).name
    with (folder / "calls.log").open("a") as log:
        log.write(f"{' '.join([name, *words])}\n")
    asked = " ".join([name, *words])
    if name == "sudo":
        sudo(host, words)
    elif name == "caffeinate":
        caffeinate(words)
    elif name == "ifconfig" and words == ["-a"]:
        print(host.ifconfig(), end="")
    elif name == "netstat":
        print(host.netstat(), end="")
    elif (name == "networksetup" and asked not in host.transcript) or words == ["-listnetworkserviceorder"]:
        print(host.networksetup(words), end="")
    elif name == "route" and words[:2] == ["-n", "get"]:
        print(f"  interface: {json.loads(output('ip', '-j', 'route', 'get', words[2]))[0]['dev']}")
    elif asked in host.transcript:
        print(host.transcript[asked], end="")
    else:
        print(f"{name}: nothing is known of {asked!r} here", file=sys.stderr)
        sys.exit(64)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
