"""What a model's folder, its tokenizer and mlx-vlm say about marks of media. Read once, at start."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from mlx_mesh.proxy.json_file import read_json
from mlx_mesh.proxy.media.marks import KnownMarks

_FIRST = {
    "image": ("image_token", "boi_token", "start_image_token", "image_start_token"),
    "audio": ("audio_token", "boa_token", "audio_start_token", "audio_bos_token"),
    "video": ("video_token", "video_start_token"),
}
_WORDS = ("image", "img", "boi", "eoi", "vision", "video", "audio", "sound", "media", "boa", "eoa")
_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json", "config.json")
_OWN_NAME = "mlx_mesh_mlx_vlm_prompt_utils"


def read_known_marks(folder: Path, added: Iterable[tuple[int, str]], kind: str = "image") -> KnownMarks:
    """`added`: the tokenizer's added tokens. Never raises: a file that cannot be read says nothing."""
    first = _FIRST[kind]
    contents = {name: read_json(folder / name) for name in _FILES}
    text_of = dict(added)
    found: dict[str, str] = {}
    for content in contents.values():
        for key, value in _named(content):
            text = text_of.get(value) if isinstance(value, int) else value
            name = key.removesuffix("_id").removesuffix("_index")
            if isinstance(text, str) and text.strip() and any(word in name for word in _WORDS):
                found.setdefault(name, text)
    names = [found[name] for name in first if name in found]
    names += [text for name, text in sorted(found.items()) if name not in first]
    family = str(contents["config.json"].get("model_type") or "")
    own = next((found[name] for name in first if name in found), "")
    return KnownMarks(
        tuple(dict.fromkeys(names)), frozenset(text_of.values()), _family_mark(family, kind), own
    )


def _named(content: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Entries called something_token, something_token_id or something_token_index."""
    nested = [content.get("extra_special_tokens"), content.get("model_specific_special_tokens"), content]
    for one in nested:
        for key, value in one.items() if isinstance(one, dict) else ():
            if key.endswith(("_token", "_token_id", "_token_index")) and type(value) in (str, int, dict):
                yield key, value.get("content") if isinstance(value, dict) else value


def _family_mark(model_type: str, kind: str) -> str | None:
    """What mlx-vlm writes for one item into a text. See KnownMarks. Videos it leaves to templates."""
    module = _prompt_utils()
    if module is None or kind == "video" or model_type not in module.MODEL_CONFIG:
        return None
    formats = module.MessageFormat
    if module.MODEL_CONFIG[model_type] in (formats.TEXT_ONLY, formats.PROMPT_ONLY):
        return "" if kind == "image" else None
    try:
        formatter = module.MessageFormatter(model_type)
        if kind == "image":
            message = formatter.format_message(
                [{"type": "image"}], role="user", num_images=1, skip_audio_token=True, num_audios=0
            )
        else:
            message = formatter.format_message(
                "", role="user", num_images=0, skip_image_token=True, num_audios=1
            )
    except (ValueError, TypeError):
        return None
    content = message.get("content") if isinstance(message, dict) else message
    return content if isinstance(content, str) and content else None


def _prompt_utils() -> ModuleType | None:
    """mlx-vlm's module of that name from its file: the package itself imports MLX, which is the engine's."""
    package = importlib.util.find_spec("mlx_vlm")  # finds a top-level package without running it
    for folder in (package.submodule_search_locations or ()) if package else ():
        file = Path(folder) / "prompt_utils.py"
        spec = importlib.util.spec_from_file_location(_OWN_NAME, file) if file.is_file() else None
        if spec is not None and spec.loader is not None:
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            return module
    return None
