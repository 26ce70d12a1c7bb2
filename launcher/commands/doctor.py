"""`mlx-mesh doctor`: the words of it."""

from __future__ import annotations

import argparse

import msgspec

from mlx_mesh.launcher import doctor_command
from mlx_mesh.launcher.commands.chosen_config import chosen_config
from mlx_mesh.launcher.commands.shared_flags import read_backend
from mlx_mesh.mesh.doctor import exit_status


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hostfile", nargs="?", help="default: this machine")
    parser.add_argument("--model", help="default: the hostfile's")
    parser.add_argument("--backend", type=read_backend, help="what the hosts are wanted for (default: auto)")
    parser.add_argument("--port", type=int, help="that the leader is to serve on")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument("--verbose", action="store_true", help="also what is right")
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    config = chosen_config(arguments)
    findings = doctor_command.diagnose(config)
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(findings), indent=1).decode())
    else:
        for line in doctor_command.lines(findings, arguments.verbose):
            print(line)
    return exit_status(findings)
