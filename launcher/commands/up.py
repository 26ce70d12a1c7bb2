"""`mlx-mesh up`: of a hostfile, of ranks on this machine, or of hosts that are found."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace

from mlx_mesh.launcher.commands.bringing import bring_up
from mlx_mesh.launcher.commands.launch_flags import add_launch_flags, read_launch_flags
from mlx_mesh.launcher.commands.shared_flags import SHARDINGS, add_address_flag, read_backend, read_sharding
from mlx_mesh.launcher.config import LaunchConfig, build_config, local_hostfile, read_hostfile
from mlx_mesh.mesh.discovery import DISCOVER_S
from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.hostfile import Hostfile

MAX_SIM = 64


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("hostfile", nargs="?", help="hosts.yaml, or a JSON hostfile of mlx.launch")
    parser.add_argument("--sim", type=int, metavar="N", help="N ranks on this machine, without a hostfile")
    parser.add_argument(
        "--discover", action="store_true", help="the hosts are this one and those that `discover` finds"
    )
    found = parser.add_argument_group("with --discover")
    found.add_argument("--hosts", type=int, metavar="N", help="so many, with this one; fewer are an error")
    found.add_argument("--no-local", action="store_true", help="this host takes no part")
    found.add_argument(
        "--discover-timeout",
        type=float,
        default=DISCOVER_S,
        metavar="S",
        help=f"how long to look (default {DISCOVER_S:g})",
    )
    add_address_flag(found)
    parser.add_argument("--sharding", type=read_sharding, help=f"{SHARDINGS}; default: auto")
    parser.add_argument(
        "--fault",
        action="append",
        default=[],
        metavar="SPEC",
        help="with --sim: make a rank fail, like kill:1@decode+5 (docs/failures.md)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="take a host in again by itself that comes back after the mesh went on without it",
    )
    parser.add_argument(
        "--allow-wifi", action="store_true", help="let data go over Wi-Fi where hosts have no cable in common"
    )
    parser.add_argument(
        "--interface",
        action="append",
        default=[],
        metavar="NAME",
        help="let data go over this interface only, on all hosts (en5, en*), or never over it (^en0); may be "
        "repeated",
    )
    parser.add_argument(
        "--sync",
        choices=("auto", "never"),
        help="auto: bring the model to hosts that lack it; default: the hostfile's, or auto",
    )
    parser.add_argument("--backend", type=read_backend, help="auto, ring, jaccl, jaccl-ring or nccl")
    add_launch_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    given = [arguments.hostfile is not None, arguments.sim is not None, arguments.discover]
    if sum(given) != 1:
        raise SettingsError(
            "Give a hostfile, --sim N or --discover, like `mlx-mesh up hosts.yaml`, `mlx-mesh up --sim 2` or "
            "`mlx-mesh up --discover`."
        )
    if arguments.discover:
        hostfile = _discovered(arguments)
    elif arguments.sim is not None:
        if not 1 <= arguments.sim <= MAX_SIM:
            raise SettingsError(
                f"--sim {arguments.sim} is out of range; it is the number of local ranks, 1 to {MAX_SIM}."
            )
        hostfile = local_hostfile(arguments.sim, "sim")
    else:
        hostfile = read_hostfile(arguments.hostfile)
    config = build_config(hostfile, read_launch_flags(arguments), os.environ)
    return bring_up(arguments, _with_faults(config, arguments) if arguments.fault else config)


def _discovered(arguments: argparse.Namespace) -> Hostfile:
    from mlx_mesh.launcher import discovered  # brings the SSH library, which local ranks need not wait for

    if arguments.detach and arguments.detached_fd is None:  # the detached launcher looks for the hosts
        return replace(local_hostfile(1, discovered.MESH_NAME), hosts=())
    look = discovered.Look(
        timeout_s=arguments.discover_timeout,
        interfaces=tuple(arguments.interface),
        addresses=tuple(arguments.address),
    )
    wanted = discovered.Wanted(look, arguments.hosts, with_this_host=not arguments.no_local)
    return discovered.find_mesh(wanted, os.environ, lambda line: print(line, flush=True))


def _with_faults(config: LaunchConfig, arguments: argparse.Namespace) -> LaunchConfig:
    """The fault kit is not even imported without the flag."""
    if arguments.sim is None:
        raise SettingsError("--fault makes ranks fail on order; it goes with --sim N only.")
    from mlx_mesh.mesh.faults import check_faults

    if config.num_replicas > 1:
        raise SettingsError("--fault names ranks of one mesh; it does not go together with --replicas.")
    return replace(config, faults=check_faults(arguments.fault, arguments.sim))
