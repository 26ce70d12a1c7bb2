"""Where measurements of hosts and links are kept: `measurements.json` in the state folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from mlx_mesh.launcher.state import state_root
from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.measurements import Measurements


def measurements_file(environment: Mapping[str, str]) -> Path:
    return state_root(environment) / "measurements.json"


def read_measurements(environment: Mapping[str, str]) -> Measurements:
    """All that was ever measured; nothing when there is no file. Raises SettingsError."""
    path = measurements_file(environment)
    try:
        return msgspec.json.decode(path.read_bytes(), type=Measurements)
    except FileNotFoundError:
        return Measurements()
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(
            f"{path} cannot be read ({error}). Delete it and measure again with `mlx-mesh bench --probe`."
        ) from error


def keep_measurements(environment: Mapping[str, str], newer: Measurements) -> Path:
    """Add to what is there."""
    path = measurements_file(environment)
    merged = read_measurements(environment).merged(newer)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.format(msgspec.json.encode(merged), indent=1))
    temporary.replace(path)
    return path
