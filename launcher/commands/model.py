"""`mlx-mesh model`: the words of it."""

from __future__ import annotations

import argparse
import os

from mlx_mesh.launcher.commands.shared_flags import add_api_key_flag, add_target
from mlx_mesh.launcher.model_command import change_model
from mlx_mesh.launcher.running import api_of, find_folder
from mlx_mesh.mesh.errors import ExitCode, SettingsError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=["unload", "load"], help="end the engines, or begin them again")
    parser.add_argument("--model", help="with load: another one of the allowed (default: the last one)")
    add_target(parser)
    add_api_key_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.action == "unload" and arguments.model is not None:
        raise SettingsError("`model unload` takes no --model: what is served is unloaded.")
    state = find_folder(arguments.target, os.environ).read_running()
    with api_of(state, arguments.api_key_file, os.environ) as api:
        change_model(api, arguments.action, arguments.model or "", print)
    return ExitCode.OK
