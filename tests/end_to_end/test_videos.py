"""Requests with a real film through the official client: what mlx-vlm answers to the same file, at world size
1 and 2, also through the death of a follower."""

from __future__ import annotations

import base64
import importlib.util
import os
import signal
import sys
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
    "tensor 2": ("up", "--sim", "2", "--sharding", "tensor"),
}
NUM_TOKENS = 16
QUESTION = "what happens?"


def content(*parts: str | tuple[str, bytes]) -> list[dict[str, Any]]:
    """Texts, and files with their media type."""
    made: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, str):
            made.append({"type": "text", "text": part})
            continue
        media_type, file = part
        kind = f"{media_type.partition('/')[0]}_url"
        url = f"data:{media_type};base64,{base64.b64encode(file).decode()}"
        made.append({"type": kind, kind: {"url": url}})
    return made


def ask(mesh: Any, *parts: Any, max_tokens: int = NUM_TOKENS) -> Any:
    return mesh.client().chat.completions.create(
        model="local",
        messages=[{"role": "user", "content": content(*parts)}],
        max_tokens=max_tokens,
        temperature=0.0,
    )


def text_of(answer: Any) -> str:
    return str(answer.choices[0].message.content)


@pytest.fixture(scope="module")
def films(vlm: ModuleType) -> list[tuple[str, bytes]]:
    return [("video/mp4", vlm.film(seed)) for seed in (1, 2)]


@pytest.fixture(scope="module")
def own_words(
    vlm: ModuleType,
    tiny_vlm_folder: Path,
    films: list[tuple[str, bytes]],
    tmp_path_factory: pytest.TempPathFactory,
) -> list[str]:
    """What mlx-vlm itself says, which reads and samples the files by itself."""
    from mlx_vlm.generate import generate_step
    from mlx_vlm.utils import load, prepare_inputs

    model, processor = load(str(tiny_vlm_folder))
    said = []
    for number, (_, film) in enumerate(films):
        path = tmp_path_factory.mktemp("films") / f"{number}.mp4"
        path.write_bytes(film)
        inputs = prepare_inputs(
            processor,
            videos=[str(path)],
            prompts=vlm.prompt(QUESTION, 0, 1),
            add_special_tokens=False,
        )
        ids, pixels, mask = (inputs.pop(k, None) for k in ("input_ids", "pixel_values", "attention_mask"))
        steps = generate_step(ids, model, pixels, mask, max_tokens=NUM_TOKENS, temperature=0.0, **inputs)
        tokens = [int(token) for token, _ in steps]
        said.append(processor.tokenizer.decode(tokens, skip_special_tokens=True))
    return said


@pytest.mark.parametrize("name", COMMANDS)
def test_a_film_is_answered_as_mlx_vlm_answers_it(
    name: str,
    start_mesh: Any,
    vlm: ModuleType,
    tiny_vlm_folder: Path,
    films: list[tuple[str, bytes]],
    own_words: list[str],
) -> None:
    picture = ("image/png", vlm.picture(1))
    with start_mesh(*COMMANDS[name], "--model", str(tiny_vlm_folder)) as mesh:
        capabilities = httpx.get(f"{mesh.url}/v1/capabilities", timeout=10).json()
        assert capabilities["media"]["video"]["available"], capabilities["media"]
        answers = [ask(mesh, film, QUESTION) for film in films]
        assert [text_of(answer) for answer in answers] == own_words
        assert own_words[0] != own_words[1]
        marks = "<|vision_start|><|video_pad|><|vision_end|>"
        num_text = len(vlm.ids_of(vlm.prompt(QUESTION, 0, 1).replace(marks, "")))
        assert answers[0].usage.prompt_tokens == num_text + 2 + 2 * 4  # each pair of frames is four tokens
        mixed = [
            (films[1], "and", picture, QUESTION),
            (picture, "and", films[1], QUESTION),
            (films[0], films[1], QUESTION),
        ]
        alone = [text_of(ask(mesh, *parts)) for parts in mixed]
        assert len(set(alone)) > 1
        with ThreadPoolExecutor(5) as pool:
            together = list(
                pool.map(lambda parts: ask(mesh, *parts), [*mixed, *((f, QUESTION) for f in films)])
            )
        assert [text_of(answer) for answer in together] == [*alone, *own_words]
        assert together[3].usage.prompt_tokens_details.cached_tokens > num_text
        with pytest.raises(openai.BadRequestError) as caught:
            ask(mesh, films[0], ("video/mp4", films[1][1][: len(films[1][1]) // 2]))
        assert caught.value.param == "messages[0].content[1].video_url"
        assert mesh.stop() == 0


def test_a_follower_that_dies_while_a_film_is_read_costs_no_request(
    start_mesh: Any, vlm: ModuleType, tiny_vlm_folder: Path, films: list[tuple[str, bytes]]
) -> None:
    long = "look at it well " * 100
    with start_mesh(*COMMANDS["pipeline 2"], "--model", str(tiny_vlm_folder)) as mesh:
        calm = [text_of(ask(mesh, film, long, max_tokens=60)) for film in films]
        assert httpx.post(f"{mesh.url}/v1/cache/reset", timeout=10).status_code == 202
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, mesh, film, long, max_tokens=60) for film in films]
            mesh.wait_until_asked()
            nodes = httpx.get(f"{mesh.url}/v1/cluster/nodes", timeout=10).json()
            os.kill(nodes["ranks"][1]["engine_pid"], signal.SIGKILL)
            assert [text_of(one.result(200)) for one in asked] == calm
        status = httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()
        assert status["epoch"] == 2
        assert mesh.stop() == 0


def load_helper(name: str) -> ModuleType:
    """A module of the engine's tests."""
    path = Path(__file__).parent.parent / "node" / "engine" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_a_model_that_takes_pictures_alone_answers_as_to_the_frames(
    start_mesh: Any, vlm: ModuleType, films: list[tuple[str, bytes]], tmp_path: Path
) -> None:
    folder = load_helper("vlm_folders").save("llava", tmp_path, load_helper("tiny_vlm"))
    film = vlm.film(1, 4, 2)  # two frames a second: all of them are shown
    frames = [("image/png", vlm.picture(100 + i, 16, 16)) for i in range(4)]
    with start_mesh("serve", "--model", str(folder)) as mesh:
        capabilities = httpx.get(f"{mesh.url}/v1/capabilities", timeout=10).json()
        assert capabilities["features"]["video"]
        answer, same = ask(mesh, ("video/mp4", film), QUESTION), ask(mesh, *frames, QUESTION)
        assert text_of(answer) == text_of(same)
        assert answer.usage.prompt_tokens == same.usage.prompt_tokens > 4 * 16
        assert text_of(ask(mesh, films[1], QUESTION))
        assert mesh.stop() == 0
