"""`mlx-mesh discover`: the words of it."""

from __future__ import annotations

import argparse
import os
import sys

import msgspec

from mlx_mesh.launcher import discover_command, discovered
from mlx_mesh.launcher.commands.shared_flags import add_address_flag
from mlx_mesh.mesh.discovery import SCAN_S
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="machine-readable")
    parser.add_argument("--watch", action="store_true", help="go on, and show what changes")
    parser.add_argument(
        "--timeout",
        type=float,
        default=SCAN_S,
        metavar="S",
        help=f"how long to look (default {SCAN_S:g})",
    )
    add_address_flag(parser)
    parser.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="look on this one only (en5, en*), or not on it (^en0); may be repeated",
    )
    parser.add_argument("--pair", metavar="HOST", help="with the code that its agent shows, from stdin")
    parser.add_argument("--forget", metavar="HOST", help="trust a paired host no more")


def run(arguments: argparse.Namespace) -> int:
    at = discovered.Look(
        timeout_s=arguments.timeout,
        interfaces=tuple(arguments.interface),
        addresses=tuple(arguments.address),
    )
    if arguments.forget is not None:
        print(discover_command.forget(arguments.forget, os.environ))
    elif arguments.pair is not None:
        host = discover_command.pair(arguments.pair, at, os.environ, sys.stdin, sys.stdout)
        print(f"\nPaired with {host.name} (key {host.key}).")
    elif arguments.watch:
        for line in discover_command.watch(at, os.environ):
            print(line, flush=True)
    else:
        made = discovered.look(at, os.environ)
        if arguments.json:
            print(msgspec.json.format(msgspec.json.encode(made), indent=1).decode())
        else:
            for line in discover_command.lines(made, discovered.paired_keys(os.environ)):
                print(line)
        return ExitCode.OK if made.others else ExitCode.FAILED
    return ExitCode.OK
