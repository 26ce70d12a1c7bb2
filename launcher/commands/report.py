"""`mlx-mesh report`: the words of it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from mlx_mesh.launcher import report
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", nargs="?", metavar="NAME|hosts.yaml", help="default: the mesh that runs")
    parser.add_argument("--model", help="default: the hostfile's")
    parser.add_argument("--output", metavar="FILE", help="default: mlx-mesh-report-TIME.tar.gz here")
    parser.add_argument(
        "--lines", type=int, default=report.NUM_LOG_LINES, metavar="N", help="last lines of each log (400)"
    )
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")


def run(arguments: argparse.Namespace) -> int:
    config, folder = report.target_of(arguments.target, arguments.model, arguments.ssh_config, os.environ)
    path = Path(arguments.output).expanduser().resolve() if arguments.output else report.default_path()
    made = report.report(config, folder, os.environ, path, print, arguments.lines)
    print(f"\n{path} has, without names, keys, prompts and paths of yours:")
    for name, size in made:
        print(f"  {name:24} {size:8} bytes")
    print(f"Look at it before you send it: tar -xzOf {path} | less")
    return ExitCode.OK
