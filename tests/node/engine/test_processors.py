"""Files of every family through its own processor, from a complete folder: the marks of the front end, the
right number of tokens, mlx-vlm's own logits, pictures in their order; all of it without PyTorch."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.messages import Media
from mlx_mesh.node.engine.features import clear_state
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.pictures import PictureError, Pictures
from mlx_mesh.node.engine.vision_model import load_processor
from mlx_mesh.node.vision import ONE_PICTURE, why_no_vision
from mlx_mesh.proxy.media.item import Item, item_part, text_part
from mlx_mesh.proxy.media.known_marks import read_known_marks
from mlx_mesh.proxy.media.marks import Marks, find_mark
from mlx_mesh.proxy.media.placing import check_count, place
from mlx_mesh.proxy.tokenizer import ModelTokenizer

NUM_DECODED = 3
BOUND = 1e-5
QUICK = ("qwen3_vl", "llava")
"""Positions and features between layers; a processor that needs help."""

TOKENS: dict[str, tuple[int, int]] = {
    "aya_vision": (4, 12),
    "deepseek_vl_v2": (19, 17),
    "gemma3": (4, 4),
    "gemma4": (63, 55),
    "glm4v": (12, 10),
    "glm4v_moe": (12, 10),
    "idefics3": (20, 12),
    "internvl": (52, 12),
    "internvl_chat": (52, 12),
    "kimi_vl": (1, 2),
    "lfm2_vl": (6, 8),
    "llama4": (4, 12),
    "llava": (16, 16),
    "llava_next": (160, 96),
    "minicpmv4_6": (4, 3),
    "mistral3": (9, 8),
    "mistral3#ministral3": (9, 8),
    "mllama": (1, 1),
    "molmo": (40, 40),
    "paligemma": (16, 16),
    "paligemma#gemma2": (16, 16),
    "pixtral": (30, 32),
    "qwen2_vl": (12, 10),
    "qwen2_5_vl": (12, 10),
    "qwen3_vl": (12, 10),
    "qwen3_vl_moe": (12, 10),
    "qwen3_5": (12, 10),
    "qwen3_5_moe": (12, 10),
    "smolvlm": (20, 12),
}
"""Embeddings of a picture of 40 by 48 and of one of 64 by 32 pixels, each alone in a prompt."""
LEFT_OUT = {
    "gemma3n": "its tower has 295 million parameters",
    "gemma4#blocks": "its processor is gemma4's",
    "llava_onevision": "tried with videos alone",
}
SIZES = ((40, 48), (64, 32))
MARK_ID = 990
SCALED = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
"""Whose processors take `min_pixels` and `max_pixels`."""
SHRUNK = {"glm4v", "glm4v_moe", "kimi_vl", "lfm2_vl", "mistral3", "mistral3#ministral3", "pixtral"}
"""Whose pictures have tokens by their pixels: `max_pixels` makes them smaller before the processor."""


def names() -> list[Any]:
    marks = {name: [] if name in QUICK else [pytest.mark.long] for name in TOKENS}
    return [pytest.param(name, marks=marks[name]) for name in TOKENS]


class Model:
    """One family's folder, opened by both sides of the program."""

    def __init__(self, family: str, folder: Path, vlm_folders: ModuleType, tiny_vlm: ModuleType) -> None:
        self.folder = vlm_folders.save(family, folder, tiny_vlm)
        self.tokenizer = ModelTokenizer.load(str(folder))
        mark = find_mark(self.tokenizer.render, read_known_marks(folder, self.tokenizer.added_tokens))
        assert mark is not None
        self.marks = Marks({"image": mark})
        self.lazy = open_lazy(folder, with_vision=True)
        self.pictures = Pictures(folder, self.lazy.whole)

    def prompt(self, num_pictures: int) -> str:
        """As the front end makes it: each picture before a word of its own."""
        content: list[Any] = []
        for number in range(num_pictures):
            content += [item_part(Item("", f"images[{number}]")), text_part(f"word {number} ")]
        placed = place([{"role": "user", "content": content}], self.marks)
        text = self.tokenizer.render(placed.turns, {"add_generation_prompt": True})
        check_count(text, self.marks, placed.items)
        return text

    def read(self, *files: bytes, **bounds: Any) -> Any:
        return self.pictures.read(Media(text=self.prompt(len(files)), images=files, **bounds))

    def num_text(self, num_pictures: int = 1) -> int:
        """Tokens of the prompt without what stands for pictures: marks are gone, frames of them are text."""
        return len(self.tokenizer.plain_ids(self.prompt(num_pictures)))


def expected(
    tiny_vlm: ModuleType, folder: Path, text: str, files: tuple[bytes, ...]
) -> tuple[list[Any], list[int]]:
    """Logits and greedy tokens of mlx-vlm's own generation, on its own copy of the model."""
    from mlx_vlm import utils

    model = utils.load_model(folder)
    inputs = utils.prepare_inputs(
        load_processor(folder),
        images=[utils.load_image(io.BytesIO(file)) for file in files],
        prompts=text,
        image_token_index=getattr(model.config, "image_token_index", None),
        add_special_tokens=utils.should_add_special_tokens(model.config.model_type, load_processor(folder)),
    )
    ids, pixels, mask = (inputs.pop(name, None) for name in ("input_ids", "pixel_values", "attention_mask"))
    embedded = model.get_input_embeddings(
        ids, pixels, mask=mask, **{name: value for name, value in inputs.items() if value is not None}
    )
    fields = {k: v for k, v in embedded.to_dict().items() if v is not None and k != "inputs_embeds"}
    logits, tokens = tiny_vlm.decoded(model, ids[0].tolist(), embedded, fields, NUM_DECODED)
    return logits, tokens


@pytest.mark.filterwarnings("default")  # processors and what they use warn of what is not ours
@pytest.mark.parametrize("family", names())
def test_files_go_through_the_familys_own_processor(
    family: str,
    tiny: ModuleType,
    tiny_vlm: ModuleType,
    vlm_folders: ModuleType,
    vlm: ModuleType,
    tmp_path: Path,
) -> None:
    model = Model(family, tmp_path, vlm_folders, tiny_vlm)
    first, second = (vlm.picture(seed, *size) for seed, size in enumerate(SIZES, 1))

    # as many tokens as the family gives each picture, and mlx-vlm's own logits, whole and in chunks
    for file, num_tokens in zip((first, second), TOKENS[family], strict=True):
        ids, keys, features = model.read(file)
        assert len(ids) == len(keys) == features.length
        assert ids.count(MARK_ID) == num_tokens
        assert sum(key >= 1 << 31 for key in keys) >= num_tokens
    files = (first,) if family.partition("#")[0] in ONE_PICTURE else (first, second)
    text = model.prompt(len(files))
    logits, tokens = expected(tiny_vlm, tmp_path, text, files)
    ids, _, features = model.read(*files)
    clear_state(model.lazy.whole.language_model)
    for chunks in ([features.length], [9, features.length - 10, 1]):
        assert (
            tiny.gap(tiny_vlm.forward(model.lazy.model, list(ids), features, chunks, tokens), logits) <= BOUND
        )

    # two pictures in their order
    third = vlm.picture(3, *SIZES[0])
    if family.partition("#")[0] in ONE_PICTURE:
        with pytest.raises(PictureError, match="one picture in a prompt") as caught:
            model.read(first, third)
        assert caught.value.param == "images[1]"
    else:
        check_order(model, first, third)

    # a bound of pixels, where it means something; everywhere it is taken
    fewer, more = (model.read(first, **bound)[0] for bound in ({"max_pixels": 600}, {"min_pixels": 4096}))
    counts = [ids.count(MARK_ID) for ids in (fewer, more)]
    assert (counts[0] < TOKENS[family][0]) == (family in SCALED | SHRUNK - {"kimi_vl"})
    assert counts[1] == TOKENS[family][0] or family in SCALED
    assert "torch" not in sys.modules and importlib.util.find_spec("torch") is None


def check_order(model: Model, first: bytes, second: bytes) -> None:
    """Where the first picture stands, is what stands there when both are the first; likewise the second."""

    def read(*files: bytes) -> tuple[tuple[int, ...], Any]:
        ids, _, features = model.read(*files)
        name = "cross_attention_states" if "cross_attention_states" in features.fields else "inputs_embeds"
        return ids, np.array(features.fields[name].astype(mx.float32)).reshape(-1)

    (ids, both), (_, ones), (_, twos), (_, turned) = (
        read(first, second), read(first, first), read(second, second), read(second, first)
    )  # fmt: skip
    marks = [i for i, token in enumerate(ids) if token == MARK_ID]
    at = len(both) * marks[len(marks) // 2] // len(ids) if len(marks) > 2 else len(both) // 2
    assert both.shape == ones.shape == twos.shape == turned.shape
    assert (both[:at] == ones[:at]).all() and (both[at:] == twos[at:]).all()
    assert (both[:at] == turned[:at]).sum() < at and (both != ones).any() and (both != twos).any()


def test_every_family_that_is_served_is_in_the_table() -> None:
    configs = json.loads((Path(__file__).parent / "tiny_vlm_configs.json").read_text(encoding="utf-8"))
    served = {name for name, config in configs.items() if not why_no_vision(config)}
    assert served == TOKENS.keys() | LEFT_OUT.keys()


def test_the_document_says_what_was_seen_of_each_family() -> None:
    document = (Path(__file__).parents[3] / "docs" / "vision.md").read_text(encoding="utf-8")
    for family, counts in TOKENS.items():
        many = "one" if family.partition("#")[0] in ONE_PICTURE else "many"
        how = "by the processor" if family in SCALED else "made smaller before" if family in SHRUNK else "–"
        assert f"| {family} | {counts[0]}, {counts[1]} | {many} | {how} |" in document


def test_a_folder_that_says_nothing_of_pictures_is_no_reason_to_guess(
    tiny_vlm: ModuleType, vlm_folders: ModuleType, tmp_path: Path
) -> None:
    folder = vlm_folders.save("kimi_vl", tmp_path, tiny_vlm)
    load_processor(folder)
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(SettingsError, match=r"neither preprocessor_config\.json nor processor_config\.json"):
        load_processor(folder)


def test_no_code_of_a_model_folder_is_run(
    tiny_vlm: ModuleType, vlm_folders: ModuleType, tmp_path: Path
) -> None:
    """mlx-vlm would: its processors let the tokenizer's own code be loaded."""
    folder = vlm_folders.save("kimi_vl", tmp_path, tiny_vlm)
    (folder / "tokenizer.json").unlink()
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "own.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\nclass Own: pass\n")
    with pytest.raises(SettingsError) as caught:
        load_processor(folder)
    assert not (tmp_path / "was_run").exists()
    assert "mlx-mesh runs none" in str(caught.value)
