"""Which server `chat` and `mcp` talk to."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator

from mlx_mesh.launcher.api import Api
from mlx_mesh.launcher.config import read_api_keys
from mlx_mesh.launcher.running import api_of, find_folder


@contextlib.contextmanager
def chosen_api(arguments: argparse.Namespace) -> Iterator[Api]:
    """Of --url, or of a mesh that runs."""
    if arguments.url:
        keys = read_api_keys(arguments.api_key_file, os.environ)
        yield Api(arguments.url, keys[0] if keys else "")
        return
    state = find_folder(arguments.target, os.environ).read_running()
    with api_of(state, arguments.api_key_file, os.environ) as api:
        yield api
