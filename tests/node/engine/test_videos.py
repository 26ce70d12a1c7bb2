"""Videos of a prompt become what mlx-vlm makes of the same frames; pictures beside them are read as well."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest

from mlx_mesh.mesh.messages import Media, Video
from mlx_mesh.node.engine.loader import open_lazy
from mlx_mesh.node.engine.media_keys import PICTURE_KEY, Items, keys_of, runs_of
from mlx_mesh.node.engine.pictures import PictureError, Pictures, PromptTooLong, VideoError
from mlx_mesh.node.engine.videos import Sampled, frames_of, joined

PICTURE, VIDEO = frozenset({8}), frozenset({9})


@pytest.fixture(scope="module")
def whole(tiny_vlm_folder: Path) -> Any:
    return open_lazy(tiny_vlm_folder, with_vision=True).whole


def tokens_with(keys: tuple[int, ...]) -> list[int]:
    return [key for key in keys if key >= PICTURE_KEY]


def test_a_video_becomes_what_mlx_vlm_makes_of_its_frames(
    vlm: ModuleType, tiny_vlm_folder: Path, whole: Any
) -> None:
    from mlx_vlm.utils import load_processor, prepare_inputs

    text = vlm.prompt("what happens?", 0, 2)
    videos = (vlm.video(1), vlm.video(2, num_frames=5, fps=1.0, width=24, height=8))
    ids, keys, features = Pictures(tiny_vlm_folder, whole).read(Media(text=text, videos=videos))
    inputs = prepare_inputs(
        load_processor(tiny_vlm_folder, add_detokenizer=False),
        prompts=text,
        videos=[frames_of(video)[0] for video in videos],
    )
    assert inputs["video_grid_thw"].tolist() == [[2, 4, 4], [3, 2, 6]]
    expected = whole.get_input_embeddings(
        inputs["input_ids"],
        pixel_values_videos=inputs["pixel_values_videos"],
        video_grid_thw=inputs["video_grid_thw"],
    )
    assert list(ids) == inputs["input_ids"].tolist()[0]
    assert mx.array_equal(features.fields["inputs_embeds"], expected.inputs_embeds)
    assert mx.array_equal(features.fields["position_ids"], expected.position_ids)
    assert len(set(tokens_with(keys))) == 2 * 4 + 3 * 3


def embeddings_apart(whole: Any, ids: list[int], inputs: dict[str, Any]) -> tuple[Any, Any]:
    """Embeddings and positions of a prompt with pictures and videos: each kind by a pass of its own."""
    config, part = whole.config, whole.language_model
    embeds = np.array(part.model.embed_tokens(mx.array([ids])))
    for mark, pixels, grid in (
        (config.image_token_id, inputs["pixel_values"], inputs["image_grid_thw"]),
        (config.video_token_id, inputs["pixel_values_videos"], inputs["video_grid_thw"]),
    ):
        embeds[0, np.array(ids) == mark] = np.array(whole.vision_tower(pixels, grid))
    positions, _ = part.get_rope_index(mx.array([ids]), inputs["image_grid_thw"], inputs["video_grid_thw"])
    return embeds, positions


def test_pictures_and_videos_of_one_prompt_are_all_read(
    vlm: ModuleType, tiny_vlm_folder: Path, whole: Any
) -> None:
    one, other = vlm.prompt("a?", 1, 1), vlm.prompt("b?", 2, 1)
    media = Media(
        text=one + other,
        images=(vlm.picture(1), vlm.picture(2), vlm.picture(3, 32, 16)),
        videos=(vlm.video(1), vlm.video(2, 6, width=8)),
    )
    pictures = Pictures(tiny_vlm_folder, whole)
    ids, keys, features = pictures.read(media)
    inputs = pictures._process(media)
    embeds, positions = embeddings_apart(whole, list(ids), inputs)
    assert float(mx.abs(features.fields["inputs_embeds"] - mx.array(embeds)).max().item()) < 1e-5
    assert mx.array_equal(features.fields["position_ids"], positions)
    assert len(set(tokens_with(keys))) == len(tokens_with(keys)) == 6 + 8 + 6 + 8 + 6


def test_processors_are_told_when_frames_are(vlm: ModuleType, tiny_vlm_folder: Path, whole: Any) -> None:
    from mlx_vlm.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    pictures = Pictures(tiny_vlm_folder, whole)
    plain = pictures._load_processor()
    pictures._processor = Qwen3VLProcessor(plain.image_processor, plain.tokenizer, plain.video_processor)
    video = msgspec.structs.replace(vlm.video(1), times=(0.0, 1.0, 5.0, 8.0))
    inputs = pictures._process(Media(text=vlm.prompt("?", 0, 1), videos=(video,)))
    said = plain.tokenizer.decode(inputs["input_ids"].tolist()[0])
    block = "<|vision_start|>" + "<|video_pad|>" * 4 + "<|vision_end|>"
    assert f"<0.5 seconds>{block}<6.5 seconds>{block}?" in said
    ids = inputs["input_ids"].tolist()[0]
    items = pictures._videos(ids, Media(text="", videos=(video,)), inputs)
    assert len(set(items.contents)) == len(runs_of(ids, items.marks)) == 2


def test_a_video_is_known_by_its_frames_and_by_when_they_are(
    vlm: ModuleType, tiny_vlm_folder: Path, whole: Any
) -> None:
    pictures = Pictures(tiny_vlm_folder, whole)

    def keys(video: Video) -> list[int]:
        return tokens_with(pictures.read(Media(text=vlm.prompt("?", 0, 1), videos=(video,)))[1])

    first = keys(vlm.video(1))
    assert len(set(first)) == 8
    assert keys(vlm.video(1)) == first
    assert not set(keys(vlm.video(2))) & set(first)
    assert not set(keys(vlm.video(1, fps=4.0))) & set(first)
    cut = msgspec.structs.replace(vlm.video(1), times=(0.0, 0.5, 1.0, 7.0))
    assert not set(keys(cut)) & set(first)
    frames = vlm.video(1).frames
    turned = msgspec.structs.replace(vlm.video(1), frames=tuple(reversed(frames)))
    assert not set(keys(turned)) & set(first)


def test_a_second_question_about_a_video_costs_no_pass(
    vlm: ModuleType, tiny_vlm_folder: Path, whole: Any
) -> None:
    pictures = Pictures(tiny_vlm_folder, open_lazy(tiny_vlm_folder, with_vision=True).whole)
    for question, video, passes in (("a?", 1, 1), ("and b?", 1, 1), ("a?", 2, 2), ("c?", 1, 2)):
        pictures.read(Media(text=vlm.prompt(question, 0, 1), videos=(vlm.video(video),)))
        assert pictures.towers.num_passes == passes


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"frames": ()}, "it has 0 frames, 4 times"),
        ({"times": (0.0,)}, "it has 4 frames, 1 times"),
        ({"fps": 0.0}, "0 frames per second"),
        ({"frames": (b"no picture",) * 4}, "cannot identify image file"),
    ],
)
def test_what_is_no_video_is_an_error_that_names_it(
    vlm: ModuleType, tiny_vlm_folder: Path, whole: Any, change: dict[str, Any], words: str
) -> None:
    bad = msgspec.structs.replace(vlm.video(1), **change)
    media = Media(text=vlm.prompt("?", 0, 2), videos=(vlm.video(2), bad))
    with pytest.raises(PictureError, match=words) as caught:
        Pictures(tiny_vlm_folder, whole).read(media)
    assert (caught.value.code, caught.value.param) == ("invalid_video", "videos[1]")


def test_frames_of_several_sizes_are_no_video(vlm: ModuleType) -> None:
    mixed = msgspec.structs.replace(
        vlm.video(1, 2), frames=(*vlm.video(1, 1).frames, *vlm.video(1, 1, width=24).frames)
    )
    with pytest.raises(ValueError, match="frames have 2 sizes"):
        frames_of(mixed)


def test_a_video_that_the_model_cannot_use_is_an_error_of_the_request(
    vlm: ModuleType, tiny_vlm_folder: Path, whole: Any
) -> None:
    flat = vlm.video(1, width=40, height=4)  # less than a patch of four
    with pytest.raises(PictureError, match=r"processor cannot read the videos: .*factor") as caught:
        Pictures(tiny_vlm_folder, whole).read(Media(text=vlm.prompt("?", 0, 1), videos=(flat,)))
    assert (caught.value.code, caught.value.param) == ("invalid_video", "videos[0]")


def test_a_video_is_never_scaled_to_more_than_fills_the_context_and_refused_before_the_towers_run(
    vlm: ModuleType, tiny_vlm_folder: Path
) -> None:
    media = Media(text=vlm.prompt("?", 0, 1), videos=(vlm.video(1, 4, width=64, height=64),))

    def opened(context: int) -> Pictures:
        pictures = Pictures(tiny_vlm_folder, open_lazy(tiny_vlm_folder, with_vision=True).whole, context)
        pictures._load_processor().video_processor.max_pixels = 10**9
        pictures._bound_videos()
        return pictures

    assert len(opened(400).read(media)[0]) > 2 * 8 * 8
    small = opened(40)
    with pytest.raises(PromptTooLong, match=r"has \d\d tokens with its videos; the context of 40"):
        small.read(media)
    assert small.towers.num_passes == 0


def test_a_frame_has_no_more_pixels_than_the_request_wants(vlm: ModuleType) -> None:
    video = vlm.video(1, 2, width=40, height=20)
    assert frames_of(video)[0].shape == (2, 3, 20, 40)
    assert frames_of(video, 800)[0].shape == (2, 3, 20, 40)
    frames, sampled = frames_of(video, 200)
    assert frames.shape == (2, 3, 10, 20)
    assert sampled == Sampled((0.0, 0.5), 2.0, 20, 10)
    assert (sampled.duration, sampled.total_num_frames) == (1.0, 2)


def grids(pictures: list[list[int]], videos: list[list[int]]) -> dict[str, Any]:
    """Inputs whose patches are numbered: a picture's from 0, a video's from 1000."""
    counts = [sum(t * h * w for t, h, w in kind) for kind in (pictures, videos)]
    return {
        "pixel_values": mx.arange(counts[0])[:, None],
        "pixel_values_videos": 1000 + mx.arange(counts[1])[:, None],
        "image_grid_thw": mx.array(pictures),
        "video_grid_thw": mx.array(videos),
        "other": 1,
    }


def test_a_video_whose_frames_have_marks_of_their_own_is_as_many_pictures() -> None:
    ids = [1, 9, 2, 8, 8, 3, 9, 4]
    given, inputs = joined(ids, grids([[1, 2, 4]], [[2, 2, 2]]), PICTURE, VIDEO, merge=2)
    assert given == [1, 8, 2, 8, 8, 3, 8, 4]
    assert inputs.keys() == {"pixel_values", "image_grid_thw", "other"}
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 4], [1, 2, 2]]
    assert inputs["pixel_values"][:, 0].tolist() == [*range(1000, 1004), *range(8), *range(1004, 1008)]


def test_items_that_stand_side_by_side_are_told_apart_by_their_grids() -> None:
    ids = [8, 8, 9, 9, 9, 8]
    given, inputs = joined(ids, grids([[1, 2, 2]] * 3, [[3, 2, 2]]), PICTURE, VIDEO, merge=2)
    assert given == [8] * 6
    assert inputs["image_grid_thw"].tolist() == [[1, 2, 2], [1, 2, 2], [3, 2, 2], [1, 2, 2]]
    assert inputs["pixel_values"][:, 0].tolist() == [*range(8), *range(1000, 1012), *range(8, 12)]


@pytest.mark.parametrize(("ids", "words"), [([8, 9, 9], "more marks"), ([8, 1], "fewer marks")])
def test_marks_and_grids_of_two_prompts_are_an_error(ids: list[int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        joined(ids, grids([[1, 2, 2]], [[1, 2, 2]]), PICTURE, VIDEO, merge=2)


def test_kinds_that_share_a_mark_are_known_by_their_embeddings() -> None:
    from mlx_mesh.node.engine.features import Features

    features = Features(3, {"inputs_embeds": mx.array([[[1.0], [1.0], [1.0]]])})
    same = [Items(VIDEO, (b"a",)), Items(VIDEO, (b"b",))]
    keys = keys_of([9, 1, 9], same, features)
    assert keys[0] == keys[2] >= PICTURE_KEY and keys[1] == 1
    apart = keys_of([9, 1, 8], [Items(VIDEO, (b"a",)), Items(PICTURE, (b"b",))], features)
    assert len({*apart, 1}) == 3
    assert [list(run) for run in runs_of([9, 9, 1, 9], VIDEO)] == [[0, 1], [3]]


def test_a_video_whose_frames_were_made_smaller_is_another_one(
    vlm: ModuleType, tiny_vlm_folder: Path, whole: Any
) -> None:
    """Also where it has as many tokens."""
    pictures = Pictures(tiny_vlm_folder, whole)
    text, videos = vlm.prompt("?", 0, 1), (vlm.video(1),)
    found = [pictures.read(Media(text=text, videos=videos, max_pixels=most)) for most in (0, 200)]
    assert found[0][0] == found[1][0]
    assert not mx.array_equal(*(features.fields["inputs_embeds"] for _, _, features in found))
    assert not set(tokens_with(found[0][1])) & set(tokens_with(found[1][1]))


def test_a_video_of_which_the_processor_would_leave_frames_out_is_an_error_that_names_it(
    vlm: ModuleType, tiny_alm_folder: Path
) -> None:
    pictures = Pictures(tiny_alm_folder, open_lazy(tiny_alm_folder, with_vision=True).whole)
    videos = (vlm.video(1), vlm.video(2, num_frames=33))
    with pytest.raises(VideoError, match=r"33 frames; .* takes 32 of a video") as caught:
        pictures.read(Media(text="<|video|> and <|video|>", videos=videos))
    assert (caught.value.param, pictures.towers.num_passes) == ("videos[1]", 0)
