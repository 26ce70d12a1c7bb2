"""`mlx-mesh agent`: the words of it."""

from __future__ import annotations

import argparse
import os

from mlx_mesh.launcher import agent_command
from mlx_mesh.mesh.discovery import AGENT_PORT
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pair", action="store_true", help="show a code, with which one launcher can pair")
    parser.add_argument(
        "--port",
        type=int,
        default=AGENT_PORT,
        metavar="N",
        help=f"where it waits (default {AGENT_PORT}); 0 = a free one",
    )
    parser.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="announce on this one only (en5, en*), or not on it (^en0); may be repeated",
    )
    parser.add_argument(
        "--no-announce", dest="announce", action="store_false", help="wait without telling the network"
    )
    parser.add_argument("--forget", action="store_true", help="let no launcher in any more, and end")


def run(arguments: argparse.Namespace) -> int:
    if arguments.forget:
        print(agent_command.forget(os.environ))
        return ExitCode.OK
    options = agent_command.AgentOptions(
        port=arguments.port,
        shows_code=arguments.pair,
        interfaces=tuple(arguments.interface),
        is_quiet_on_network=not arguments.announce,
    )
    return agent_command.wait_here(options, os.environ, lambda line: print(line, flush=True))
