"""`mlx-mesh doctor [hosts.yaml]`: ask every host at once, and say what is wrong and what to do, host by host.

A host that cannot be reached, or whose interpreter cannot answer, is told at the first step that fails; what
lies behind that step cannot be known. Nothing is changed anywhere, and nothing is asked with more rights.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.faults import STEPS, HostFault
from mlx_mesh.launcher.preflight import ask_host, open_host, python_of, read_answer
from mlx_mesh.launcher.remote import RemoteHost, run
from mlx_mesh.launcher.ssh import SshHost
from mlx_mesh.mesh.doctor import Area, Examined, Finding, Level, Question, duplicates, examine
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.host_report import HostReport
from mlx_mesh.mesh.hostfile import HostEntry

EXAMINE_TIMEOUT_S = 90.0

_REACH = ("settings", "resolve", "connect", "host key", "auth", "interpreter")


@dataclass(frozen=True, slots=True)
class _Answer:
    """One host: the steps that were taken, and its report when the last one was reached."""

    findings: tuple[Finding, ...]
    examined: Examined | None = None
    host_key: str = ""


def diagnose(config: LaunchConfig) -> list[Finding]:
    """All findings: each host's way to its answer, what the answers say, then all hosts together."""
    with ThreadPoolExecutor(max(1, len(config.hosts))) as pool:
        answers = list(pool.map(lambda entry: _ask_one(entry, config), config.hosts))
    findings = [finding for answer in answers for finding in answer.findings]
    examined = [answer.examined for answer in answers if answer.examined is not None]
    if examined:
        question = Question(backend=config.backend, num_hosts=len(config.hosts), serve_port=config.serve_port)
        findings += examine(examined, question)
        keys = [(answer.examined, answer.host_key) for answer in answers if answer.examined is not None]
        findings += duplicates(keys)
    return findings


def _ask_one(entry: HostEntry, config: LaunchConfig) -> _Answer:
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
        return _Answer(
            tuple(_passed(entry, "version", python)),
            Examined(name=entry.name, report=report, python=python, skew_s=skew_s, is_leader=is_leader),
            remote.host_key if isinstance(remote, SshHost) else "",
        )
    except HostFault as problem:
        return _Answer((*_passed(entry, problem.step, ""), _failed(problem)))
    except (MeshError, msgspec.MsgspecError, OSError) as error:
        return _Answer((_failed(HostFault(entry.name, "version", str(error).rstrip("."), "see --debug")),))
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


def lines(findings: Sequence[Finding], is_verbose: bool) -> list[str]:
    """For people: what is not right, or everything; then a count."""
    shown = [finding for finding in findings if is_verbose or finding.level is not Level.OK]
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    hosts = len({finding.host for finding in findings})
    return [
        *map(str, shown),
        f"{len(findings)} checks on {hosts} host{'s' if hosts != 1 else ''}: {counts[Level.FAIL]} failed, "
        f"{counts[Level.WARN]} warnings, {counts[Level.NOTE]} notes.",
    ]
