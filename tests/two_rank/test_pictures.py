"""Pictures over a real ring: every request gives what mlx-vlm gives for it alone, whatever runs beside it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
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


def check_prefixes(mesh: Any, vlm: ModuleType, first: list[int]) -> None:
    """A prompt that was answered before begins with what was kept of it; another picture of the same size in
    its place begins anew, and each gives what it gives without any cache."""
    again = request(vlm, "again", 0, 1)
    assert again.media is not None
    other = msgspec.structs.replace(
        again, id="other", media=msgspec.structs.replace(again.media, images=(vlm.picture(77),))
    )
    cold = msgspec.structs.replace(other, id="cold", skip_prefix_cache=True)
    mesh.submit(again)
    assert mesh.answer("again").token_ids == first
    assert mesh.answer("again").cached_tokens > len(again.prompt_ids)  # its mark is six tokens
    mesh.submit(other)
    mesh.submit(cold)
    assert mesh.answer("other").token_ids == mesh.answer("cold").token_ids != first
    assert mesh.answer("other").cached_tokens == 0


@pytest.mark.parametrize(
    "name", ["none", pytest.param("pipeline 2", marks=pytest.mark.long), "pipeline 3 uneven", "tensor 2"]
)
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
        check_prefixes(mesh, vlm, expected[0, 1])
        if sharding is Sharding.PIPELINE:
            assert held[0] > max(held[1:]), "only the leader has the towers"
        assert mesh.stop() == [0] * len(stages)


FAMILIES = (
    "aya_vision",
    "gemma3",
    "gemma4",
    "glm4v",
    "idefics3",
    "internvl",
    "kimi_vl",
    "lfm2_vl",
    "llava",
    "llava_next",
    "mistral3",
    "pixtral",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world_size", [2, 3])
def test_fifteen_families_compute_over_a_ring_what_mlx_vlm_computes(
    world_size: int, bench: Any, tmp_path: Path
) -> None:
    program = Path(__file__).parent / "picture_rank.py"
    rows = bench.run_ring(program, world_size, str(tmp_path), ",".join(FAMILIES), limit_s=600)
    assert {row["family"] for row in rows if row["plan"] == "pipeline"} == set(FAMILIES)
    assert not [row for row in rows if row["gap"] > 1e-5], rows
