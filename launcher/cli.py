"""`mlx-mesh`: parse, dispatch, print errors, choose the exit status."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from typing import cast

from mlx_mesh import __version__
from mlx_mesh.launcher.command_parser import CommandParser
from mlx_mesh.launcher.commands.table import COMMANDS, Command
from mlx_mesh.launcher.error_text import ERROR_PREFIX, told
from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.foreign_flags import refuse_foreign

EXIT_CODES = "exit status: " + ", ".join(f"{code.value} {code.name.lower()}" for code in ExitCode)


def main(argv: Sequence[str] | None = None) -> int:
    """The entry point. Every error is one message on stderr; a traceback only with --debug."""
    try:
        arguments = parse(argv)
    except MeshError as error:
        return tell(error)
    return run(arguments)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the words, and import what their command needs. Raises MeshError for other servers' flags, and
    exits as argparse does."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] in (["up"], ["serve"]):
        refuse_foreign(words[1:])
    arguments = build_parser().parse_args(words)
    arguments.words = words
    return arguments


def run(arguments: argparse.Namespace) -> int:
    """Do what was read. Returns the exit status."""
    command = cast("Callable[[argparse.Namespace], int]", arguments.run)
    try:
        return command(arguments)
    except MeshError as error:
        if arguments.debug:
            traceback.print_exc()
        return tell(error)
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # `mlx-mesh logs | head`
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        if arguments.debug:
            raise
        print(
            f"mlx-mesh: this is a fault of mlx-mesh itself: {type(error).__name__}: {error}. Please report "
            "it with the output of the same command with --debug.",
            file=sys.stderr,
        )
        return ExitCode.FAILED


def tell(error: MeshError) -> int:
    """Returns the exit status that goes with it."""
    print(f"{ERROR_PREFIX}{told(error)}", file=sys.stderr)
    return error.exit_code


def build_parser() -> argparse.ArgumentParser:
    """Of all commands; the flags of one are added when its words are read."""
    parser = argparse.ArgumentParser(
        prog="mlx-mesh", description="Serve one MLX model over several machines.", epilog=EXIT_CODES
    )
    parser.add_argument("--version", action="version", version=f"mlx-mesh {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=CommandParser)
    for command in COMMANDS:
        made = commands.add_parser(
            command.name, help=command.text, description=command.text, epilog=EXIT_CODES
        )
        made.complete_later(partial(_complete, command))
    return parser


def _complete(command: Command, parser: argparse.ArgumentParser) -> None:
    module = command.load()
    parser.set_defaults(run=module.run)
    parser.add_argument("--debug", action="store_true", help="show a traceback with an error")
    module.add_flags(parser)
