"""Every host asked at once for all it can tell of itself: the way to the answer, and the answer.

For `doctor`, `init` and `net plan`. A host that cannot be reached, or whose interpreter does not answer, is
told at the first step that fails; what lies behind that step cannot be known. Nothing is changed anywhere.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.faults import STEPS, HostFault
from mlx_mesh.launcher.preflight import ask_host, open_host, python_of, read_answer
from mlx_mesh.launcher.remote import RemoteHost, run
from mlx_mesh.launcher.ssh import SshHost
from mlx_mesh.mesh.doctor import Area, Examined, Finding, Level
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.host_report import HostReport

EXAMINE_TIMEOUT_S = 90.0

_REACH = ("settings", "resolve", "connect", "host key", "auth", "interpreter")


@dataclass(frozen=True, slots=True)
class Answer:
    """One host: the steps that were taken, and its report when the last one was reached."""

    entry: HostEntry
    findings: tuple[Finding, ...]
    examined: Examined | None = None
    host_key: str = ""


def ask_hosts(config: LaunchConfig) -> list[Answer]:
    """One answer for each host, in their order."""
    with ThreadPoolExecutor(max(1, len(config.hosts))) as pool:
        return list(pool.map(lambda entry: ask_one(entry, config), config.hosts))


def ask_one(entry: HostEntry, config: LaunchConfig) -> Answer:
    is_leader = entry is config.hosts[0]
    remote: RemoteHost | None = None
    try:
        remote = open_host(entry, config.ssh_config)
        python = python_of(entry)
        answer = ask_host(remote, python, entry, config)
        try:
            read_answer(answer, entry.name, python, config.model)
        except HostFault as problem:
            if STEPS.index(problem.step) < STEPS.index("model"):
                raise  # what comes later is told by the checks, with all else that is wrong
        began = time.time()
        report = _examine(entry, remote, python, answer, config)
        skew_s = report.now_s - (began + time.time()) / 2
        return Answer(
            entry,
            tuple(_passed(entry, "version", python)),
            Examined(name=entry.name, report=report, python=python, skew_s=skew_s, is_leader=is_leader),
            remote.host_key if isinstance(remote, SshHost) else "",
        )
    except HostFault as problem:
        return Answer(entry, (*_passed(entry, problem.step, ""), _failed(problem)))
    except (MeshError, msgspec.MsgspecError, OSError) as error:
        return Answer(
            entry, (_failed(HostFault(entry.name, "version", str(error).rstrip("."), "see --debug")),)
        )
    finally:
        if remote is not None:
            remote.close()


def _examine(
    entry: HostEntry, remote: RemoteHost, python: str, answer: Mapping[str, Any], config: LaunchConfig
) -> HostReport:
    """Raises HostFault, or CommandTimeout after EXAMINE_TIMEOUT_S."""
    words = [python, "-I", "-u", "-m", "mlx_mesh.node.examine", str(answer["model"]), str(config.serve_port)]
    adapter = str(answer.get("adapter", ""))
    completed = run(remote, [*words, adapter] if adapter else words, b"", EXAMINE_TIMEOUT_S)
    for line in reversed(completed.stdout):
        if line.startswith("{"):
            return msgspec.json.decode(line, type=HostReport)
    said = completed.last_words() or str(completed.exit)
    raise HostFault(
        entry.name, "version", f"it cannot be examined ({said})", "install the same mlx-mesh there"
    )


def _passed(entry: HostEntry, until: str, python: str) -> list[Finding]:
    """A line for each step before the one that failed."""
    steps = STEPS[: STEPS.index(until)]
    if entry.is_local:
        steps = tuple(step for step in steps if step not in _REACH[:-1])
    evidence = {"interpreter": python, "import": "mlx_mesh, mlx and mlx_lm", "connect": entry.ssh}
    return [
        Finding(
            host=entry.name,
            check=step,
            area=_area(step),
            level=Level.OK,
            evidence=evidence.get(step) or "passed",
        )
        for step in steps
    ]


def _failed(fault: HostFault) -> Finding:
    return Finding(
        host=fault.host,
        check=fault.step,
        area=_area(fault.step),
        level=Level.FAIL,
        evidence=fault.seen,
        fix=fault.fix,
    )


def _area(step: str) -> Area:
    if step in ("model", "adapter"):
        return Area.MODEL
    if step in ("address", "backend"):
        return Area.NETWORK
    return Area.REACH if step in _REACH[:-1] else Area.SOFTWARE
