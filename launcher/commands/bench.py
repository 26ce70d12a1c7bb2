"""`mlx-mesh bench`: the words of it."""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from mlx_mesh.launcher import bench_command
from mlx_mesh.launcher.commands.chosen_config import chosen_config
from mlx_mesh.mesh.errors import ExitCode, SettingsError


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hostfile", nargs="?", help="default: this machine")
    parser.add_argument("--model", help="default: the hostfile's")
    parser.add_argument("--probe", action="store_true", help="memory, matrix and link rates; seconds")
    parser.add_argument("--sim", type=int, metavar="N", help="N ranks on this machine")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    if not arguments.probe:
        raise SettingsError("Give --probe; it is what `bench` can measure.")
    found = bench_command.probe(chosen_config(arguments), os.environ, print)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(found.measurements), indent=1).decode())
    else:
        for line in bench_command.lines(found):
            print(line)
    for fault in found.faults:
        print(f"mlx-mesh: {fault}", file=sys.stderr)
    return ExitCode.FAILED if found.faults else ExitCode.OK
