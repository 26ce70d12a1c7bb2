"""Videos over a real ring: every request gives what mlx-vlm gives for it alone, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from mlx_mesh.mesh.messages import GenerateRequest, Media, SamplingParams
from mlx_mesh.mesh.types import Sharding
from mlx_mesh.node.engine.videos import frames_of
from mlx_mesh.node.vision import VIDEO

pytestmark = [pytest.mark.two_rank, pytest.mark.long]

NUM_TOKENS = 12
SPLITS = {
    "none": (Sharding.NONE, [1]),
    "pipeline 2": (Sharding.PIPELINE, [3, 3]),
    "pipeline 3 uneven": (Sharding.PIPELINE, [1, 3, 2]),
    "tensor 2": (Sharding.TENSOR, [1, 1]),
}
KINDS = [(0, 0, 1), (1, 0, 2), (2, 0, 0), (3, 1, 0), (4, 0, 1)]
"""Seed, pictures, videos."""
MIXED = [(5, 1, 1), (6, 2, 1)]
"""Of which mlx-vlm's model would read the pictures alone."""


def request(
    vlm: ModuleType, name: str, seed: int, pictures: int, videos: int, **fields: Any
) -> GenerateRequest:
    text = vlm.prompt(f"what happens in number {seed}? " * (1 + seed % 3), pictures, videos)
    media = Media(
        text=text,
        images=tuple(vlm.picture(10 * seed + i) for i in range(pictures)),
        videos=tuple(vlm.video(10 * seed + i, 4 + 2 * i) for i in range(videos)),
    )
    return GenerateRequest(
        id=name,
        prompt_ids=tuple(vlm.ids_of(text)),
        max_tokens=fields.pop("max_tokens", NUM_TOKENS),
        sampling=SamplingParams(temperature=0.0),
        media=media if pictures or videos else None,
        **fields,
    )


@pytest.fixture(scope="module")
def expected(vlm: ModuleType, tiny_vlm_folder: Path) -> dict[tuple[int, int, int], list[int]]:
    """The greedy tokens of mlx-vlm's own generation, on one process."""
    import io

    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load, load_image, prepare_inputs

    model, processor = load(str(tiny_vlm_folder))
    found = {}
    for kind in KINDS:
        seed, pictures, videos = kind
        media = request(vlm, "x", *kind).media
        inputs = prepare_inputs(
            processor,
            images=[load_image(io.BytesIO(image)) for image in media.images] if media and pictures else None,
            videos=[frames_of(video)[0] for video in media.videos] if media and videos else None,
            prompts=vlm.prompt(f"what happens in number {seed}? " * (1 + seed % 3), pictures, videos),
            add_special_tokens=False,
        )
        ids, pixels, mask = (inputs.pop(k, None) for k in ("input_ids", "pixel_values", "attention_mask"))
        steps = generate_step(ids, model, pixels, mask, max_tokens=NUM_TOKENS, temperature=0.0, **inputs)
        found[kind] = [int(token) for token, _ in steps]
    return found


def check_prefixes(mesh: Any, vlm: ModuleType, first: list[int]) -> None:
    """A prompt that was answered before begins with what was kept of it; with another video of the same size,
    or with the same frames at other times, it begins anew."""
    again = request(vlm, "again", 0, 0, 1)
    first_media = again.media
    assert first_media is not None
    video = first_media.videos[0]

    def with_video(name: str, other: Any, **fields: Any) -> GenerateRequest:
        media = msgspec.structs.replace(first_media, videos=(other,))
        return msgspec.structs.replace(again, id=name, media=media, **fields)

    slow = msgspec.structs.replace(video, fps=0.5, times=(0.0, 2.0, 4.0, 6.0))
    asked = [
        again,
        with_video("other", vlm.video(77)),
        with_video("cold", vlm.video(77), skip_prefix_cache=True),
        with_video("slow", slow),
    ]
    for one in asked:
        mesh.submit(one)
        mesh.answer(one.id)
    assert mesh.answer("again").token_ids == first
    assert mesh.answer("again").cached_tokens > len(again.prompt_ids)  # its mark is eight tokens
    assert mesh.answer("other").token_ids == mesh.answer("cold").token_ids != first
    assert mesh.answer("other").cached_tokens == mesh.answer("slow").cached_tokens == 0


@pytest.mark.parametrize("name", SPLITS)
def test_videos_pictures_and_text_give_what_they_give_alone(
    name: str,
    bench: Any,
    vlm: ModuleType,
    tiny_vlm_folder: Path,
    expected: dict[tuple[int, int, int], list[int]],
) -> None:
    sharding, stages = SPLITS[name]
    with bench.mesh(len(stages)) as mesh:
        mesh.connect()
        placement = bench.split(sharding, vlm.NUM_LAYERS, stages)
        mesh.load(tiny_vlm_folder, placement, prefill_step_size=16, with_vision=True)

        alone = {kind: request(vlm, f"alone {kind}", *kind, skip_prefix_cache=True) for kind in MIXED}
        for one in alone.values():
            mesh.submit(one)
            mesh.answer(one.id)
        rows = {kind: request(vlm, f"row {kind}", *kind) for kind in (*KINDS, *MIXED)}
        mesh.submit(*rows.values())
        mesh.submit(request(vlm, "gone", 8, 0, 1, max_tokens=400))
        mesh.wait_for_tokens("gone", 3)
        mesh.cancel("gone")
        late = request(vlm, "late", 0, 0, 1, skip_prefix_cache=True)
        mesh.submit(late)

        answers = {kind: mesh.answer(row.id) for kind, row in rows.items()}
        assert {kind: answers[kind].token_ids for kind in KINDS} == expected
        for kind, one in alone.items():
            assert answers[kind].token_ids == mesh.answer(one.id).token_ids
        assert mesh.answer("late").token_ids == expected[0, 0, 1]
        assert mesh.answer("gone").finish_reason == "cancelled"
        for (_, pictures, videos), answer in answers.items():
            assert (answer.prompt_tokens > 0) == (pictures + videos > 0)
        check_prefixes(mesh, vlm, expected[0, 0, 1])
        assert mesh.stop() == [0] * len(stages)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_videos_of_every_family_compute_over_a_ring_what_mlx_vlm_computes(
    world_size: int, bench: Any, tmp_path: Path
) -> None:
    names = {f"{family}:{kind}" for family in VIDEO for kind in ("video", "both")}
    program = Path(__file__).parent / "picture_rank.py"
    rows = bench.run_ring(program, world_size, str(tmp_path), ",".join(sorted(names)), limit_s=800)
    assert {row["family"] for row in rows if row["plan"] == "pipeline"} == names
    # mlx-vlm's own chunks of qwen3_5_moe are 1.3e-5 from its own whole.
    bounds = {row["family"]: 3e-5 if "qwen3_5_moe" in row["family"] else 1e-5 for row in rows}
    assert not [row for row in rows if row["gap"] > bounds[row["family"]]], rows
