"""`mlx-mesh serve`: a model on this machine alone."""

from __future__ import annotations

import argparse
import os

from mlx_mesh.launcher.commands.bringing import bring_up
from mlx_mesh.launcher.commands.launch_flags import add_launch_flags, read_launch_flags
from mlx_mesh.launcher.config import build_config, local_hostfile


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_launch_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    hostfile = local_hostfile(max(1, arguments.replicas or 1), "serve")
    return bring_up(arguments, build_config(hostfile, read_launch_flags(arguments), os.environ))
