"""Other processes on this host, identified by pid and start time together: a pid alone may be anybody."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

_PS_S = 5.0
_POLL_S = 0.02


class ProcessId(msgspec.Struct, frozen=True, kw_only=True):
    """One process, for ever: no other one has both the pid and the start time."""

    pid: int
    start_time: str  # opaque; compared for equality


def identify(pid: int) -> ProcessId | None:
    """The identity of a running process; None when there is none (a zombie counts as none)."""
    start_time = _start_time(pid)
    return ProcessId(pid=pid, start_time=start_time) if start_time else None


def is_alive(process: ProcessId) -> bool:
    """Whether exactly this process runs."""
    return identify(process.pid) == process


def is_stopped(pid: int) -> bool:
    """Whether a process of ours is stopped. Only Linux says so without the cost of a child process."""
    if sys.platform != "linux":
        return False
    try:
        return parse_stat(Path(f"/proc/{pid}/stat").read_text())[0] in "Tt"
    except (OSError, IndexError):
        return False


def kill_and_wait(process: ProcessId, timeout_s: float) -> bool:
    """KILL this process, if it is the one, with its process group; True when it is gone in time."""
    if not is_alive(process):
        return True
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:  # our children lead their own groups
            os.killpg(process.pid, signal.SIGKILL)
        else:
            os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + timeout_s
    while is_alive(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return True


def parse_stat(stat: str) -> tuple[str, str]:
    """(state, start time in clock ticks since boot) of the text of /proc/PID/stat. The name, field 2,
    may contain blanks and parentheses."""
    fields = stat.rpartition(")")[2].split()
    return fields[0], fields[19]


def _start_time(pid: int) -> str:
    if sys.platform == "linux":
        try:
            state, ticks = parse_stat(Path(f"/proc/{pid}/stat").read_text())
        except (OSError, IndexError):
            return ""
        return "" if state in "ZX" else f"{_boot_id()}:{ticks}"
    try:
        done = subprocess.run(
            ["/bin/ps", "-o", "stat=,lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            timeout=_PS_S,
            check=False,
            env={"LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    state, _, started = done.stdout.strip().partition(" ")
    return "" if state.startswith("Z") else started.strip()


def _boot_id() -> str:
    """Ticks since boot say nothing after the next boot."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def describe_exit(returncode: int) -> str:
    """Words for a return code as subprocess gives it: "ended with status 3", "was killed by SIGKILL"."""
    if returncode >= 0:
        return f"ended with status {returncode}"
    try:
        return f"was killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"was killed by signal {-returncode}"
