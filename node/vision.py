"""Whether and how a model is served with its vision tower: decided from its config and from what is installed
here, without MLX, so that the front end and the engines say the same."""

from __future__ import annotations

import ast
import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.types import MEDIA_KINDS, STILLS, VisionMode

MISSING = "mlx-vlm is not installed there; install mlx-mesh[vision] on every host"


ONE_AT_A_TIME = {
    "llama4": "its chunked caches cannot be joined",
    "mllama": "each of its decode steps needs the picture of its own row",
    "ministral3": "its attention is scaled by places in the batch, not in the row",
    "paligemma gemma": "its decode steps have no mask for rows of other lengths",
}
"""By the type of a model, of its text part, or both: why it is right only for one sequence at a time."""

READ_WHOLE = {
    ("paligemma", "gemma"): "its text part looks ahead within the prompt",
    ("gemma3n", ""): "in mlx-vlm a token of its prompt sees later ones",
}
"""By the types of a model and of its text part: why each prompt is read in one piece, text alone as well."""

ONE_PICTURE = {
    "llava_next": "mlx-vlm reads the first one alone",
    "molmo": "its processor makes a prompt of each",
    "paligemma": "mlx-vlm shows the first one in place of all",
}
"""By the type of a model: why a prompt may have one picture only, those of earlier turns counted."""

NEVER = {
    ("phi3_v", ""): "its pictures have negative token ids",
    ("phi4mm", ""): "the weights of its layers change with what a prompt holds",
}
"""By the types of a model and of its text part: why it is not served."""


AUDIO = {
    "gemma3n": "audio_config",
    "gemma4": "audio_config",
    "gemma4_unified": "audio_config",
    "inkling": "audio_config",
    "minicpmo": "audio_config",
    "nemotron_h_nano_omni": "sound_config",
    "qwen3_omni_moe": "thinker_config.audio_config",
}
"""mlx-vlm's families that take audio, and what in their config describes the part for it."""

NO_AUDIO = {
    "mimo_v2": "its audio is read by a second model beside it, which is not planned for",
    "muse_spark": "its kernels run on Macs alone, and have not been tried there",
}
"""Families that take audio in mlx-vlm: why it is not served."""

TOWERS = {"qwen3_omni_moe": "thinker_config.vision_config"}
"""Families without a `vision_config`: what in their config describes their vision tower."""

VIDEO = {
    "gemma4": "video_token_id",
    "llava_onevision": "",
    "minicpmv4_6": "",
    "qwen2_vl": "",
    "qwen2_5_vl": "",
    "qwen3_vl": "",
    "qwen3_vl_moe": "",
    "qwen3_5": "",
    "qwen3_5_moe": "",
}
"""mlx-vlm's families that make embeddings of videos, and what their config must say for it. Others have a
processor or a model that takes videos, and drop them without a word (glm4v, glm4v_moe)."""


TRIED = {
    "aya_vision", "deepseek_vl_v2", "gemma3", "gemma3n", "gemma4", "gemma4_unified", "glm4v", "glm4v_moe",
    "idefics3", "inkling", "internvl", "internvl_chat", "kimi_vl", "lfm2_vl", "llama4", "llava",
    "llava_next", "llava_onevision", "minicpmo", "minicpmv4_6", "mistral3", "mllama", "molmo",
    "nemotron_h_nano_omni", "paligemma", "pixtral", "qwen2_5_vl", "qwen2_vl", "qwen3_5", "qwen3_5_moe",
    "qwen3_omni_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm",
}  # fmt: skip
"""mlx-vlm's families of which a small model, with its towers, gave here what it gives there."""


def why_untried(config: dict[str, Any]) -> str:
    """What to know of a family with towers that was never compared; '' = it was."""
    family = family_of(config)
    if family in TRIED:
        return ""
    return f"what {family} models make of media was never compared with mlx-vlm here; look at some answers"


def why_alone(config: dict[str, Any]) -> str:
    """Why a vision model serves one sequence at a time; '' when it serves many."""
    family, text = str(config.get("model_type")), _text_type(config)
    kinds = (family, text, f"{family} {text}")
    return next((ONE_AT_A_TIME[kind] for kind in kinds if kind in ONE_AT_A_TIME), "")


def why_whole(config: dict[str, Any]) -> str:
    """Why a vision model's prompts are read in one piece, all of them; '' when they are read in chunks."""
    texts = (_text_type(config), "")
    return next((READ_WHOLE[key] for text in texts if (key := (family_of(config), text)) in READ_WHOLE), "")


def _text_type(config: dict[str, Any]) -> str:
    text = config.get("text_config")
    return str(text.get("model_type", "")) if isinstance(text, dict) else ""


def has_vision(config: dict[str, Any]) -> bool:
    """Whether a model's config describes a tower. Text-only copies of such models set it to null."""
    family = family_of(config)
    return any(_has(config, path) for path in ("vision_config", TOWERS.get(family), AUDIO.get(family)))


def _has(config: dict[str, Any], path: str | None) -> bool:
    value: Any = config
    for name in (path or "").split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return bool(value)


def family_of(config: dict[str, Any]) -> str:
    """What mlx-vlm calls the type of a model."""
    kind = str(config.get("model_type", "")).lower()
    return _other_names().get(kind, kind) if is_installed() else kind


def is_installed() -> bool:
    """Whether this environment can load vision models at all."""
    return importlib.util.find_spec("mlx_vlm") is not None


def why_no_vision(config: dict[str, Any]) -> str:
    """Why a model with a tower can be served for text only; '' when pictures are possible."""
    if not is_installed():
        return MISSING
    kind = family_of(config)
    if not (_library() / "models" / kind / "__init__.py").is_file():
        return f"mlx-vlm has no model of type {kind!r}"
    for text in (_text_type(config), ""):
        if (kind, text) in NEVER:
            return NEVER[kind, text]
    return ""


def media_kinds(config: dict[str, Any]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Which MEDIA_KINDS a model that is served with its towers takes, and by kind why not the others. STILLS
    in place of "video" where frames can be shown as pictures, as mlx-vlm does."""
    refusals = {
        "image": why_no_image(config),
        "audio": why_no_audio(config),
        "video": why_no_video(config),
    }
    refusals = {kind: why for kind, why in refusals.items() if why}
    taken = tuple(kind for kind in MEDIA_KINDS if kind not in refusals)
    if "image" in taken and "video" in refusals and family_of(config) not in ONE_PICTURE:
        del refusals["video"]
        taken = (*taken, STILLS)
    return taken, refusals


def no_media(refusal: str) -> dict[str, str]:
    """Why not, by kind, of a model that is served for text only. `refusal`: why, although it has towers; '' =
    it has none."""
    return dict.fromkeys(MEDIA_KINDS, refusal) if refusal else {}


def why_no_image(config: dict[str, Any]) -> str:
    """Why a model that is served with its towers takes no images; '' when it does."""
    path = TOWERS.get(family_of(config), "vision_config")
    return "" if _has(config, path) else "this model has no vision tower"


def why_no_audio(config: dict[str, Any]) -> str:
    """Why a model that is served with its towers takes no audio; '' when it does."""
    family = family_of(config)
    if family in NO_AUDIO:
        return NO_AUDIO[family]
    if family not in AUDIO:
        return f"models of type {family!r} take no audio"
    return "" if _has(config, AUDIO[family]) else "this model has no part for audio"


def why_no_video(config: dict[str, Any]) -> str:
    """Why a model that is served with its towers takes no video; '' when it does."""
    kind = family_of(config)
    if kind not in VIDEO:
        alone = ", and their prompts may have one picture only" if kind in ONE_PICTURE else ""
        return f"models of type {kind!r} have no input for video in mlx-vlm{alone}"
    if VIDEO[kind] and not isinstance(config.get(VIDEO[kind]), int):
        return f"its config names no {VIDEO[kind]}"
    return why_no_image(config)


def choose_vision(folder: Path, mode: VisionMode, *, has_adapter: bool = False) -> tuple[bool, str]:
    """Whether a model is served with its towers, and if not although it has some, why. Raises SettingsError
    when pictures were asked for (`VisionMode.ON`) and are not possible."""
    config = read_config(folder)
    if not has_vision(config):
        if mode is VisionMode.ON:
            raise SettingsError(f"{folder} has no vision tower (no vision_config). Leave --vision out.")
        return False, ""
    if mode is VisionMode.OFF:
        return False, "the server was started with --no-vision"
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


def _library() -> Path:
    """mlx-vlm's folder, which is not imported: that would load MLX."""
    spec = importlib.util.find_spec("mlx_vlm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


@functools.cache
def _other_names() -> dict[str, str]:
    """Types that mlx-vlm knows by another name: the dictionary MODEL_REMAPPING of its `utils`, as written
    there; {} when it is not there any more."""
    try:
        tree = ast.parse((_library() / "utils.py").read_text(encoding="utf-8"))
        for node in tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else []
            if any(isinstance(target, ast.Name) and target.id == "MODEL_REMAPPING" for target in targets):
                return dict(ast.literal_eval(node.value))  # type: ignore[attr-defined]
    except (OSError, ValueError, SyntaxError):
        pass
    return {}
