"""Parts of mlx-lm that know model families and need no MLX: tool parsers, tags, chat templates in Python.

Importing `mlx_lm` imports `mlx.core`, which belongs to the engines. These modules are therefore loaded from
its folder under a package name of our own, whose `__init__` is empty; their imports of each other still work.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from mlx_mesh.mesh.errors import SettingsError

_PACKAGE = "mlx_mesh_mlx_lm_text"


def load(name: str) -> Any:
    """The module `mlx_lm.<name>`, without `mlx_lm` itself. Raises SettingsError when there is none."""
    if _PACKAGE not in sys.modules:
        spec = importlib.util.find_spec("mlx_lm")  # finds a top-level package without running it
        if spec is None or not spec.submodule_search_locations:
            raise SettingsError("mlx-lm is not installed beside mlx-mesh; install mlx-mesh again")
        package = types.ModuleType(_PACKAGE)
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules[_PACKAGE] = package
    try:
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except ModuleNotFoundError as error:
        raise SettingsError(f"the installed mlx-lm has no {name}: {error}") from error
