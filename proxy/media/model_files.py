"""What a model's files say about the sound and the videos that it takes. Read once, at start; a file that
cannot be read says nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlx_mesh.proxy.json_file import read_json
from mlx_mesh.proxy.media.limits import MAX_FRAMES
from mlx_mesh.proxy.media.sampling import Sampling

DEFAULT_RATE = 16000
_RATES = range(8000, 48001)

_PROCESSORS = ("processor_config.json", "preprocessor_config.json")
_VIDEO = ("video_preprocessor_config.json", "processor_config.json", "preprocessor_config.json")

_FAMILIES: dict[str, dict[str, Any]] = {
    "diffusion_gemma": {"limit": "num_frames", "max_frames": 32},
    "gemma4": {"limit": "num_frames", "max_frames": 32},
    "gemma4_unified": {"limit": "num_frames", "max_frames": 32},
    "mage_vl": {"min_frames": 1, "max_frames": 32, "factor": 1},
    "minicpmv4_6": {"limit": "max_num_frames", "max_frames": 128},
    "minicpmv4_7": {"limit": "max_num_frames", "max_frames": 128},
    "muse_spark": {"limit": "num_frames", "max_frames": 600, "min_frames": 1, "factor": 1},
    "muse_spark_open": {"limit": "num_frames", "max_frames": 600, "min_frames": 1, "factor": 1},
    "nemotron_h_nano_omni": {"max_frames": 128},
    "nemotron_h_omni": {"max_frames": 128},
    "nemotronh_nano_omni_reasoning_v3": {"max_frames": 128},
}
"""What mlx-vlm's processors of these families say in code (`video_sampling_defaults`), which is not run here
as it imports MLX. `limit`: what their files call max_frames."""


def read_sampling_rate(folder: Path) -> int:
    """Hz, of the model's feature extractor."""
    contents = [read_json(folder / name) for name in _PROCESSORS]
    for content in contents:
        for part in (content.get("feature_extractor"), content.get("audio_processor"), content):
            for name in ("sampling_rate", "audio_sampling_rate"):
                rate = part.get(name) if isinstance(part, dict) else None
                if type(rate) is int and rate in _RATES:
                    return rate
    return DEFAULT_RATE


def read_sampling(folder: Path) -> Sampling:
    """How many frames of a video the model is shown when the request says nothing."""
    kind = str(read_json(folder / "config.json").get("model_type") or "").lower()
    family = _FAMILIES.get(kind, {})
    found: dict[str, Any] = {
        name: family[name] for name in ("min_frames", "max_frames", "factor") if name in family
    }
    names = {"fps": "fps", "min_frames": "min_frames", "max_frames": "max_frames"}
    if "limit" in family:
        names["max_frames"] = family["limit"]
    for part in _video_parts(folder):
        for field, name in names.items():
            value = _number(part.get(name), field == "fps")
            if value is not None:
                found[field] = value
        if any(name in part for name in names.values()):
            break
    return Sampling(**found)


def _number(value: Any, is_rate: bool) -> float | int | None:
    if is_rate:
        is_one = isinstance(value, (int, float)) and not isinstance(value, bool)
        return float(value) if is_one and math.isfinite(value) and value > 0 else None
    return min(value, MAX_FRAMES) if type(value) is int and value > 0 else None


def _video_parts(folder: Path) -> Iterator[dict[str, Any]]:
    for name in _VIDEO:
        content = read_json(folder / name)
        part = content.get("video_processor")
        if isinstance(part, dict):
            yield part
        if name != "processor_config.json":
            yield content
