"""Audio over a real ring: every request gives what mlx-vlm gives for it alone, whatever runs beside it."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_mesh.mesh.messages import GenerateRequest, Media, SamplingParams
from mlx_mesh.mesh.types import Sharding
from mlx_mesh.node.engine.sounds import waveform

pytestmark = [pytest.mark.two_rank, pytest.mark.long]

NUM_TOKENS = 12
SPLITS = {
    "none": (Sharding.NONE, [1]),
    "pipeline 2": (Sharding.PIPELINE, [3, 5]),
    "pipeline 3 uneven": (Sharding.PIPELINE, [1, 2, 5]),
    "tensor 2": (Sharding.TENSOR, [1, 1]),
}
KINDS = [(0, 0, 1), (1, 1, 0), (2, 0, 0), (3, 1, 1), (4, 0, 2), (5, 0, 0), (6, 2, 1)]
"""Seed, pictures and sounds of each request."""


def request(
    alm: ModuleType, vlm: ModuleType, name: str, seed: int, num_pictures: int, num_sounds: int, **fields: Any
) -> GenerateRequest:
    text = alm.prompt(f"what is in number {seed}? " * (1 + seed), num_pictures, num_sounds)
    images = tuple(vlm.picture(10 * seed + i) for i in range(num_pictures))
    # The longest first: mlx-vlm itself mixes up sounds of a gemma4 whose first one is shorter.
    sounds = tuple(alm.sound(10 * seed + i, 0.8 - 0.3 * i) for i in range(num_sounds))
    return GenerateRequest(
        id=name,
        prompt_ids=tuple(alm.ids_of(text)),
        max_tokens=fields.pop("max_tokens", NUM_TOKENS),
        sampling=SamplingParams(temperature=0.0),
        media=Media(text=text, images=images, audios=sounds) if images or sounds else None,
        **fields,
    )


@pytest.fixture(scope="module", params=["in chunks", "pictures in one piece"])
def folder(request: Any, alm: ModuleType, tiny_alm_folder: Path, tmp_path_factory: Any) -> Path:
    if request.param == "in chunks":
        return tiny_alm_folder
    made: Path = alm.save(tmp_path_factory.mktemp("whole"), use_bidirectional_attention="vision")
    return made


@pytest.fixture(scope="module")
def expected(alm: ModuleType, vlm: ModuleType, folder: Path) -> dict[tuple[int, int, int], list[int]]:
    """The greedy tokens of mlx-vlm's own generation, on one process and each prompt in one piece."""
    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load, load_image, prepare_inputs

    model, processor = load(str(folder))
    found = {}
    for kind in KINDS:
        media = request(alm, vlm, "x", *kind).media
        images = [load_image(io.BytesIO(image)) for image in media.images] if media else []
        sounds = [waveform(sound, alm.RATE) for sound in media.audios] if media else []
        text = alm.prompt(f"what is in number {kind[0]}? " * (1 + kind[0]), *kind[1:])
        inputs = prepare_inputs(
            processor, images=images or None, audio=sounds or None, prompts=text, add_special_tokens=False
        )
        ids, pixels, mask = (inputs.pop(k, None) for k in ("input_ids", "pixel_values", "attention_mask"))
        steps = generate_step(
            ids,
            model,
            pixels,
            mask,
            max_tokens=NUM_TOKENS,
            temperature=0.0,
            prefill_step_size=None,
            **inputs,
        )
        found[kind] = [int(token) for token, _ in steps]
    return found


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SPLITS)
def test_sounds_pictures_and_text_give_what_they_give_alone(
    name: str, bench: Any, alm: ModuleType, vlm: ModuleType, folder: Path, expected: Any
) -> None:
    sharding, stages = SPLITS[name]
    with bench.mesh(len(stages)) as mesh:
        mesh.connect()
        placement = bench.split(sharding, alm.NUM_LAYERS, stages)
        mesh.load(folder, placement, prefill_step_size=16, with_vision=True)
        held = mesh.held()
        rows = {kind: request(alm, vlm, f"row {kind}", *kind) for kind in KINDS}
        mesh.submit(*rows.values())
        mesh.submit(request(alm, vlm, "gone", 8, 0, 1, max_tokens=400))
        mesh.wait_for_tokens("gone", 3)
        mesh.cancel("gone")
        late = request(alm, vlm, "late", 3, 1, 1, skip_prefix_cache=True)
        again = request(alm, vlm, "again", 0, 0, 1)
        mesh.submit(late, again)

        answers = {kind: mesh.answer(row.id) for kind, row in rows.items()}
        assert {kind: answer.token_ids for kind, answer in answers.items()} == expected
        assert mesh.answer("late").token_ids == expected[3, 1, 1]
        assert mesh.answer("again").token_ids == expected[0, 0, 1]
        assert mesh.answer("gone").finish_reason == "cancelled"
        for (_, num_pictures, num_sounds), answer in answers.items():
            assert (answer.prompt_tokens > 0) == (num_pictures + num_sounds > 0)
        if sharding is Sharding.PIPELINE:
            assert held[0] > max(held[1:]), "only the leader has the towers"
        assert mesh.stop() == [0] * len(stages)


FAMILIES = (
    "gemma4_unified:sounds",
    "inkling:sounds",
    "minicpmo:sounds",
    "nemotron_h_nano_omni:sounds",
    "qwen3_omni_moe:sounds",
    "gemma4#blocks:picture",
    "paligemma:picture",
)
"""With sounds, and such as read their prompts in one piece."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_families_that_hear_or_read_in_one_piece_compute_over_a_ring_what_mlx_vlm_computes(
    world_size: int, bench: Any, tmp_path: Path
) -> None:
    program = Path(__file__).parent / "picture_rank.py"
    rows = bench.run_ring(program, world_size, str(tmp_path), ",".join(FAMILIES), limit_s=800)
    assert {row["family"] for row in rows if row["plan"] == "pipeline"} == set(FAMILIES)
    assert {row["family"] for row in rows if row["plan"] == "tensor"}
    assert not [row for row in rows if row["gap"] > 1e-5], rows
