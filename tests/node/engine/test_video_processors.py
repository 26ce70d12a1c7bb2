"""Videos through the real processors of families that take them: what mlx-vlm makes of the same frames."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

from mlx_mesh.mesh.messages import Media
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.pictures import Pictures
from mlx_mesh.node.engine.videos import frames_of
from mlx_mesh.node.engine.vision_model import load_processor
from mlx_mesh.node.vision import VIDEO

QUICK = "qwen3_vl"
VIDEO_ID = 991
SHOWN = {"gemma4": "<|video|>", "llava_onevision": "<video>", "minicpmv4_6": "<|video_pad|>"}
QWEN = "<|vision_start|><|video_pad|><|vision_end|>"
PICTURES = {"gemma4": "<|image|>", "llava_onevision": "<image>", "minicpmv4_6": "(<image>./</image>)"}
BOTH = (*PICTURES, "qwen3_vl")
"""Whose own code in mlx-vlm reads pictures and videos of one prompt."""


def expected(folder: Path, model: Any, media: Media) -> tuple[list[int], Any]:
    """Ids and embeddings as mlx-vlm makes them of two frames a second."""
    from mlx_vlm import utils

    inputs = utils.prepare_inputs(
        load_processor(folder),
        images=[utils.load_image(io.BytesIO(image)) for image in media.images] or None,
        videos=[frames_of(video)[0] for video in media.videos],
        prompts=media.text,
    )
    ids, pixels, mask = (inputs.pop(name, None) for name in ("input_ids", "pixel_values", "attention_mask"))
    given = {name: value for name, value in inputs.items() if value is not None}
    ids = mx.array(ids)
    return ids.tolist()[0], model.get_input_embeddings(ids, pixels, mask=mask, **given).inputs_embeds


@pytest.mark.filterwarnings("default")  # processors and what they use warn of what is not ours
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.long]) for name in VIDEO]
)
def test_videos_go_through_the_familys_own_processor(
    family: str, tiny_vlm: ModuleType, vlm_folders: ModuleType, vlm: ModuleType, tmp_path: Path
) -> None:
    folder = vlm_folders.save(family, tmp_path, tiny_vlm)
    whole = open_lazy(folder, with_vision=True).whole
    pictures = Pictures(folder, whole)
    mark = SHOWN.get(family, QWEN)
    one, other = vlm.video(1, 5, width=40, height=48), vlm.video(2, 5, width=64, height=32)
    prompts = [
        Media(text=f"a {mark} b", videos=(one,)),
        Media(text=f"a {mark} b {mark} c", videos=(one, other)),
    ]
    if family in BOTH:
        picture = PICTURES.get(family, QWEN.replace("video", "image"))
        text = f"a {picture} b {mark} c"
        prompts.append(Media(text=text, images=(vlm.picture(1, 40, 48),), videos=(one,)))
    for media in prompts:
        ids, keys, features = pictures.read(media)
        own_ids, embeds = expected(folder, whole, media)
        assert list(ids) == own_ids and len(keys) == features.length
        assert ids.count(VIDEO_ID) >= 5 * len(media.videos) // 2
        assert float(mx.abs(features.fields["inputs_embeds"] - embeds).max().item()) < 1e-5
        assert sum(key >= 1 << 31 for key in keys) >= ids.count(VIDEO_ID)
    assert "torch" not in sys.modules
