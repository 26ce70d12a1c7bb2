"""Prompts with media begin like prompts of text alone, and processors leave nothing of them out."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from mlx_mesh.mesh.messages import Media
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.pictures import PictureError, Pictures
from mlx_mesh.node.engine.text_start import nothing_added, without_what_is_added

BEGIN = "<|endoftext|>"
ADDS_BEGIN = TemplateProcessing(single=f"{BEGIN} $A", pair=f"{BEGIN} $A $B", special_tokens=[(BEGIN, 0)])


@pytest.fixture
def pictures(tiny_vlm_folder: Path, tmp_path: Path) -> Pictures:
    """Of a model whose tokenizer puts a token in front, as those of Llama, Mistral and Gemma do."""
    folder = shutil.copytree(tiny_vlm_folder, tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = ADDS_BEGIN
    tokenizer.save(str(folder / "tokenizer.json"))
    return Pictures(folder, open_lazy(folder, with_vision=True).whole)


def test_a_prompt_begins_once_whether_the_template_says_so_or_the_tokenizer(
    vlm: ModuleType, pictures: Pictures
) -> None:
    text, images = vlm.prompt("?"), (vlm.picture(1),)
    plain = pictures.read(Media(text=text, images=images))[0]
    templated = pictures.read(Media(text=BEGIN + text, images=images))[0]
    assert plain[0] == 0 != plain[1]
    assert templated == plain
    assert pictures.read(Media(text=text, images=images))[0] == plain  # the tokenizer is as it was


class Processor:
    """Writes `own` in front of a text without it; or of any text, when it `insists`."""

    def __init__(self, own: str, *, insists: bool) -> None:
        vocabulary = Tokenizer.from_str(_words())
        vocabulary.post_processor = ADDS_BEGIN
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=vocabulary, bos_token=BEGIN)
        self._own, self._insists = own, insists

    def __call__(self, text: str) -> list[int]:
        if self._insists or self._own not in text:
            text = self._own + text
        with nothing_added(self, text if not self._insists else self._own):
            return list(self.tokenizer(text).input_ids)


def _words() -> str:
    from tokenizers import AddedToken, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({BEGIN: 0, "a": 1, "b": 2}, unk_token="a"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([AddedToken(BEGIN, special=True)])
    return str(made.to_str())


@pytest.mark.parametrize("text", [f"{BEGIN}a b", "a b"])
def test_a_processor_that_writes_it_by_itself_gets_the_text_that_makes_one(text: str) -> None:
    processor = Processor(BEGIN, insists=True)
    again = without_what_is_added(processor, text, processor(text))
    assert processor(again) == [0, 1, 2]


def test_a_text_that_neither_template_nor_processor_begins_is_as_the_tokenizer_makes_it() -> None:
    assert without_what_is_added(Processor("", insists=False), "a b", [0, 1, 2]) == "a b"
    assert without_what_is_added(object(), "a b", [0, 0, 1]) == "a b"


def test_a_processor_that_reads_text_alone_is_an_error_and_no_answer(
    vlm: ModuleType, tiny_vlm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a folder without the processor's settings loads as is a tokenizer, for some families."""

    def tokenizer_alone(folder: Path, **_: Any) -> Any:
        return PreTrainedTokenizerFast.from_pretrained(str(folder))

    monkeypatch.setattr("mlx_vlm.utils.load_processor", tokenizer_alone)
    pictures = Pictures(tiny_vlm_folder, open_lazy(tiny_vlm_folder, with_vision=True).whole)
    with pytest.raises(PictureError, match="leaves the pictures out") as caught:
        pictures.read(Media(text=vlm.prompt("?"), images=(vlm.picture(1),)))
    assert caught.value.param == "images[0]"


def test_a_processor_that_leaves_out_the_sound_beside_a_picture_is_an_error(
    alm: ModuleType, vlm: ModuleType, tiny_alm_folder: Path
) -> None:
    pictures = Pictures(tiny_alm_folder, open_lazy(tiny_alm_folder, with_vision=True).whole)
    pictures._load_processor().feature_extractor = None
    asked = Media(text=alm.prompt("?", 1, 1), images=(vlm.picture(1),), audios=(alm.sound(1),))
    with pytest.raises(PictureError, match="leaves the audio out"):
        pictures.read(asked)
