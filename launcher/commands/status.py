"""`mlx-mesh status`."""

from __future__ import annotations

import argparse
import json
import os

from mlx_mesh.launcher.commands.shared_flags import add_api_key_flag, add_target
from mlx_mesh.launcher.running import api_of, find_folder
from mlx_mesh.launcher.status import status_lines
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_api_key_flag(parser)
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    state = find_folder(arguments.target, os.environ).read_running()
    if not state.url:
        if arguments.json:
            print(
                json.dumps(
                    {"status": {"name": state.name, "ready": False, "reason": "starting"}, "ranks": []}
                )
            )
        else:
            print(f"{state.name}: not ready: starting (launcher pid {state.pid})")
        return ExitCode.OK
    with api_of(state, arguments.api_key_file, os.environ) as api:
        status, nodes = api.get("/v1/cluster/status"), api.get("/v1/cluster/nodes")
    if arguments.json:
        print(json.dumps({"url": state.url, "status": status, "ranks": nodes.get("ranks", [])}, indent=1))
        return ExitCode.OK
    for line in status_lines(status, nodes):
        print(line)
    print(
        f"\n{state.url}/v1, launcher pid {state.pid}" + (f", its output in {state.log}" if state.log else "")
    )
    return ExitCode.OK
