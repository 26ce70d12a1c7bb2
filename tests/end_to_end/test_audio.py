"""Requests with audio through the official client, at world size 1 and 2: the same answers."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.two_rank, pytest.mark.long, pytest.mark.timeout(400)]

COMMANDS = {
    "world size 1": ("serve",),
    "pipeline 2": ("up", "--sim", "2", "--sharding", "pipeline"),
}
NUM_TOKENS = 16
QUESTION = "what is it?"


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def heard(sound: bytes) -> dict[str, Any]:
    return {
        "type": "input_audio",
        "input_audio": {"data": base64.b64encode(sound).decode(), "format": "wav"},
    }


def seen(picture: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    return {"type": "image_url", "image_url": {"url": url}}


def all_questions(alm: ModuleType, vlm: ModuleType) -> dict[str, list[dict[str, Any]]]:
    one, other, picture = alm.sound(1, 0.4), alm.sound(2, 0.9), vlm.picture(3)
    return {
        "one": [heard(one), text(QUESTION)],
        "other": [heard(other), text(QUESTION)],
        "other rate": [heard(alm.sound(1, 0.4, rate=8000)), text(QUESTION)],
        "two": [heard(one), heard(other), text(QUESTION)],
        "two, turned": [heard(other), heard(one), text(QUESTION)],
        "with a picture": [seen(picture), heard(one), text(QUESTION)],
        "picture": [seen(picture), text(QUESTION)],
        "text": [text(QUESTION)],
    }


def ask(mesh: Any, parts: list[dict[str, Any]]) -> Any:
    return mesh.client().chat.completions.create(
        model="local",
        messages=[{"role": "user", "content": parts}],
        max_tokens=NUM_TOKENS,
        temperature=0.0,
    )


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What the first world size said."""
    return {}


def by_mlx_vlm(alm: ModuleType, folder: Path, sound: bytes) -> list[int]:
    """Greedy tokens of the question about one sound, on one process."""
    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load, prepare_inputs

    from mlx_mesh.node.engine.sounds import waveform

    model, processor = load(str(folder))
    prompt = alm.prompt(QUESTION, 0, 1)
    inputs = prepare_inputs(
        processor, audio=[waveform(sound, alm.RATE)], prompts=prompt, add_special_tokens=False
    )
    ids, mask = inputs.pop("input_ids"), inputs.pop("attention_mask")
    steps = generate_step(ids, model, None, mask, max_tokens=NUM_TOKENS, temperature=0.0, **inputs)
    return [int(token) for token, _ in steps]


@pytest.mark.parametrize("name", COMMANDS)
def test_sounds_are_answered_alike_alone_together_and_at_every_world_size(
    name: str,
    start_mesh: Any,
    alm: ModuleType,
    vlm: ModuleType,
    tiny_alm_folder: Path,
    expected: dict[str, str],
) -> None:
    questions = all_questions(alm, vlm)
    with start_mesh(*COMMANDS[name], "--model", str(tiny_alm_folder)) as mesh:
        alone = {which: ask(mesh, parts) for which, parts in questions.items()}
        texts = {which: text_of(answer) for which, answer in alone.items()}
        if not expected:
            expected.update(texts)
            tokens = by_mlx_vlm(alm, tiny_alm_folder, alm.sound(1, 0.4))
            assert texts["one"] == alm._tokenizer().decode(tokens)
        assert texts == expected
        assert len({texts[which] for which in ("one", "other", "two", "two, turned", "text")}) == 5
        counts = {which: answer.usage.prompt_tokens for which, answer in alone.items()}
        assert counts["one"] == counts["text"] + 10 + 2  # a token for 40 ms, and one on each side
        assert counts["two"] == counts["text"] + 10 + 23 + 4
        with ThreadPoolExecutor(len(questions)) as pool:
            together = dict(
                zip(questions, pool.map(lambda parts: ask(mesh, parts), questions.values()), strict=True)
            )
        assert {which: text_of(answer) for which, answer in together.items()} == expected
        assert together["two"].usage.prompt_tokens_details.cached_tokens > 0
        check_refusals(mesh, alm)
        capabilities = httpx.get(f"{mesh.url}/v1/capabilities", timeout=10).json()
        assert capabilities["features"]["audio"] and capabilities["features"]["images"]
        assert mesh.stop() == 0


def check_refusals(mesh: Any, alm: ModuleType) -> None:
    """The front end knows broken files; only the engine knows what is too long for the processor."""
    for sound, words in ((alm.sound(1)[:60], ""), (alm.sound(1, 4.5), "4.0 s at most")):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(mesh, [heard(alm.sound(1)), text("and"), heard(sound)])
        assert caught.value.param == "messages[0].content[2].input_audio"
        assert words in str(caught.value)
    assert httpx.get(f"{mesh.url}/ready", timeout=10).status_code == 200
