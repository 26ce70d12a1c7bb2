"""`mlx-mesh sync`: the words of it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict

from mlx_mesh.launcher import sync_command
from mlx_mesh.launcher.commands.shared_flags import SHARDINGS, add_adapter_flag, read_sharding
from mlx_mesh.launcher.config import Flags, build_config, local_hostfile, read_hostfile
from mlx_mesh.launcher.console import Console
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument("hostfile", nargs="?", help="default: this machine")
    parser.add_argument("--full", action="store_true", help="all of the model to every host")
    parser.add_argument(
        "--verify", action="store_true", help="read again what is there, and compare it by SHA-256"
    )
    parser.add_argument(
        "--sharding", type=read_sharding, help=f"of the plan: {SHARDINGS}; default: the hostfile's"
    )
    parser.add_argument("--context", type=int, metavar="TOKENS", help="of the plan, as for `up`")
    parser.add_argument("--offline", action="store_true", help="ask no hub; a host must have the model")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    add_adapter_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    given = arguments.hostfile
    hostfile = local_hostfile(1, "sync") if given is None else read_hostfile(given)
    flags = Flags(
        model=arguments.model,
        adapter=arguments.adapter_path,
        sharding=arguments.sharding,
        context=arguments.context,
        ssh_config=arguments.ssh_config,
        is_offline=arguments.offline,
        host="127.0.0.1",
    )
    config = build_config(hostfile, flags, {})
    options = sync_command.SyncOptions(is_full=arguments.full, verify=arguments.verify)
    console = Console(sys.stderr if arguments.json else None)
    synced = sync_command.sync(config, options, console)
    if arguments.json:
        print(json.dumps([asdict(each.brought) for each in synced], indent=1))
    else:
        for line in sync_command.lines(synced):
            print(line)
    return ExitCode.OK
