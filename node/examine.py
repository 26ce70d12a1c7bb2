"""What this host says of itself when it is examined: everything that `mlx-mesh doctor` looks at.

`python -m mlx_mesh.node.examine MODEL PORT [ADAPTER]` prints a HostReport as one line of JSON, last on
stdout. Only asks, as the user that runs it: nothing here needs more rights or changes anything.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import shutil
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.macos import (
    is_lid_closed,
    is_on_battery,
    parse_key_values,
    parse_network_services,
    parse_pmset,
    parse_routes,
    parse_swap_used,
)
from mlx_mesh.node.blas import find_openblas
from mlx_mesh.node.facts import gather_facts
from mlx_mesh.node.ports import port_holder, reserve_data_ports
from mlx_mesh.node.run_file import leftovers_of, state_root
from mlx_mesh.node.system import ask, is_mac

FIREWALL = "/usr/libexec/ApplicationFirewall/socketfilterfw"

HELPERS = re.compile(r"\S*\bexo\S*", re.IGNORECASE)
"""Labels of launch daemons that are known to set up Thunderbolt networks by themselves."""

_MAC_COMMANDS = {
    "translated": ["sysctl", "-n", "sysctl.proc_translated"],
    "model": ["sysctl", "-n", "hw.model"],
    "swap": ["sysctl", "vm.swapusage"],
    "version": ["sw_vers"],
    "hardware": ["system_profiler", "SPHardwareDataType", "-json"],
    "routes": ["netstat", "-rn", "-f", "inet"],
    "rdma": ["rdma_ctl", "status"],
    "power": ["pmset", "-g"],
    "battery": ["pmset", "-g", "batt"],
    "lid": ["ioreg", "-r", "-k", "AppleClamshellState", "-d", "4"],
    "firewall": [FIREWALL, "--getglobalstate"],
    "daemons": ["launchctl", "list"],
    "lease": ["ipconfig", "getpacket", "bridge0"],
    "services": ["networksetup", "-listnetworkserviceorder"],
}


def examine(model: str, port: int, adapter: str = "") -> HostReport:
    """Everything at once; takes a second or two."""
    facts = gather_facts(model, adapter)
    common = HostReport(
        facts=facts,
        now_s=time.time(),
        disk_free_bytes=shutil.disk_usage(Path.home()).free,
        max_open_files=_max_open_files(),
        port_holder=port_holder(port),
        has_data_ports=_has_data_ports(),
        leftovers=tuple(leftovers_of(state_root())),
        fast_synch=os.environ.get("MLX_METAL_FAST_SYNCH", ""),
    )
    return _of_mac(common) if is_mac() else _of_linux(common)


def _of_mac(common: HostReport) -> HostReport:
    with ThreadPoolExecutor(8) as pool:
        said = dict(zip(_MAC_COMMANDS, pool.map(ask, _MAC_COMMANDS.values()), strict=True))
    version, power = parse_key_values(said["version"]), parse_pmset(said["power"])
    uuid = re.search(r'"platform_UUID"\s*:\s*"([^"]+)"', said["hardware"])
    sleep = power.get("sleep", "")
    return msgspec.structs.replace(
        common,
        is_translated=said["translated"].strip() == "1",
        os_version=version.get("ProductVersion", ""),
        os_build=version.get("BuildVersion", ""),
        hardware_model=said["model"].strip(),
        hardware_uuid=uuid[1] if uuid else "",
        swap_used_bytes=parse_swap_used(said["swap"]),
        sleep_minutes=int(sleep) if sleep.isdigit() else None,
        is_on_battery=is_on_battery(said["battery"]),
        is_lid_closed=is_lid_closed(said["lid"]),
        firewall=parse_firewall(said["firewall"]),
        rdma_status=said["rdma"].strip(),
        dhcp=("bridge0",) if "op = " in said["lease"] else (),
        routes=parse_routes(said["routes"]),
        services=parse_network_services(said["services"]),
        helpers=tuple(sorted({match.group() for match in HELPERS.finditer(said["daemons"])})),
    )


def parse_firewall(text: str) -> str:
    """ "Firewall is enabled. (State = 1)": off, on or all (state 2 blocks everything); '' when not said."""
    match = re.search(r"State = (\d)", text)
    return {"0": "off", "1": "on", "2": "all"}.get(match[1], "") if match else ""


def _of_linux(common: HostReport) -> HostReport:
    has_gpu = Path("/proc/driver/nvidia/version").exists()
    return msgspec.structs.replace(
        common,
        has_openblas=None if has_gpu else bool(find_openblas()),
        swap_used_bytes=_linux_swap_used(_read("/proc/meminfo")),
    )


def _linux_swap_used(meminfo: str) -> int:
    sizes = dict(re.findall(r"^(SwapTotal|SwapFree):\s+(\d+) kB", meminfo, re.MULTILINE))
    return (int(sizes.get("SwapTotal", 0)) - int(sizes.get("SwapFree", 0))) * 1024


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        return Path(path).read_text().strip()
    return ""


def _max_open_files() -> int:
    """0 = no limit."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 0 if soft == resource.RLIM_INFINITY else soft


def _has_data_ports() -> bool:
    try:
        reserve_data_ports("127.0.0.1", [0], 1)
    except BringUpError:
        return False
    return True


def main(argv: list[str]) -> int:
    if len(argv) not in (2, 3) or not argv[1].isdigit():
        print("usage: python -m mlx_mesh.node.examine MODEL PORT [ADAPTER]", file=sys.stderr)
        return 2
    socket.setdefaulttimeout(5.0)
    print(msgspec.json.encode(examine(argv[0], int(argv[1]), *argv[2:])).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
