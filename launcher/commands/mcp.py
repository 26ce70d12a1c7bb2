"""`mlx-mesh mcp`: the words of it."""

from __future__ import annotations

import argparse

from mlx_mesh.launcher import mcp_server
from mlx_mesh.launcher.commands.chosen_api import chosen_api
from mlx_mesh.launcher.commands.shared_flags import add_api_key_flag, add_target
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_api_key_flag(parser)
    parser.add_argument("--url", help="a mesh by its address, like http://127.0.0.1:18000")


def run(arguments: argparse.Namespace) -> int:
    mcp_server.require_package()
    with chosen_api(arguments) as api:
        mcp_server.build_server(api).run("stdio")
    return ExitCode.OK
