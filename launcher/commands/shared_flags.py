"""Flags that several commands have, each defined once."""

from __future__ import annotations

import argparse

from mlx_mesh.mesh.hostfile_words import MPI_REASON
from mlx_mesh.mesh.kv_options import KV_BITS, KV_GROUP_SIZES
from mlx_mesh.mesh.types import Backend, Sharding

SHARDINGS = "auto, tensor or pipeline"


def add_target(parser: argparse.ArgumentParser) -> None:
    """Which running mesh."""
    parser.add_argument("target", nargs="?", metavar="NAME|hosts.yaml", help="default: the one that runs")


def add_api_key_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api-key-file", metavar="FILE", help="default: MLX_MESH_API_KEY, or what `up` was given"
    )


def add_address_flag(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--address",
        action="append",
        default=[],
        metavar="HOST[:PORT]",
        help="ask this host, too, without multicast; may be repeated",
    )


def add_adapter_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--adapter-path", metavar="DIR", help="LoRA or DoRA adapter, a folder on each host")
    parser.add_argument(
        "--vision",
        action=argparse.BooleanOptionalAction,
        help="serve the model with or without its vision tower (default: with, where mlx-vlm can)",
    )


def add_kv_flags(parser: argparse.ArgumentParser) -> None:
    bits, sizes = ", ".join(map(str, KV_BITS)), ", ".join(map(str, KV_GROUP_SIZES))
    parser.add_argument("--kv-bits", type=int, metavar="N", help=f"quantise the KV cache to {bits} bits")
    parser.add_argument("--kv-group-size", type=int, metavar="N", help=f"in groups of {sizes} (default 64)")


def read_sharding(text: str) -> Sharding:
    if text == Sharding.NONE:
        raise argparse.ArgumentTypeError("none is what one rank has by itself; use auto")
    try:
        return Sharding(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not known; use {SHARDINGS}") from None


def read_backend(text: str) -> Backend:
    if text == "mpi":
        raise argparse.ArgumentTypeError(MPI_REASON)
    if text == Backend.NONE:
        raise argparse.ArgumentTypeError("none is what one rank has by itself; use auto")
    try:
        return Backend(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not known; use auto, ring, jaccl, jaccl-ring or nccl"
        ) from None
