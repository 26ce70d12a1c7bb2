"""Processes by identity: a pid alone may have been given to another program since."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

POLL_S = 0.02  # there is no portable way to wait for a process that is not a child


def started(pid: int) -> str:
    """When `pid` started, as text that is the same for the life of that process; '' when there is none.
    A zombie counts as gone."""
    if sys.platform == "linux":
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return ""
        return "" if fields[0] == b"Z" else fields[19].decode()
    done = subprocess.run(
        ["/bin/ps", "-o", "stat=", "-o", "lstart=", "-p", str(pid)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={"LC_ALL": "C"},
        check=False,
    )
    state, _, since = done.stdout.decode().strip().partition(" ")
    return "" if state.startswith("Z") else " ".join(since.split())


def end(pid: int, since: str, term_s: float, kill_s: float, wait_s: float = 0.0) -> str:
    """Wait, TERM, wait, KILL, wait. Says what happened: gone, other (the pid is another process now),
    ended, killed or alive."""
    if wait_s > 0 and since:
        wait_until_gone(pid, since, wait_s)
    now = started(pid)
    if not now:
        return "gone"
    if now != since:
        return "other"
    for sig, limit_s, word in ((signal.SIGTERM, term_s, "ended"), (signal.SIGKILL, kill_s, "killed")):
        if limit_s <= 0:
            continue
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sig)
        if wait_until_gone(pid, since, limit_s):
            return word
    return "alive"


def wait_until_gone(pid: int, since: str, limit_s: float) -> bool:
    """False when that process is still there after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while started(pid) == since:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def forget(mesh: str, host: str, pid: int, kill_s: float) -> str:
    """Remove the run file of agent `pid`, which was killed, once the children named in it are gone, too.
    Returns what is left, in words."""
    root = os.environ.get("XDG_STATE_HOME", "")
    base = Path(root) if Path(root).is_absolute() else Path.home() / ".local" / "state"
    path = base / "mlx-mesh" / mesh / f"agent-{re.sub(r'[^A-Za-z0-9._-]', '_', host).lstrip('.') or '_'}.json"
    try:
        record = json.loads(path.read_bytes())
        if record["agent"]["pid"] != pid:
            return ""  # somebody else's by now
        children = [child for child in (*record["engines"].values(), record["proxy"]) if child]
        for child in children:  # they end by themselves with their agent
            since = str(child["start_time"])
            if sys.platform == "linux":
                since = since.rpartition(":")[2]  # what is before it tells the boot
            if end(child["pid"], " ".join(since.split()), 0.0, kill_s, wait_s=kill_s) == "alive":
                return (
                    f"{host}: a child of the killed agent (pid {child['pid']}) does not end even by SIGKILL"
                )
        path.unlink()
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{host}: the killed agent's {path} cannot be read or removed ({error}); remove it"
    return ""


def main(marker: str, request: str) -> None:
    """`{"do": "identify", "pids": [..]}`, `{"do": "end", "processes": [[pid, started]..], ...}`, or
    `{"do": "forget", ...}`."""
    asked = json.loads(request)
    answer: dict[str, str]
    if asked["do"] == "identify":
        answer = {str(pid): started(pid) for pid in asked["pids"]}
    elif asked["do"] == "forget":
        answer = {"left": forget(asked["name"], asked["host"], asked["pid"], asked["kill_s"])}
    else:
        answer = {
            str(pid): end(pid, since, asked["term_s"], asked["kill_s"], asked.get("wait_s", 0.0))
            for pid, since in asked["processes"]
        }
    sys.stdout.write(f"\n{marker} {json.dumps(answer)}\n")
    sys.stdout.flush()
