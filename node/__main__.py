"""`python -m mlx_mesh.node`: one agent, started by the launcher or by hand."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.messages import AgentConfig
from mlx_mesh.node.config import manual_settings, read_launched
from mlx_mesh.node.input import first_line
from mlx_mesh.node.lifecycle import AgentProcess, serve_agent
from mlx_mesh.node.run_file import state_root

_STDIN = 0


def main(argv: list[str]) -> int:
    """Returns the exit status."""
    try:
        if argv == ["--launched"]:
            config = read_launched(first_line(_STDIN))
        else:
            manual = manual_settings(argv, os.environ, Path.cwd(), state_root())
            config = manual.config
            for note in manual.notes:
                print(note, flush=True)
    except MeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return asyncio.run(_run(config))


async def _run(config: AgentConfig) -> ExitCode:
    os.chdir("/")  # whatever folder we were started in may go away
    return await serve_agent(AgentProcess(config), stdin_fd=_STDIN if config.attached else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
