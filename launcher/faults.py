"""What is wrong with one host, at which step, and what to do about it."""

from __future__ import annotations

from mlx_mesh.mesh.errors import ExitCode, MeshError

STEPS = (
    "settings",  # ~/.ssh/config
    "resolve",
    "connect",
    "host key",
    "auth",
    "interpreter",
    "import",
    "version",
    "model",
    "adapter",
    "embedding model",
    "address",
    "backend",
)
"""The steps of reaching a host, in order. A host is told at its first failing one."""


class HostFault(MeshError):
    """One host is not ready. `step` is one of STEPS."""

    exit_code = ExitCode.PREFLIGHT

    def __init__(self, host: str, step: str, seen: str, fix: str) -> None:
        assert step in STEPS, step
        super().__init__(f"{host}: {step}: {seen}; {fix}")
        self.host = host
        self.step = step
        self.seen = seen
        self.fix = fix
