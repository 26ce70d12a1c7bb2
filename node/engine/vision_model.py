"""Open the folder of a vision model without reading weights: its language part for all ranks, its towers for
the leader alone."""

from __future__ import annotations

import contextlib
import io
import json
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


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""Where a model says how pictures and sounds become its numbers; one of them is enough."""


def load_processor(folder: Path) -> Any:
    """The model's own, from files and without running code of the folder. Raises SettingsError that says what
    is missing."""
    from mlx_vlm import utils

    if not any((folder / name).is_file() for name in PROCESSOR_FILES):  # some families then guess
        raise SettingsError(
            f"the leader's copy has neither {' nor '.join(PROCESSOR_FILES)}; copy them to {folder}"
        )
    try:
        utils.get_model_and_args(config=dict(utils.load_config(folder)))  # a family brings its own processor
        with contextlib.redirect_stdout(io.StringIO()):  # some say what they add
            # mlx-vlm lets its own processors run a tokenizer's code from the folder unless it is told not to
            processor = utils.load_processor(folder, add_detokenizer=False, trust_remote_code=False)
    except Exception as error:  # whatever a processor's own code raises
        words = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        if _names_code(folder):  # what mlx-vlm tries next hides that this failed
            raise SettingsError(
                f"its processor cannot be loaded ({words}); its files name code of the model folder, and "
                "mlx-mesh runs none. Use a copy of the model with a tokenizer.json"
            ) from error
        raise SettingsError(
            f"its processor cannot be loaded ({words}); if that names PyTorch or torchvision, install it on "
            "the leader"
        ) from error
    scaler = getattr(processor, "image_processor", None)
    if type(scaler).__module__ == "mlx_vlm.models.llama4.processing_llama4":
        _add_whole_picture(scaler)
    _accept_known_alone(scaler)
    return processor


def _add_whole_picture(scaler: Any) -> None:
    """Llama 4 is shown the tiles of a picture and then the picture as a whole. mlx-vlm's processor has marks
    for the latter and forgets its pixels: the model would take what lies behind the others in memory."""
    split = scaler._split_into_tiles

    def tiles_of(image: Any, aspect_ratio: tuple[int, int]) -> list[Any]:
        tiles: list[Any] = split(image, aspect_ratio)
        if len(tiles) > 1:
            tiles.append(image.resize((scaler.size, scaler.size)))
        return tiles

    scaler._split_into_tiles = tiles_of


def _names_code(folder: Path) -> bool:
    """Whether the settings of tokenizer or processor want classes of the model folder."""
    for name in ("tokenizer_config.json", "processor_config.json", "preprocessor_config.json"):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            if json.loads((folder / name).read_text(encoding="utf-8")).get("auto_map"):
                return True
    return False


def _accept_known_alone(scaler: Any) -> None:
    """transformers' image processors refuse settings that they do not know, and mlx-vlm's processors of some
    families hand theirs on with those for the tokenizer: from here on the former drop them."""
    known = getattr(type(scaler), "valid_kwargs", None)
    if known is None:
        return
    names = known.__required_keys__ | known.__optional_keys__
    base: Any = type(scaler)

    def call(self: Any, images: Any, *more: Any, **settings: Any) -> Any:
        given = {name: value for name, value in settings.items() if name in names}
        return base.__call__(self, images, *more, **given)

    scaler.__class__ = type(base.__name__, (base,), {"__call__": call, "__module__": base.__module__})


def tower_arrays(whole: Any) -> list[Any]:
    """The parameters that are not the language part's: towers and projectors, for the leader alone."""
    in_language = {id(array) for _, array in tree_flatten(whole.language_model.parameters())}
    return [array for _, array in tree_flatten(whole.parameters()) if id(array) not in in_language]
