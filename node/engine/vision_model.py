"""Open the folder of a vision model without reading weights: its language part for all ranks, its towers for
the leader alone."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

from mlx.utils import tree_flatten

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.types import VisionMode

MISSING = "mlx-vlm is not installed there; install mlx-mesh[vision] on every host"


ONE_AT_A_TIME = {
    "llama4": "its chunked caches cannot be joined",
    "mllama": "each of its decode steps needs the picture of its own row",
    "ministral3": "its attention is scaled by places in the batch, not in the row",
}
"""By the type of a model or of its text part: why it is right only for one sequence at a time."""

NEVER = {
    (
        "paligemma",
        "gemma",
    ): "its text part looks ahead within the prompt, so a prompt cannot be read in chunks",
    ("gemma3n", ""): "in mlx-vlm a token of its prompt sees later ones, so its answers depend on the chunks",
    ("phi3_v", ""): "its pictures have negative token ids",
}
"""By the types of a model and of its text part: why it is not served."""


def why_alone(config: dict[str, Any]) -> str:
    """Why a vision model serves one sequence at a time; '' when it serves many."""
    kinds = (str(config.get("model_type")), _text_type(config))
    return next((ONE_AT_A_TIME[kind] for kind in kinds if kind in ONE_AT_A_TIME), "")


def _text_type(config: dict[str, Any]) -> str:
    text = config.get("text_config")
    return str(text.get("model_type", "")) if isinstance(text, dict) else ""


def has_vision(config: dict[str, Any]) -> bool:
    """Whether a model's config describes a vision tower. Text-only copies of such models set it to null."""
    return bool(config.get("vision_config"))


def is_installed() -> bool:
    """Whether this environment can load vision models at all."""
    return importlib.util.find_spec("mlx_vlm") is not None


def why_no_vision(config: dict[str, Any]) -> str:
    """Why a model with a tower can be served for text only; '' when pictures are possible."""
    if not is_installed():
        return MISSING
    from mlx_vlm.utils import get_model_type

    kind = get_model_type(config)
    if importlib.util.find_spec(f"mlx_vlm.models.{kind}") is None:
        return f"mlx-vlm has no model of type {kind!r}"
    for text in (_text_type(config), ""):
        if (str(kind), text) in NEVER:
            return NEVER[str(kind), text]
    return ""


def choose_vision(folder: Path, mode: VisionMode, *, has_adapter: bool = False) -> tuple[bool, str]:
    """Whether a model is served with its towers, and if not although it has some, why. Raises SettingsError
    when pictures were asked for (`VisionMode.ON`) and are not possible."""
    config = read_config(folder)
    if not has_vision(config):
        if mode is VisionMode.ON:
            raise SettingsError(f"{folder} has no vision tower (no vision_config). Leave --vision out.")
        return False, ""
    if mode is VisionMode.OFF:
        return False, "--no-vision was given"
    why = why_no_vision(config)
    if not why and has_adapter:
        why = "an adapter was given, and adapters are of text models"
    if why and mode is VisionMode.ON:
        raise SettingsError(f"{folder} cannot take pictures: {why}.")
    return not why, why


def read_config(folder: Path) -> dict[str, Any]:
    """The model's config.json; {} when it cannot be read, which opening the model tells better."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def load_vision(folder: Path) -> tuple[Any, dict[str, Any]]:
    """mlx-vlm's whole model over lazy arrays, and its config. Raises SettingsError."""
    from mlx_vlm.utils import load_config, load_model

    try:
        with contextlib.redirect_stdout(io.StringIO()):  # some say what they skip
            return load_model(folder, lazy=True), dict(load_config(folder))
    except FileNotFoundError as error:
        raise SettingsError(f"{folder}: {error}. Copy the complete model folder to this host.") from error
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError) as error:
        words = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(
            f"{folder}: mlx-vlm cannot build this model: {words[0].rstrip('.')}. Check that config.json and "
            "the weight files belong together, or serve it with --no-vision if mlx-lm knows its text part."
        ) from error


def tower_arrays(whole: Any) -> list[Any]:
    """The parameters that are not the language part's: towers and projectors, for the leader."""
    in_language = {id(array) for _, array in tree_flatten(whole.language_model.parameters())}
    return [array for _, array in tree_flatten(whole.parameters()) if id(array) not in in_language]
