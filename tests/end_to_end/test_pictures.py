"""Requests with pictures through the official client, at world size 1 and 2: the same answers, also through
the death of a follower, and what cannot be answered is refused with the part that is to blame."""

from __future__ import annotations

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import openai
import pytest

pytestmark = [pytest.mark.two_rank, pytest.mark.timeout(400)]

COMMANDS = {
    "world size 1": ("serve",),
    "pipeline 2": ("up", "--sim", "2", "--sharding", "pipeline"),
    "tensor 2": ("up", "--sim", "2", "--sharding", "tensor"),
}
NUM_TOKENS = 16


def data_url(picture: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(picture).decode()


def content(*parts: str | bytes) -> list[dict[str, Any]]:
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]


def film_part(film: bytes) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(film).decode()
    return {"type": "video_url", "video_url": {"url": url}}


def ask(mesh: Any, *messages: tuple[str, Any], **fields: Any) -> Any:
    return mesh.client().chat.completions.create(
        model="local",
        messages=[{"role": role, "content": said} for role, said in messages],
        max_tokens=fields.pop("max_tokens", NUM_TOKENS),
        temperature=fields.pop("temperature", 0.0),
        **fields,
    )


def all_questions(vlm: ModuleType) -> dict[str, list[tuple[str, Any]]]:
    one, two = vlm.picture(1), vlm.picture(2)
    return {
        "one": [("user", content("what is this?", one))],
        "other picture": [("user", content("what is this?", two))],
        "two": [("user", content(one, "and", two, "differ how?"))],
        "two, turned": [("user", content(two, "and", one, "differ how?"))],
        "earlier turn": [
            ("user", content(one, "look")),
            ("assistant", "a picture"),
            ("user", "what colour has it?"),
        ],
        "film": [("user", [film_part(vlm.film(2)), *content("what happens?", one)])],
        "text": [("user", "no picture at all")],
    }


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


@pytest.fixture(scope="module")
def expected() -> dict[str, str]:
    """What the first world size said."""
    return {}


@pytest.mark.parametrize(
    "name", ["world size 1", pytest.param("pipeline 2", marks=pytest.mark.long), "tensor 2"]
)
def test_pictures_are_answered_alike_alone_together_and_at_every_world_size(
    name: str, start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path, expected: dict[str, str]
) -> None:
    questions = all_questions(vlm)
    with start_mesh(*COMMANDS[name], "--model", str(tiny_vlm_folder)) as mesh:
        alone = {which: ask(mesh, *turns) for which, turns in questions.items()}
        texts = {which: text_of(answer) for which, answer in alone.items()}
        if not expected:
            expected.update(texts)
        assert texts == expected
        assert len({texts["one"], texts["other picture"], texts["text"]}) == 3
        assert texts["film"] != texts["one"]
        assert texts["two"] != texts["two, turned"]
        assert alone["two"].usage.prompt_tokens == alone["one"].usage.prompt_tokens + 6 + len(
            "anddiffer how?"
        ) + 2 - len("what is this?")
        with ThreadPoolExecutor(len(questions)) as pool:
            together = dict(
                zip(questions, pool.map(lambda turns: ask(mesh, *turns), questions.values()), strict=True)
            )
        assert {which: text_of(answer) for which, answer in together.items()} == expected
        assert together["one"].usage.prompt_tokens_details.cached_tokens > 0
        check_refusals(mesh, vlm)
        capabilities = httpx.get(f"{mesh.url}/v1/capabilities", timeout=10).json()
        assert capabilities["media"]["image"]["available"]
        assert mesh.stop() == 0


def check_refusals(mesh: Any, vlm: ModuleType) -> None:
    broken = vlm.picture(1)[:40]
    with pytest.raises(openai.BadRequestError) as caught:
        ask(mesh, ("user", content("what?", vlm.picture(1), broken)))
    assert caught.value.param == "messages[0].content[2].image_url"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(mesh, ("user", [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}]))
    assert caught.value.code == "unsupported_media"


def test_a_follower_that_dies_while_a_picture_is_read_costs_no_request(
    start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path, expected: dict[str, str]
) -> None:
    long = "look at it well " * 100
    with start_mesh(*COMMANDS["pipeline 2"], "--model", str(tiny_vlm_folder)) as mesh:
        calm = text_of(ask(mesh, ("user", content(vlm.picture(3), long)), max_tokens=60))
        assert httpx.post(f"{mesh.url}/v1/cache/reset", timeout=10).status_code == 202
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(ask, mesh, ("user", content(vlm.picture(3), long)), max_tokens=60)
            second = pool.submit(ask, mesh, ("user", content(vlm.picture(4), long)), max_tokens=60)
            mesh.wait_until_asked()
            nodes = httpx.get(f"{mesh.url}/v1/cluster/nodes", timeout=10).json()
            os.kill(nodes["ranks"][1]["engine_pid"], signal.SIGKILL)
            assert text_of(first.result(200)) == calm
            assert text_of(second.result(200)) != calm
        status = httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()
        assert status["epoch"] == 2
        assert mesh.stop() == 0


def test_without_its_tower_such_a_model_takes_text_only(
    start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path
) -> None:
    with start_mesh("serve", "--no-vision", "--model", str(tiny_vlm_folder)) as mesh:
        assert text_of(ask(mesh, ("user", "no picture at all")))
        with pytest.raises(openai.BadRequestError) as caught:
            ask(mesh, ("user", content("what?", vlm.picture(1))))
        assert caught.value.code == "unsupported_media"
        assert "started with --no-vision" in mesh.output.read_text()
