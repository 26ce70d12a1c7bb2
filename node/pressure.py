"""Whether this host is short of memory, as its system itself judges it. Cheap enough for every heartbeat."""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

STALL_PERCENT = 20.0
"""Linux: so much of the last ten seconds all work stood still for memory. Swapping a little is far below."""

_PSI_FILES = (Path("/proc/pressure/memory"), Path("/sys/fs/cgroup/memory.pressure"))  # host, and container
_MAC_LEVEL = b"kern.memorystatus_vm_pressure_level"
_MAC_CRITICAL = 4  # 1 = normal, 2 = warning; macOS ends processes next


def read_pressure() -> str:
    """What is wrong, in words; '' while nothing is, or where the system does not tell. Never raises."""
    if sys.platform == "darwin":
        return mac_pressure(_mac_level())
    return linux_pressure([_text_of(path) for path in _PSI_FILES])


def linux_pressure(texts: list[str]) -> str:
    """Of pressure stall information, the worst of several files."""
    found = [
        float(share) for text in texts for share in re.findall(r"^full avg10=([\d.]+)", text, re.MULTILINE)
    ]
    worst = max(found, default=0.0)
    if worst < STALL_PERCENT:
        return ""
    return f"all work stood still for memory in {worst:.0f} % of the last 10 s"


def mac_pressure(level: int) -> str:
    return "macOS reports critical memory pressure" if level >= _MAC_CRITICAL else ""


def _text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # a kernel without it
        return ""


def _mac_level() -> int:
    """0 when it cannot be read."""
    level = ctypes.c_int(0)
    size = ctypes.c_size_t(ctypes.sizeof(level))
    library = ctypes.CDLL(None, use_errno=True)
    done = library.sysctlbyname(_MAC_LEVEL, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
    return level.value if done == 0 else 0
