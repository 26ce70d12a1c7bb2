"""Pictures over a real ring: every request gives what mlx-vlm gives for it alone, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_mesh.mesh.messages import GenerateRequest, Media, SamplingParams
from mlx_mesh.mesh.types import Sharding

pytestmark = pytest.mark.two_rank

NUM_TOKENS = 12
SPLITS = {
    "none": (Sharding.NONE, [1]),
    "pipeline 2": (Sharding.PIPELINE, [3, 3]),
    "pipeline 3 uneven": (Sharding.PIPELINE, [1, 3, 2]),
    "tensor 2": (Sharding.TENSOR, [1, 1]),
}


def request(vlm: ModuleType, name: str, seed: int, num_pictures: int, **fields: Any) -> GenerateRequest:
    """`num_pictures` 0: text alone."""
    text = vlm.prompt(f"what is in number {seed}? " * (1 + seed), num_pictures)
    images = tuple(vlm.picture(10 * seed + i) for i in range(num_pictures))
    return GenerateRequest(
        id=name,
        prompt_ids=tuple(vlm.ids_of(text)),
        max_tokens=fields.pop("max_tokens", NUM_TOKENS),
        sampling=SamplingParams(temperature=0.0),
        media=Media(text=text, images=images) if images else None,
        **fields,
    )


@pytest.fixture(scope="module")
def expected(vlm: ModuleType, tiny_vlm_folder: Path) -> dict[tuple[int, int], list[int]]:
    """(seed, pictures) -> the greedy tokens of mlx-vlm's own generation, on one process."""
    import io

    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load, load_image, prepare_inputs

    model, processor = load(str(tiny_vlm_folder))
    found = {}
    for seed, num_pictures in KINDS:
        asked = request(vlm, "x", seed, num_pictures)
        images = [load_image(io.BytesIO(image)) for image in asked.media.images] if asked.media else None
        text = vlm.prompt(f"what is in number {seed}? " * (1 + seed), num_pictures)
        inputs = prepare_inputs(processor, images=images, prompts=text, add_special_tokens=False)
        ids, pixels, mask = (inputs.pop(k, None) for k in ("input_ids", "pixel_values", "attention_mask"))
        steps = generate_step(ids, model, pixels, mask, max_tokens=NUM_TOKENS, temperature=0.0, **inputs)
        found[seed, num_pictures] = [int(token) for token, _ in steps]
    return found


KINDS = [(0, 1), (1, 2), (2, 0), (3, 1), (4, 0), (5, 1), (6, 0), (7, 3)]


@pytest.mark.parametrize("name", SPLITS)
def test_pictures_and_text_give_what_they_give_alone(
    name: str, bench: Any, vlm: ModuleType, tiny_vlm_folder: Path, expected: dict[tuple[int, int], list[int]]
) -> None:
    sharding, stages = SPLITS[name]
    with bench.mesh(len(stages)) as mesh:
        mesh.connect()
        placement = bench.split(sharding, vlm.NUM_LAYERS, stages)
        mesh.load(tiny_vlm_folder, placement, prefill_step_size=16, with_vision=True)
        held = mesh.held()

        rows = {kind: request(vlm, f"row {kind}", *kind) for kind in KINDS}
        mesh.submit(*rows.values())
        mesh.submit(request(vlm, "gone", 8, 1, max_tokens=400))
        mesh.wait_for_tokens("gone", 3)
        mesh.cancel("gone")
        late = request(vlm, "late", 0, 1, skip_prefix_cache=True)
        mesh.submit(late)

        answers = {kind: mesh.answer(row.id) for kind, row in rows.items()}
        assert {kind: answer.token_ids for kind, answer in answers.items()} == expected
        assert mesh.answer("late").token_ids == expected[0, 1]
        assert mesh.answer("gone").finish_reason == "cancelled"
        for (_, num_pictures), answer in answers.items():
            assert (answer.prompt_tokens > 0) == (num_pictures > 0)
        if sharding is Sharding.PIPELINE:
            assert held[0] > max(held[1:]), "only the leader has the towers"
        assert mesh.stop() == [0] * len(stages)
