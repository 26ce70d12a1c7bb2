"""`mlx-mesh node`: the words of it."""

from __future__ import annotations

import argparse
import os

from mlx_mesh.launcher.commands.shared_flags import add_api_key_flag, add_target
from mlx_mesh.launcher.node_command import change_node
from mlx_mesh.launcher.running import api_of, find_folder
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["drain", "add"], help="go on without the host, or with it again")
    parser.add_argument("host", metavar="HOST", help="its name in the hostfile")
    add_target(parser)
    add_api_key_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    state = find_folder(arguments.target, os.environ).read_running()
    with api_of(state, arguments.api_key_file, os.environ) as api:
        change_node(api, arguments.action, arguments.host, print)
    return ExitCode.OK
