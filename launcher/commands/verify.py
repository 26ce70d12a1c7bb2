"""`mlx-mesh verify`: the words of it."""

from __future__ import annotations

import argparse
import os

import msgspec

from mlx_mesh.launcher import verify_command
from mlx_mesh.launcher.commands.chosen_config import chosen_config
from mlx_mesh.launcher.commands.shared_flags import SHARDINGS, add_adapter_flag, add_kv_flags, read_sharding
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument("hostfile", nargs="?", help="default: two ranks on this machine")
    parser.add_argument("--sharding", type=read_sharding, help=f"{SHARDINGS}; default: auto")
    add_adapter_flag(parser)
    add_kv_flags(parser)
    parser.add_argument(
        "--layer-by-layer",
        action="store_true",
        help="never hold the model whole on the leader; else only when it does not fit there",
    )
    parser.add_argument("--sim", type=int, metavar="N", help="N ranks on this machine")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    verdict = verify_command.verify(
        chosen_config(arguments), os.environ, print, by_layers=arguments.layer_by_layer
    )
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(verdict), indent=1).decode())
    else:
        for line in verify_command.lines(verdict):
            print(line)
    return ExitCode.OK if verdict.is_same else ExitCode.FAILED
