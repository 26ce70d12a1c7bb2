"""Which hosts and model `verify`, `bench` and `doctor` are about."""

from __future__ import annotations

import argparse

from mlx_mesh.launcher.config import Flags, LaunchConfig, build_config, local_hostfile, read_hostfile
from mlx_mesh.mesh.errors import SettingsError


def chosen_config(arguments: argparse.Namespace) -> LaunchConfig:
    """Of a hostfile, or of ranks on this machine."""
    num_ranks = getattr(arguments, "sim", None)
    if arguments.hostfile is not None and num_ranks is not None:
        raise SettingsError("Give a hostfile or --sim N, not both.")
    if arguments.hostfile is not None:
        hostfile = read_hostfile(arguments.hostfile)
    else:
        hostfile = local_hostfile(2 if num_ranks is None else num_ranks, "sim")
    flags = Flags(
        model=arguments.model,
        adapter=getattr(arguments, "adapter_path", None),
        vision=getattr(arguments, "vision", None),
        sharding=getattr(arguments, "sharding", None),
        kv_bits=getattr(arguments, "kv_bits", None),
        kv_group_size=getattr(arguments, "kv_group_size", None),
        backend=getattr(arguments, "backend", None),
        port=getattr(arguments, "port", None),
        ssh_config=arguments.ssh_config,
        host="127.0.0.1",
        num_replicas=1,
    )
    return build_config(hostfile, flags, {})
