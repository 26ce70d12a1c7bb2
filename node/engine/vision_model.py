"""Open the folder of a vision model without reading weights: its language part for all ranks, its towers for
the leader alone."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mlx_mesh.mesh.errors import SettingsError


def load_vision(folder: Path) -> tuple[Any, dict[str, Any]]:
    """mlx-vlm's whole model over lazy arrays, and its config. Raises SettingsError."""
    from mlx_vlm.utils import load_config, load_model

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some say what they skip
            whole = load_model(folder, lazy=True)
            if hasattr(whole, "disable_talker"):  # speech is not made here
                whole.disable_talker()
            return whole, dict(load_config(folder))
    except FileNotFoundError as error:
        raise SettingsError(f"{folder}: {error}. Copy the complete model folder to this host.") from error
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(
            f"{folder}: mlx-vlm cannot build this model: {words[0].rstrip('.')}. Check that config.json and "
            "the weight files belong together, or serve it with --no-vision if mlx-lm knows its text part."
        ) from error


def load_processor(folder: Path) -> Any:
    """The model's own, from files and without running code of the folder. Raises SettingsError that says what
    is missing."""
    from mlx_vlm import utils

    try:
        utils.get_model_and_args(config=dict(utils.load_config(folder)))  # a family brings its own processor
        return utils.load_processor(folder, add_detokenizer=False)
    except Exception as error:  # whatever a processor's own code raises
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise SettingsError(
            f"its processor cannot be loaded ({words}); if that names PyTorch or torchvision, install it on "
            "the leader"
        ) from error


def tower_arrays(whole: Any) -> list[Any]:
    """The parameters that are not the language part's: towers and projectors, for the leader alone."""
    in_language = {id(array) for _, array in tree_flatten(whole.language_model.parameters())}
    return [array for _, array in tree_flatten(whole.parameters()) if id(array) not in in_language]
