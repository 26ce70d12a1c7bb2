"""How a command's error is told on stderr and in its log."""

from __future__ import annotations

from mlx_mesh.mesh.errors import HostfileError, MeshError, PreflightError

ERROR_PREFIX = "mlx-mesh: "


def told(error: MeshError) -> str:
    """An error's message with its lines indented, under a heading where each line is a fault of its own."""
    lines = str(error).splitlines()
    if isinstance(error, PreflightError):
        lines.insert(0, "not all hosts are ready:")
    elif isinstance(error, HostfileError):
        lines.insert(0, "the hostfile cannot be used:")
    return "\n  ".join(lines)
