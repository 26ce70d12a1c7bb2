"""`mlx-mesh chat`: the words of it."""

from __future__ import annotations

import argparse
import sys

from mlx_mesh.launcher.chat import HELP, Chat, ChatSettings, ask_once, converse, piped_question
from mlx_mesh.launcher.commands.chosen_api import chosen_api
from mlx_mesh.launcher.commands.shared_flags import add_api_key_flag, add_target
from mlx_mesh.mesh.errors import ExitCode


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_api_key_flag(parser)
    parser.add_argument("--url", help="any OpenAI-compatible server, like http://127.0.0.1:18000")
    parser.add_argument(
        "-p", "--prompt", help="ask this once and print the answer; without it, what is piped in"
    )
    parser.add_argument("--system", default="", help="system message")
    parser.add_argument("--max-tokens", type=int, metavar="N")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="default 0: the likeliest answer"
    )


def run(arguments: argparse.Namespace) -> int:
    settings = ChatSettings(
        system=arguments.system, max_tokens=arguments.max_tokens, temperature=arguments.temperature
    )
    with chosen_api(arguments) as api:
        chat = Chat(api, settings)
        if arguments.prompt is not None:  # standard input is left alone: it may never end
            ask_once(chat, arguments.prompt, sys.stdout, sys.stderr)
        elif not sys.stdin.isatty():
            ask_once(chat, piped_question(sys.stdin), sys.stdout, sys.stderr)
        else:
            print(f"{api.url}: {HELP}")
            converse(chat, sys.stdout)
    return ExitCode.OK
