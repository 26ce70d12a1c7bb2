"""A real agent process whose children are fakes: `fake_agent.py STATE PROGRAMS_JSON`, config on stdin."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from mlx_mesh.node.children import Programs
from mlx_mesh.node.config import read_launched
from mlx_mesh.node.input import first_line
from mlx_mesh.node.lifecycle import AgentProcess, serve_agent


async def main() -> int:
    config = read_launched(first_line(0))
    programs = Programs(**{name: tuple(command) for name, command in json.loads(sys.argv[2]).items()})
    process = AgentProcess(config, programs=programs, state=Path(sys.argv[1]))
    return await serve_agent(process, stdin_fd=0 if config.attached else None)


sys.exit(asyncio.run(main()))
