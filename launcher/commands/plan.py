"""`mlx-mesh plan`: the words of it."""

from __future__ import annotations

import argparse
import os

from mlx_mesh.launcher import plan_command
from mlx_mesh.launcher.commands.shared_flags import add_adapter_flag, add_kv_flags
from mlx_mesh.mesh.errors import ExitCode
from mlx_mesh.mesh.links import LINKS


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="folder or hub id")
    parser.add_argument("hostfile", nargs="?", help="ask these hosts what they have")
    parser.add_argument("--nodes", type=int, metavar="N", help="so many hosts instead")
    parser.add_argument("--memory", default="", metavar="SIZES", help="of each: 64GB, or 128GB,64GB")
    parser.add_argument("--chip", default="", metavar="CHIPS", help="of each: 'M4 Max', or 'M3 Ultra,M4 Max'")
    parser.add_argument("--link", default="", metavar="LINK", help=f"between hosts: {', '.join(LINKS)}")
    parser.add_argument("--context", default="4096", metavar="TOKENS", help="like 32k (default 4096)")
    parser.add_argument("--sequences", type=int, default=4, metavar="N", help="at the same time (default 4)")
    parser.add_argument("--revision", default="", help="of a hub model: branch, tag or commit")
    parser.add_argument("--offline", action="store_true", help="ask no hub")
    parser.add_argument("--ssh-config", metavar="FILE", help="instead of ~/.ssh/config")
    parser.add_argument("--json", action="store_true", help="machine-readable")

    add_adapter_flag(parser)
    add_kv_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    question = plan_command.PlanQuestion(
        model=arguments.model,
        adapter=arguments.adapter_path,
        vision=arguments.vision,
        hostfile=arguments.hostfile,
        num_nodes=arguments.nodes,
        memory=arguments.memory,
        chip=arguments.chip,
        link=arguments.link,
        context=arguments.context,
        num_sequences=arguments.sequences,
        kv_bits=arguments.kv_bits,
        kv_group_size=arguments.kv_group_size,
        revision=arguments.revision,
        is_offline=arguments.offline,
        ssh_config=arguments.ssh_config,
    )
    found = plan_command.answer(question, os.environ)
    for line in [plan_command.as_json(found)] if arguments.json else plan_command.lines(found):
        print(line)
    return ExitCode.PLACEMENT if plan_command.problems(found) else ExitCode.OK
