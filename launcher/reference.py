"""Recompute a mesh's answers on its leader's host with a few layers in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.plan import inspect_flags
from mlx_mesh.launcher.preflight import ReadyHost, check_hosts, close_all
from mlx_mesh.launcher.remote import Stream
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.reference import Answered, ReferenceScores, ReferenceTask

REFERENCE_S = 7200.0
"""For the whole of it: every weight is read once, from whatever disk it lies on."""

MEMORY_PART = 2  # of the leader's usable memory, one part in so many holds weights


def score_by_layers(
    config: LaunchConfig, answers: Sequence[Answered], say: Callable[[str], None]
) -> ReferenceScores:
    """`config` has one host. Raises MeshError."""
    hosts = check_hosts(config).hosts
    try:
        return _run(hosts[0], config, answers, say)
    finally:
        close_all(hosts)


def _run(
    host: ReadyHost, config: LaunchConfig, answers: Sequence[Answered], say: Callable[[str], None]
) -> ReferenceScores:
    usable = host.facts.usable_memory_bytes
    limit = min(host.entry.memory_limit_bytes or usable, usable)
    task = ReferenceTask(
        answers=tuple(answers), memory_bytes=limit // MEMORY_PART, kv_options=config.kv_options
    )
    flags = inspect_flags(host.adapter, is_offline=config.is_offline, vision=config.vision)
    words = [host.python, "-I", "-u", "-m", "mlx_mesh.node.engine.reference", host.model, *flags]
    found: list[str] = []
    said: list[str] = []

    def on_line(stream: Stream, line: str) -> None:
        if stream == "stdout" and line.startswith("{"):
            found.append(line)
        elif stream == "stdout":
            say(f"  {line}")
        else:
            said.append(line)

    process = host.remote.start(words, on_line, lambda exit: None)
    process.send(msgspec.json.encode(task) + b"\n")
    process.close_stdin()
    ended = process.wait(REFERENCE_S)
    if ended is None:
        process.kill()
        raise MeshError(
            f"Recomputing the answers on {host.entry.name} took over {REFERENCE_S:g} s and was ended. Is the "
            "model on a slow disk?"
        )
    if ended.code != 0 or not found:
        raise MeshError(
            f"The answers cannot be recomputed on {host.entry.name}: {' '.join(said[-3:]) or ended}"
        )
    return msgspec.json.decode(found[-1], type=ReferenceScores)
