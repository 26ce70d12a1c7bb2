"""`mlx-mesh logs`."""

from __future__ import annotations

import argparse
import os
import sys

from mlx_mesh.launcher.commands.shared_flags import add_target
from mlx_mesh.launcher.console import prefix
from mlx_mesh.launcher.running import find_folder, read_logs
from mlx_mesh.launcher.text import harmless
from mlx_mesh.mesh.errors import ExitCode, SettingsError


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    parser.add_argument("--rank", type=int, metavar="K", help="only this rank")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until Ctrl-C")
    parser.add_argument(
        "-n", "--lines", type=int, default=50, metavar="N", help="last lines per rank (default 50)"
    )


def run(arguments: argparse.Namespace) -> int:
    folder = find_folder(arguments.target, os.environ)
    state = folder.read_running()
    ranks, where = [], ""
    for item in read_logs(state, arguments.rank, arguments.lines, arguments.follow):
        if item is None:
            if arguments.follow and not state.is_alive:
                break
        elif "line" in item:
            line = harmless(str(item["line"]))
            names_itself = line.startswith("{") or prefix(str(item["rank"]), "")[:-1] in line
            print(line if names_itself else f"[{item['rank']}] {line}", flush=True)
        else:
            ranks, where = list(map(int, item["ranks"])), str(item["folder"])
            if ranks and arguments.rank not in (None, *ranks):
                known = ", ".join(map(str, ranks))
                raise SettingsError(f"Mesh {state.name} has no rank {arguments.rank}; its ranks are {known}.")
    if not ranks and not arguments.follow:
        print(f"There is no log in {where} on {state.hosts[0].name} yet.", file=sys.stderr)
    return ExitCode.OK
