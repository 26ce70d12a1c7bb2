"""`mlx-mesh down`."""

from __future__ import annotations

import argparse
import os
import sys

from mlx_mesh.launcher.commands.shared_flags import add_target
from mlx_mesh.launcher.running import find_folder, take_down
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_target(parser)


def run(arguments: argparse.Namespace) -> int:
    folder = find_folder(arguments.target, os.environ, with_leftovers=True)
    done, problems = take_down(folder)
    for what in done:
        print(what)
    for what in problems:
        print(f"mlx-mesh: {what}", file=sys.stderr)
    return ExitCode.FAILED if problems else ExitCode.OK
