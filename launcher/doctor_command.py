"""`mlx-mesh doctor [hosts.yaml]`: ask every host at once, and say what is wrong and what to do, host by host.

Nothing is changed anywhere, and nothing is asked with more rights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mlx_mesh.launcher.asking import Answer, ask_hosts
from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.pair_probe import dial_pairs
from mlx_mesh.mesh.doctor import Finding, Level, Question, duplicates, examine
from mlx_mesh.mesh.pair_checks import PairHost, pair_findings


def diagnose(config: LaunchConfig) -> list[Finding]:
    """All findings: each host's way to its answer, what the answers say, then all hosts together."""
    # Of a host whose ranks belong to several replicas one part stands for all.
    machines = tuple(entry for entry in config.hosts if entry.machine in ("", entry.name))
    asked = replace(config, hosts=machines)
    answers = ask_hosts(asked)
    findings = [finding for answer in answers for finding in answer.findings]
    examined = [answer.examined for answer in answers if answer.examined is not None]
    if examined:
        question = Question(backend=config.backend, num_hosts=len(machines), serve_port=config.serve_port)
        findings += examine(examined, question)
        keys = [(answer.examined, answer.host_key) for answer in answers if answer.examined is not None]
        findings += duplicates(keys)
        findings += _of_pairs(config, asked, answers)
    return findings


def _of_pairs(config: LaunchConfig, asked: LaunchConfig, answers: Sequence[Answer]) -> list[Finding]:
    """Of the ring of each replica; a pair that several have is told once. Who did not answer has no pairs."""
    hosts = {
        answer.entry.name: PairHost(
            examined=answer.examined, rules=answer.entry.interfaces, addresses=answer.entry.addresses
        )
        for answer in answers
        if answer.examined is not None
    }
    found: dict[tuple[str, str], Finding] = {}
    for replica in range(config.num_replicas):
        ring = [hosts.get(entry.machine or entry.name) for entry in config.hosts_of(replica)]
        for finding in (*pair_findings(ring), *dial_pairs(ring, asked)):
            found.setdefault((finding.host, finding.check), finding)
    return list(found.values())


def lines(findings: Sequence[Finding], is_verbose: bool) -> list[str]:
    """For people: what is not right, or everything; then a count."""
    shown = [finding for finding in findings if is_verbose or finding.level is not Level.OK]
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    hosts = len({finding.host for finding in findings if " - " not in finding.host})
    return [
        *map(str, shown),
        f"{len(findings)} checks on {hosts} host{'s' if hosts != 1 else ''}: {counts[Level.FAIL]} failed, "
        f"{counts[Level.WARN]} warnings, {counts[Level.NOTE]} notes.",
    ]
