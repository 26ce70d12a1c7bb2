"""Pictures of a prompt: their keys in prefix caches, their travel, and what towers remember."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import msgspec
import pytest
from mlx.utils import tree_flatten
from mlx_vlm import utils

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.memory import ModelMemory
from mlx_mesh.mesh.messages import Media
from mlx_mesh.mesh.types import VisionMode
from mlx_mesh.node.engine import inspect
from mlx_mesh.node.engine import pictures as pictures_module
from mlx_mesh.node.engine.feature_wire import decode_features, encode_features
from mlx_mesh.node.engine.features import Features, features_of
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.media_keys import PICTURE_KEY, Items, keys_of, spread
from mlx_mesh.node.engine.picture_sizes import TILED_PIXELS, most_opened, opened
from mlx_mesh.node.engine.pictures import PictureError, Pictures, PromptTooLong
from mlx_mesh.node.engine.row_media import RowMedia
from mlx_mesh.node.engine.tower_memo import TowerMemo

MARKS = frozenset({9})


def media(*images: bytes, marks: frozenset[int] = MARKS) -> list[Items]:
    return [Items(marks, images)]


def some_features(length: int) -> Features:
    return Features(length, {"inputs_embeds": mx.arange(length * 2.0).reshape(1, length, 2)})


def test_the_tokens_of_a_picture_are_known_by_its_file_and_their_place_in_it() -> None:
    ids = [1, 9, 9, 2, 9, 9, 3]
    features = some_features(7)
    keys = keys_of(ids, media(b"one", b"two"), features)
    assert [keys[i] for i in (0, 3, 6)] == [1, 2, 3]
    assert len({keys[i] for i in (1, 2, 4, 5)}) == 4
    assert all(PICTURE_KEY <= keys[i] < 1 << 32 for i in (1, 2, 4, 5))
    swapped = keys_of(ids, media(b"two", b"one"), features)
    assert (swapped[1:3], swapped[4:6]) == (keys[4:6], keys[1:3])


def test_a_picture_that_others_make_smaller_is_another_one() -> None:
    alone = keys_of([1, 9, 9, 9, 2], media(b"one"), some_features(5))
    beside = keys_of([1, 9, 9, 2, 9, 9, 2], media(b"one", b"two"), some_features(7))
    assert alone[0] == beside[0] and alone[1] != beside[1]


def test_embeddings_that_are_equal_at_other_positions_are_others() -> None:
    ids = [9, 9, 1, 9, 9]
    white = mx.ones((1, 5, 2))

    def keys(*rows: int) -> tuple[int, ...]:
        positions = mx.array([[[0] * 5], [list(rows)], [[0, 1, 2, 3, 4]]])
        features = Features(5, {"inputs_embeds": white, "position_ids": positions})
        return keys_of(ids, media(b"one"), features)

    assert keys(0, 0, 1, 1, 1)[:3] == keys(0, 0, 1, 2, 2)[:3]
    assert keys(0, 0, 1, 1, 1)[3] != keys(0, 0, 1, 2, 2)[3]


@pytest.mark.parametrize("marks", [MARKS, frozenset()])
def test_where_marks_do_not_tell_pictures_apart_the_embeddings_do(marks: frozenset[int]) -> None:
    ids = [1, 9, 2, 9]  # two runs, one picture
    keys = keys_of(ids, media(b"one", marks=marks), some_features(4))
    other = Features(4, {"inputs_embeds": mx.arange(8.0).reshape(1, 4, 2) + mx.array([[0], [0], [0], [1]])})
    others = keys_of(ids, media(b"one", marks=marks), other)
    assert keys[1] >= PICTURE_KEY and keys[:3] == others[:3] and keys[3] != others[3]
    assert (keys[0] == 1) == bool(marks)


def test_one_mark_for_a_whole_picture_is_spread_to_its_length() -> None:
    assert spread([1, 9, 2], 6, MARKS) == [1, 9, 9, 9, 9, 2]
    assert spread([1, 9, 2], 3, MARKS) == [1, 9, 2]
    assert spread([1, 2], 4, MARKS) == [1, 2, 2, 2]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_features_travel_bit_for_bit(dtype: Any) -> None:
    fields = {
        "inputs_embeds": mx.random.normal((1, 5, 8)).astype(dtype),
        "position_ids": mx.arange(15, dtype=mx.int32).reshape(3, 1, 5),
        "visual_pos_masks": mx.array([[False, True, True, False, False]]),
        "deepstack_visual_embeds": [mx.random.normal((2, 8)), mx.random.normal((2, 8))],
    }
    sent = Features(5, fields, delta=-3)
    came = decode_features(encode_features(sent))
    assert (came.length, came.delta) == (5, -3)
    assert came.fields.keys() == fields.keys()
    for name, value in fields.items():
        pairs = (
            zip(value, came.fields[name], strict=True)
            if isinstance(value, list)
            else [(value, came.fields[name])]
        )
        assert all(a.dtype == b.dtype and bool(mx.array_equal(a, b).item()) for a, b in pairs), name


def test_a_row_keeps_of_a_prompt_that_is_read_only_what_every_step_needs() -> None:
    states = mx.zeros((1, 3, 8))
    fields = {"inputs_embeds": mx.zeros((1, 5, 8)), "cross_attention_states": states}
    features = Features(5, fields, delta=4, keys=(1, 2, 3, 4, 5))
    row = RowMedia(features)
    other = RowMedia(some_features(9))
    for one in (row, other):
        one.advance(4)
        one.let_go_of_read()
    rows = RowMedia.merge([row, other])
    assert rows.nbytes == features.nbytes + other.nbytes
    rows.advance(1)
    rows.let_go_of_read()
    assert rows.nbytes == features.nbytes_after + other.nbytes == states.nbytes + other.nbytes
    assert rows.deltas == [4, 0]
    assert rows.extract(0).let_go([0, 0, 0, 0, 0, 6]) == (1, 2, 3, 4, 5, 6)


def test_what_is_no_features_is_an_error() -> None:
    with pytest.raises(msgspec.MsgspecError):
        decode_features(b"\x93\x01")


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava", "gemma3"])
def test_a_second_question_about_a_picture_costs_no_pass_and_gives_the_same(
    tiny_vlm: ModuleType, family: str
) -> None:
    whole = tiny_vlm.build(family)
    before = features_of(tiny_vlm.embed(whole, family)[1].to_dict(), whole.language_model)
    memo = TowerMemo(whole)
    for seed, passes in ((1, 1), (1, 1), (2, 2), (1, 2)):
        after = features_of(tiny_vlm.embed(whole, family, seed)[1].to_dict(), whole.language_model)
        assert memo.num_passes == passes
        if seed == 1:
            assert encode_features(after) == encode_features(before)


def test_the_least_recently_used_pictures_are_forgotten(tiny_vlm: ModuleType) -> None:
    whole = tiny_vlm.build("llava")
    memo = TowerMemo(whole)
    tiny_vlm.embed(whole, "llava", 1)
    size = memo.num_bytes
    memo._limit_bytes = 2 * size
    for seed in (2, 1, 3, 1, 2):  # 3 takes the place of 2
        tiny_vlm.embed(whole, "llava", seed)
    assert memo.num_passes == 4
    assert memo.num_bytes == 2 * size


def test_what_cannot_be_compared_or_measured_is_not_remembered() -> None:
    class Whole(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.vision_tower = Tower()
            self.language_model = nn.Linear(1, 1)

    class Tower(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.ones((1,))

        def __call__(self, x: Any, settings: Any = None) -> Any:
            return (x + 1, None) if settings is None else {"hidden": x}

    whole = Whole()
    memo = TowerMemo(whole)
    pixels = mx.zeros((2, 2))
    for _ in range(2):
        whole.vision_tower(pixels)
    assert (memo.num_passes, memo.num_bytes) == (1, 16)
    for settings in (object(), "a dictionary as result"):
        for _ in range(2):
            whole.vision_tower(pixels, settings)
    assert (memo.num_passes, memo.num_bytes, len(memo._kept)) == (5, 16, 1)


def test_what_one_tower_made_is_not_taken_for_the_others() -> None:
    class Tower(nn.Module):  # type: ignore[misc]
        def __init__(self, factor: float) -> None:
            super().__init__()
            self.weight = mx.array([factor])

        def __call__(self, x: Any) -> Any:
            return x * self.weight

    class Whole(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.vision_tower, self.audio_tower = Tower(2.0), Tower(3.0)

    whole = Whole()
    memo = TowerMemo(whole)
    for _ in range(2):
        assert (whole.vision_tower(mx.ones(1)).item(), whole.audio_tower(mx.ones(1)).item()) == (2.0, 3.0)
    assert memo.num_passes == 2


def test_files_become_ids_keys_and_features(vlm: ModuleType, tiny_vlm_folder: Path) -> None:
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    pictures = Pictures(tiny_vlm_folder, lazy.whole)
    text = vlm.prompt("what is this?", 2)
    asked = Media(text=text, images=(vlm.picture(1), vlm.picture(2, width=32, height=32, kind="JPEG")))
    ids, keys, features = pictures.read(asked)
    assert len(ids) == len(keys) == features.length == len(vlm.ids_of(text)) - 2 + 6 + 16
    assert sum(key >= PICTURE_KEY for key in keys) == 6 + 16
    small = pictures.read(msgspec.structs.replace(asked, max_pixels=256))[0]
    assert len(small) < len(ids)
    bounded = pictures.read(msgspec.structs.replace(asked, max_pixels=1024))
    assert bounded[0] == ids and bounded[1] != keys


@pytest.mark.parametrize(
    ("images", "words", "param"),
    [
        ((b"no picture",), "cannot be read", "images[0]"),
        ((), "no picture", ""),
        ((b"\x89PNG\r\n\x1a\n",), "cannot be read", "images[0]"),
    ],
)
def test_what_is_no_picture_is_an_error_of_the_request(
    vlm: ModuleType, tiny_vlm_folder: Path, images: tuple[bytes, ...], words: str, param: str
) -> None:
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    with pytest.raises(PictureError, match=words) as caught:
        Pictures(tiny_vlm_folder, lazy.whole).read(Media(text=vlm.prompt("?"), images=images))
    assert caught.value.param == param


def test_a_model_whose_processor_cannot_be_loaded_takes_text_only_and_says_why(
    tiny_vlm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ImportError("Qwen2VLVideoProcessor requires the Torchvision library.")

    assert inspect.measure_folder(tiny_vlm_folder, "").media == ("image", "video")
    monkeypatch.setattr("mlx_vlm.utils.load_processor", fail)
    footprint = inspect.measure_folder(tiny_vlm_folder, "")
    assert footprint.media == () and footprint.tower_bytes == 0
    assert "requires the Torchvision library); " in footprint.media_refusals["image"]
    with pytest.raises(SettingsError, match="Torchvision"):
        inspect.measure_folder(tiny_vlm_folder, "", vision=VisionMode.ON)


def test_a_processor_that_was_lacking_is_looked_for_again_and_found_without_the_model(
    tiny_vlm_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspect, "cache_root", lambda: tmp_path)
    with monkeypatch.context() as lacking:
        lacking.setattr(inspect, "_processor_problem", lambda _: "PyTorch is not there")
        assert inspect.kept_footprint(str(tiny_vlm_folder)).media == ()
    assert inspect.kept_footprint(str(tiny_vlm_folder)).media == ("image", "video")
    assert len(list(tmp_path.rglob("*.json"))) == 1
    program = [sys.executable, "-I", "-m", "mlx_mesh.node.engine.inspect", str(tiny_vlm_folder)]
    told = subprocess.run(
        program, env={**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, capture_output=True, check=True
    )
    assert (
        b'"media":["image","video"]' in told.stdout
    )  # a process that has not loaded the family's module before


def test_the_plan_counts_towers_and_embedding_where_they_are_read(tiny_vlm_folder: Path) -> None:
    footprint = inspect.measure_folder(tiny_vlm_folder, "")
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    everything = sum(int(array.nbytes) for _, array in tree_flatten(lazy.whole.parameters()))
    assert 0 < footprint.tower_bytes < footprint.weights_bytes == everything
    memory = ModelMemory.of(footprint, 16, 1)
    last, first = memory.stage(3, 6).weights, memory.stage(0, 3).weights
    assert first == memory.layers_weights(0, 3) + footprint.embedding_bytes
    assert last - memory.layers_weights(3, 6) == (
        footprint.head_bytes + footprint.tower_bytes + footprint.embedding_bytes
    )
    tensor = footprint.tensor
    assert tensor.weights_bytes([1, 1], 0) - tensor.weights_bytes([1, 1], 1) >= footprint.tower_bytes


@pytest.mark.parametrize("error", [RuntimeError("[metal::malloc] too much"), ZeroDivisionError("by 0")])
def test_whatever_towers_raise_is_an_error_of_the_request(
    vlm: ModuleType, tiny_vlm_folder: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    pictures = Pictures(tiny_vlm_folder, lazy.whole)
    asked = Media(text=vlm.prompt("?"), images=(vlm.picture(1),))

    def fail(*_: Any, **__: Any) -> None:
        lazy.whole.language_model._rope_deltas = mx.array([[7]])
        raise error

    with monkeypatch.context() as broken:
        broken.setattr(type(lazy.whole), "get_input_embeddings", fail)
        with pytest.raises(PictureError, match=str(error.args[0]).replace("[", r"\[")):
            pictures.read(asked)
    assert lazy.whole.language_model._rope_deltas is None
    assert pictures.read(asked)[2].length


def test_a_processor_that_cannot_be_loaded_is_an_error_of_the_request(
    vlm: ModuleType, tiny_vlm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("mlx_vlm.utils.load_processor", fail)
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    with pytest.raises(PictureError, match="torchvision::nms"):
        Pictures(tiny_vlm_folder, lazy.whole).read(Media(text=vlm.prompt("?"), images=(vlm.picture(1),)))


def test_a_prompt_that_its_pictures_make_too_long_is_refused_before_the_towers_run(
    vlm: ModuleType, tiny_vlm_folder: Path
) -> None:
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    text = vlm.prompt("?")
    num_tokens = len(vlm.ids_of(text)) - 1 + 6
    asked = Media(text=text, images=(vlm.picture(1),))
    pictures = Pictures(tiny_vlm_folder, lazy.whole, context_length=num_tokens)
    with pytest.raises(PromptTooLong, match=f"has {num_tokens} tokens"):
        pictures.read(asked)
    assert pictures.towers.num_passes == 0
    assert len(Pictures(tiny_vlm_folder, lazy.whole, num_tokens + 1).read(asked)[0]) == num_tokens


def test_no_picture_is_scaled_to_more_pixels_than_fill_the_context(
    vlm: ModuleType, tiny_vlm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []
    original = utils.prepare_inputs

    def noting(*args: Any, **given: Any) -> Any:
        asked.append(given)
        return original(*args, **given)

    monkeypatch.setattr(utils, "prepare_inputs", noting)
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    pictures = Pictures(tiny_vlm_folder, lazy.whole, context_length=100)  # 8 by 8 pixels are a token
    media = Media(text=vlm.prompt("?"), images=(vlm.picture(1, 200, 200),))
    with pytest.raises(PromptTooLong, match=r"min_pixels is 50000000;.* less than 6400 pixels"):
        pictures.read(msgspec.structs.replace(media, min_pixels=50_000_000))
    assert not asked
    with pytest.raises(PromptTooLong, match="context of 100"):
        pictures.read(msgspec.structs.replace(media, max_pixels=50_000_000))
    pictures.read(msgspec.structs.replace(media, max_pixels=640))
    pictures.read(media)
    assert [given.get("max_pixels") for given in asked] == [6400, 640, None], "its own are few enough"
    small = Pictures(tiny_vlm_folder, lazy.whole, context_length=15)
    with pytest.raises(PromptTooLong, match="context of 15"):
        small.read(media)
    assert asked[-1]["max_pixels"] == 15 * 64


def test_pictures_that_can_never_fit_are_refused_before_one_is_decoded(
    vlm: ModuleType, tiny_vlm_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures_module, "opened", lambda *_: pytest.fail("a picture was decoded"))
    lazy = open_lazy(tiny_vlm_folder, with_vision=True)
    files = tuple(vlm.picture(seed, 100, 100) for seed in range(32))
    asked = Media(text=vlm.prompt("?", 32), images=files, max_pixels=6400)
    with pytest.raises(PromptTooLong, match=r"The 32 pictures have at least 1600 tokens; .* room for 1000"):
        Pictures(tiny_vlm_folder, lazy.whole, context_length=1000).read(asked)


@pytest.mark.parametrize(
    ("most", "edge", "size"), [(0, 1, (300, 100)), (3000, 1, (94, 31)), (300, 16, (30, 16))]
)
def test_a_picture_is_decoded_to_no_more_pixels_than_are_of_use(
    vlm: ModuleType, most: int, edge: int, size: tuple[int, int]
) -> None:
    assert opened(vlm.picture(1, 300, 100), most, edge).size == size
    assert most_opened(False, 0) == most_opened(False, 50_000_000) == TILED_PIXELS
    assert (most_opened(False, 600), most_opened(True, 600)) == (600, 2400)


def test_embeddings_that_no_token_stands_for_are_an_error_and_marks_too_many_are_left_out() -> None:
    assert spread([1, 9, 9, 2, 9, 9, 3], 5, MARKS) == [1, 9, 9, 2, 3]
    assert spread([1, 9, 9, 2, 9, 9, 3], 4, MARKS) == [1, 9, 2, 3]
    with pytest.raises(ValueError, match="4 tokens for 1 embeddings"):
        spread([1, 9, 9, 2], 1, MARKS)
