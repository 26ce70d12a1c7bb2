"""MLX as this process finds it: whether it has a backend at all, its versions, what it offers."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from collections.abc import MutableMapping
from typing import Any

from mlx_mesh.mesh.types import Versions
from mlx_mesh.node.engine.failure import EngineError

DATA_BACKENDS = ("ring", "jaccl", "nccl")

FOREIGN_VARIABLES = (
    # Left over from a launcher, a shell or an outer job, they would make MLX join someone else's group;
    # MLX_METAL_FAST_SYNCH hangs the GPU on some macOS versions.
    "MLX_RANK",
    "MLX_WORLD_SIZE",
    "MLX_HOSTFILE",
    "MLX_IBV_DEVICES",
    "MLX_JACCL_COORDINATOR",
    "MLX_JACCL_RING",
    "MLX_METAL_FAST_SYNCH",
    "NCCL_HOST_IP",
    "NCCL_PORT",
    "RANK",
    "WORLD_SIZE",
)


def drop_foreign_variables(environment: MutableMapping[str, str] = os.environ) -> tuple[str, ...]:
    """Remove what other launchers say to MLX; returns the names removed."""
    found = tuple(name for name in FOREIGN_VARIABLES if name in environment)
    for name in found:
        del environment[name]
    return found


def import_mlx() -> Any:
    """`mlx.core`. Raises EngineError(config) that names the extra to install when MLX has no backend."""
    try:
        return importlib.import_module("mlx.core")
    except ImportError as error:
        raise EngineError("config", no_backend_message(str(error), platform.system())) from error


def no_backend_message(reason: str, system: str) -> str:
    """What to install where MLX cannot be imported."""
    if system == "Linux":  # here the `mlx` package is a front end only
        return (
            f"MLX has no backend in this environment ({reason}). Install one: "
            "`pip install 'mlx-mesh[cpu]'`, or with an NVIDIA GPU `pip install 'mlx-mesh[cuda13]'`."
        )
    return f"MLX cannot be imported ({reason}). Install it again: `pip install --force-reinstall mlx`."


def loaded_versions() -> Versions:
    """Versions of what this process has imported."""
    mx = import_mlx()
    return Versions(
        mlx_mesh=importlib.metadata.version("mlx-mesh"),
        mlx=str(mx.__version__),
        mlx_lm=importlib.metadata.version("mlx-lm"),
        python=platform.python_version(),
    )


def offered_backends() -> tuple[str, ...]:
    """The data backends that this MLX build can form a group with."""
    mx = import_mlx()
    return tuple(name for name in DATA_BACKENDS if mx.distributed.is_available(name))
