"""Requests with audio and video through the official client, at world size 1 and 2: the same answers, and
each depends on what was sent."""

from __future__ import annotations

import base64
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.two_rank, pytest.mark.long, pytest.mark.timeout(400)]

COMMANDS = {
    "world size 1": ("serve",),
    "pipeline 2": ("up", "--sim", "2", "--sharding", "pipeline"),
    "tensor 2": ("up", "--sim", "2", "--sharding", "tensor"),
}


def b64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def audio(file: bytes, word: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": b64(file), "format": word}}


def image(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{b64(file)}"}}


def video(file: bytes, **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{b64(file)}"}, **more}


def said(mesh: Any, *parts: dict[str, Any], **fields: Any) -> tuple[str, int]:
    """The answer, and the tokens of the prompt."""
    answer = mesh.client().chat.completions.create(
        model="local",
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": "what is this?"}]}],
        max_tokens=16,
        temperature=0.0,
        **fields,
    )
    return str(answer.choices[0].message.content), answer.usage.prompt_tokens


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, tuple[str, int]]]:
    """What the first world size said, by model."""
    return {}


@pytest.mark.parametrize("name", [*COMMANDS])
def test_audio_is_answered_alike_at_every_world_size(
    name: str, start_mesh: Any, alm: ModuleType, vlm: ModuleType, clips: ModuleType, tiny_alm_folder: Path,
    expected: dict[str, dict[str, tuple[str, int]]],
) -> None:  # fmt: skip
    one, two = alm.sound(1), alm.sound(2)
    with start_mesh(*COMMANDS[name], "--model", str(tiny_alm_folder)) as mesh:
        answers = {
            "one": said(mesh, audio(one)),
            "two": said(mesh, audio(two)),
            "both": said(mesh, audio(one), audio(two)),
            "turned": said(mesh, audio(two), audio(one)),
            "beside a picture": said(mesh, image(vlm.picture(1)), audio(one)),
            "mp3": said(mesh, audio(clips.sound("mp3", "libmp3lame"), "mp3")),
        }
        assert said(mesh, audio(one)) == answers["one"]
        with pytest.raises(openai.BadRequestError) as caught:
            said(mesh, audio(one[:500]))
        assert (caught.value.code, caught.value.param) == (
            "invalid_audio",
            "messages[0].content[0].input_audio",
        )
        with pytest.raises(openai.BadRequestError) as caught:
            said(mesh, video(clips.film()))
        assert caught.value.code == "unsupported_media"
    assert answers == expected.setdefault("audio", answers)
    assert answers["one"][0] != answers["two"][0] and answers["both"][0] != answers["turned"][0]
    assert answers["both"][1] > answers["one"][1] > 0


@pytest.mark.parametrize("name", [*COMMANDS])
def test_videos_are_answered_alike_at_every_world_size(
    name: str, start_mesh: Any, vlm: ModuleType, clips: ModuleType, tiny_vlm_folder: Path,
    expected: dict[str, dict[str, tuple[str, int]]],
) -> None:  # fmt: skip
    with start_mesh(*COMMANDS[name], "--model", str(tiny_vlm_folder)) as mesh:
        film, other = clips.film(num_frames=20), clips.film(num_frames=20, first=40)
        answers = {
            "film": said(mesh, video(film)),
            "other": said(mesh, video(other)),
            "two frames": said(mesh, video(film, nframes=2)),
            "two frames, beside it": said(
                mesh, video(film), extra_body={"media_io_kwargs": {"video": {"num_frames": 2}}}
            ),
            "beside a picture": said(mesh, image(vlm.picture(1)), video(film)),
        }
        with pytest.raises(openai.BadRequestError) as caught:
            said(mesh, video(film[:-200]))
        assert (caught.value.code, caught.value.param) == (
            "invalid_video",
            "messages[0].content[0].video_url",
        )
        with pytest.raises(openai.BadRequestError) as caught:
            said(mesh, audio(clips.wav()))
        assert caught.value.code == "unsupported_media"
    assert answers == expected.setdefault("video", answers)
    assert answers["film"][0] != answers["other"][0]
    assert answers["two frames"] == answers["two frames, beside it"]
    assert answers["two frames"] != answers["film"]
    assert answers["film"][1] < answers["beside a picture"][1]
