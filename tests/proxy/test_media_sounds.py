"""Requests with audio and video over real HTTP: what the engine gets, what the client is told, and what never
reaches the engine."""

from __future__ import annotations

import base64
import functools
import io
import logging
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
from PIL import Image

from mlx_mesh.mesh.messages import Failed, GenerateRequest, Media, TokenChunk
from mlx_mesh.proxy.media import desk as desk_module
from mlx_mesh.proxy.media.decode_child import outcome_of
from mlx_mesh.proxy.media.decoder import Decoder
from mlx_mesh.proxy.media.decoding import Outcome, Task
from mlx_mesh.proxy.media.fetch import Fetcher
from mlx_mesh.proxy.tokenizer import ModelTokenizer

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
FIRST = "messages[0].content[0]"
ALL = {"media": ("image", "audio", "video")}
IdsOf = Callable[[str], list[int]]

MARKS = {"image": "<|image_pad|>", "audio": "<|audio_pad|>", "video": "<|video_pad|>"}


@functools.cache
def picture() -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), "red").save(file, "PNG")
    return file.getvalue()


def url_of(file: bytes, media_type: str) -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


def audio(file: bytes, word: str = "wav") -> dict[str, Any]:
    data = base64.b64encode(file).decode()
    return {"type": "input_audio", "input_audio": {"data": data, "format": word}}


def video(file: bytes, media_type: str = "video/mp4", **more: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url_of(file, media_type)}, **more}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def in_frame(kind: str) -> str:
    return f"<|vision_start|>{MARKS[kind]}<|vision_end|>"


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user(*parts)]}


async def decode_here(self: Decoder, task: Task, data: bytes) -> Outcome:
    """Without a process for each file; test_media_decoding tries that."""
    return outcome_of(task, data)


@pytest.fixture(scope="module")
def here() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Decoder, "_ask", decode_here)
        yield


@pytest.fixture
def front(omni_front: Any, here: None) -> Any:
    return omni_front


def media(front: Any, body: dict[str, Any], path: str = CHAT) -> Media:
    """What the engine gets of a request that is answered."""
    response = front.post(path, body)
    assert response.status_code == 200, response.text
    found = front.coordinator.requests[-1].media
    assert isinstance(found, Media)
    return found


def error_of(front: Any, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    num_before = len(front.coordinator.requests)
    response = front.post(path, body)
    assert response.status_code == 400, response.text
    assert len(front.coordinator.requests) == num_before
    error = response.json()["error"]
    assert isinstance(error, dict)
    return error


# ---------------------------------------------------------------- what the engine gets


def test_each_kind_is_in_order_and_has_its_mark(front: Any, clips: Any) -> None:
    first, second = clips.wav(0.25), clips.wav(0.5, 8000, 2)
    image = {"type": "image_url", "image_url": {"url": url_of(picture(), "image/png")}}
    turns = [
        user(text("A"), audio(first), text("B"), video(clips.film()), image),
        {"role": "assistant", "content": "Heard."},
        user({"type": "audio_url", "audio_url": {"url": url_of(second, "audio/wav")}}, text("C")),
    ]
    found = media(front, {"messages": turns})
    assert found.audios[0] == first and found.images == (picture(),)
    with wave.open(io.BytesIO(found.audios[1])) as reader:
        assert (reader.getnchannels(), reader.getframerate()) == (1, 16000)
    assert [len(one.frames) for one in found.videos] == [12]
    shown = f"A{MARKS['audio']}B{in_frame('video')}{in_frame('image')}"
    assert f"{shown}<|im_end|>" in found.text and f"{MARKS['audio']}C<|im_end|>" in found.text


def test_every_name_that_servers_have_for_them(front: Any, clips: Any) -> None:
    film, sound = url_of(clips.film(), "video/mp4"), url_of(clips.wav(0.25), "audio/wav")
    for part in (
        {"type": "video_url", "video_url": film},
        {"type": "input_video", "video_url": film},
        {"type": "input_video", "video_url": {"url": film}},
        {"type": "input_video", "video": film},
        {"type": "video", "video": film},
        {"type": "video", "video": {"url": film}},
    ):
        assert len(media(front, chat(part)).videos) == 1
        assert len(media(front, {"input": [user(part)]}, RESPONSES).videos) == 1
    for part in (
        audio(clips.wav(0.25)),
        {"type": "input_audio", "input_audio": {"data": sound}},
        {"type": "audio_url", "audio_url": sound},
        {"type": "audio_url", "audio_url": {"url": sound.replace("audio/wav", "")}},
        audio(clips.sound("mp3", "libmp3lame"), "mp3"),
    ):
        assert len(media(front, chat(part)).audios) == 1
        assert len(media(front, {"input": [user(part)]}, RESPONSES).audios) == 1


def test_openais_client(front: Any, clips: Any) -> None:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as client:
        turns: Any = [user(text("what?"), audio(clips.wav(0.25)))]
        whole = client.chat.completions.create(model="local", messages=turns)
        assert whole.choices[0].message.content == "fine"
        assert whole.usage is not None and whole.usage.prompt_tokens == 700


@pytest.mark.parametrize(
    ("beside", "of_part", "num_frames"),
    [
        ({}, {}, 12),
        ({"mm_processor_kwargs": {"fps": 1}}, {}, 6),
        ({"mm_processor_kwargs": {"max_frames": 8}}, {}, 8),
        ({"media_io_kwargs": {"video": {"num_frames": 10}}}, {}, 10),
        ({"media_io_kwargs": {"video": {"fps": 1}}, "mm_processor_kwargs": {"fps": 4}}, {}, 24),
        ({"mm_processor_kwargs": {"num_frames": 10}}, {"fps": 0.5}, 4),
        ({"mm_processor_kwargs": {"fps": 1}}, {"nframes": 2}, 2),
        ({}, {"fps": 0.1, "min_frames": 20}, 20),
    ],
)
def test_how_many_frames_are_shown(
    front: Any, clips: Any, beside: dict[str, Any], of_part: dict[str, Any], num_frames: int
) -> None:
    found = media(front, {**chat(video(clips.film(), **of_part)), **beside})
    assert len(found.videos[0].frames) == len(found.videos[0].times) == num_frames


def test_pixel_bounds_go_along(front: Any, clips: Any) -> None:
    found = media(front, {**chat(video(clips.film())), "max_pixels": 1000, "min_pixels": 10})
    assert (found.min_pixels, found.max_pixels) == (10, 1000)


def test_a_stored_response_brings_them_along(front: Any, clips: Any) -> None:
    parts = [audio(clips.wav(0.25)), video(clips.film())]
    first = front.post(RESPONSES, {"input": [user(*parts)]}).json()
    found = media(
        front, {"previous_response_id": first["id"], "input": [user(audio(clips.wav(0.5)))]}, RESPONSES
    )
    assert found.audios == (clips.wav(0.25), clips.wav(0.5)) and len(found.videos) == 1


def test_every_choice_has_them(front: Any, clips: Any) -> None:
    media(front, {**chat(audio(clips.wav(0.25))), "n": 2})
    assert {one.media.audios for one in front.coordinator.requests[-2:]} == {(clips.wav(0.25),)}


def test_text_that_looks_like_one_is_none(front: Any, clips: Any, omni: ModelTokenizer) -> None:
    words = "".join(MARKS.values())
    found = media(front, chat(text(words), audio(clips.wav(0.25)), text(words)))
    assert [found.text.count(mark) for mark in MARKS.values()] == [0, 1, 0]
    front.post(CHAT, chat(text(words)))
    alone = front.coordinator.requests[-1]
    assert not {omni.special_token_id(mark) for mark in MARKS.values()} & set(alone.prompt_ids)


def test_by_url_from_an_allowed_host(front: Any, clips: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str]] = []

    async def fetch(self: Fetcher, url: str, kind: str, inline: str) -> bytes:
        asked.append((url, kind))
        return bytes(clips.film()) if kind == "video" else b"<html>"

    monkeypatch.setattr(Fetcher, "fetch", fetch)
    film = {"type": "video_url", "video_url": {"url": "https://files.example/a.mp4"}}
    assert len(media(front, chat(film)).videos) == 1
    sound = {"type": "audio_url", "audio_url": "https://files.example/a.wav"}
    error = error_of(front, chat(film, sound))
    assert (error["code"], error["param"]) == ("invalid_audio", "messages[0].content[1].audio_url")
    assert asked == [
        ("https://files.example/a.mp4", "video"),
        ("https://files.example/a.mp4", "video"),
        ("https://files.example/a.wav", "audio"),
    ]


# ---------------------------------------------------------------- what is refused


def by_name(name: str, clips: Any) -> bytes:
    files: dict[str, bytes] = {
        "wav": clips.wav(0.25),
        "half": clips.wav(0.25)[:1000],
        "film": clips.film(),
        "cut": clips.film()[:-100],
        "bytes": b"\x00\x01\x02\x03" * 9,
        "playlist": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        "picture": picture(),
        "": b"",
    }
    return files[name]


@pytest.mark.parametrize(
    ("part", "file", "field", "code"),
    [
        ("audio", "half", "input_audio", "invalid_audio"),
        ("audio", "bytes", "input_audio", "invalid_audio"),
        ("audio", "film", "input_audio", "invalid_audio"),
        ("audio", "picture", "input_audio", "invalid_audio"),
        ("audio", "", "input_audio.data", "invalid_audio"),
        ("video", "cut", "video_url", "invalid_video"),
        ("video", "playlist", "video_url", "invalid_video"),
        ("video", "wav", "video_url", "invalid_video"),
        ("video", "picture", "video_url", "invalid_video"),
        ("video", "", "video_url", "invalid_video"),
    ],
)
def test_files_that_cannot_be_used(
    front: Any, clips: Any, part: str, file: str, field: str, code: str
) -> None:
    data = by_name(file, clips)
    made = audio(data) if part == "audio" else video(data)
    error = error_of(front, chat(text("x"), made))
    assert (error["param"], error["code"]) == (f"messages[0].content[1].{field}", code)
    assert f"messages[0].content[1].{field}" in error["message"]


def test_what_the_client_says_that_it_is_must_be_so(front: Any, clips: Any) -> None:
    for part, field in (
        (audio(clips.wav(0.25), "mp3"), "input_audio"),
        (video(clips.film(), "video/webm"), "video_url"),
        (video(clips.film(), "audio/wav"), "video_url"),
    ):
        error = error_of(front, chat(part))
        assert error["param"] == f"{FIRST}.{field}" and "is said to be" in error["message"]


@pytest.mark.parametrize(
    ("part", "param", "code"),
    [
        ({"type": "input_audio"}, ".input_audio", "invalid_audio"),
        ({"type": "input_audio", "input_audio": {"data": 5}}, ".input_audio.data", "invalid_audio"),
        (
            {"type": "input_audio", "input_audio": {"data": "aGk=", "format": "pcm16"}},
            ".input_audio.format",
            "invalid_audio",
        ),
        ({"type": "input_audio", "input_audio": {"data": "!!"}}, ".input_audio", "invalid_audio"),
        ({"type": "input_audio", "file_id": "f"}, ".file_id", "unsupported_media"),
        ({"type": "audio_url", "audio_url": "file:///etc/passwd"}, ".audio_url", "audio_url_not_allowed"),
        ({"type": "video_url", "video_url": "http://10.0.0.1/x"}, ".video_url", "video_url_not_allowed"),
        ({"type": "video", "video": ["a", "b"]}, ".video", "unsupported_media"),
        ({"type": "video", "video": "data:,x", "fps": -1}, ".fps", "invalid_value"),
        ({"type": "video", "video": "data:,x", "fps": True}, ".fps", "invalid_value"),
        ({"type": "video", "video": "data:,x", "video_start": 3}, ".video_start", "unsupported_parameter"),
        ({"type": "video", "video": "data:,x", "max_pixels": 3}, ".max_pixels", "unsupported_parameter"),
        ({"type": "video", "video": "data:,x", "fpss": 3}, ".fpss", "unsupported_parameter"),
        ({"type": "audio_url", "audio_url": "data:,x", "rate": 3}, ".rate", "unsupported_parameter"),
        (
            {"type": "video_url", "video_url": {"url": "data:,x", "fps": 3}},
            ".video_url.fps",
            "unsupported_parameter",
        ),
        ({"type": "video", "video": "data:,x"}, ".video", "invalid_video"),
        ({"type": "audio", "audio": "x"}, "", "unsupported_media"),
    ],
)
def test_parts_that_are_none(front: Any, part: dict[str, Any], param: str, code: str) -> None:
    error = error_of(front, chat(part))
    assert (error["param"], error["code"]) == (f"{FIRST}{param}", code)


def test_where_they_may_not_stand(front: Any, clips: Any) -> None:
    error = error_of(front, {"messages": [{"role": "system", "content": [audio(clips.wav(0.25))]}]})
    assert error["code"] == "unsupported_media" and "'messages[0].content[0]' is an audio" in error["message"]


def test_they_are_bounded_in_number_and_bytes(
    front: Any, clips: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = error_of(front, chat(*[audio(clips.wav(0.25))] * 9))
    assert (error["code"], error["param"]) == ("too_many_audios", "messages[0].content[8].input_audio")
    error = error_of(front, chat(*[video(clips.film())] * 5))
    assert (error["code"], error["param"]) == ("too_many_videos", "messages[0].content[4].video_url")
    size = len(clips.wav(0.5, 16000))
    monkeypatch.setattr(desk_module, "MAX_TOTAL_BYTES", 2 * size - 1)
    error = error_of(front, chat(audio(clips.wav(0.5)), audio(clips.wav(0.5))))
    assert (error["code"], error["param"]) == ("audio_too_large", "messages[0].content[1].input_audio")
    # It is what is made of a file that counts, too: of 8000 samples a second twice as many.
    error = error_of(front, chat(audio(clips.wav(0.5)), audio(clips.wav(0.5, 8000))))
    assert (error["code"], error["param"]) == ("audio_too_large", "messages[0].content[1].input_audio")
    monkeypatch.setattr(desk_module, "MAX_AUDIO_S", 0.3)
    assert error_of(front, chat(audio(clips.wav(0.5))))["code"] == "audio_too_long"


def test_other_apis_have_no_such_parts(front: Any, clips: Any) -> None:
    for kind in ("audio", "video"):
        block = {"type": kind, "source": {"type": "base64", "data": "aGk="}}
        body = {"max_tokens": 4, "messages": [user(block)]}
        response = front.post(MESSAGES, body)
        assert response.status_code == 400 and "'messages[0].content[0]'" in response.text
        assert "this API takes images only" in response.text
    sound = base64.b64encode(clips.wav(0.25)).decode()
    body = {"model": "local", "messages": [{"role": "user", "content": "?", "images": [sound]}]}
    response = front.post("/api/chat", body)
    assert response.status_code == 400 and "messages[0].images[0]" in response.text


def test_a_model_that_takes_other_kinds_says_why_not(
    start_front: Any, omni: ModelTokenizer, saying: Any, ids_of: IdsOf, clips: Any
) -> None:
    why = {"audio": "models of type 'x' take no audio."}
    front = start_front(
        saying(ids_of("ok")), model=omni, coordinator={"media": ("image",), "media_refusals": why}
    )
    error = error_of(front, chat(audio(clips.wav(0.25))))
    assert (error["code"], error["param"]) == ("unsupported_media", FIRST)
    assert error["message"].endswith("; models of type 'x' take no audio.")
    error = error_of(front, chat(video(clips.film())))
    assert error["message"].endswith("; this model takes text and images only.")
    said = front.http.get("/v1/capabilities").json()
    assert said["media"]["audio"]["reason"] == "models of type 'x' take no audio"
    assert (said["features"]["images"], said["features"]["audio"], said["features"]["video"]) == (
        True,
        False,
        False,
    )


def test_a_template_that_leaves_a_kind_out_refuses_it(
    start_front: Any, seer: ModelTokenizer, saying: Any, ids_of: IdsOf, clips: Any
) -> None:
    front = start_front(saying(ids_of("ok")), model=seer, coordinator=ALL)
    error = error_of(front, chat(audio(clips.wav(0.25))))
    assert error["code"] == "unsupported_media" and "chat template has no place" in error["message"]


def test_without_pyav_the_refusal_says_what_to_install(
    start_front: Any,
    omni: ModelTokenizer,
    saying: Any,
    ids_of: IdsOf,
    clips: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(desk_module, "can_decode", lambda: False)
    front = start_front(saying(ids_of("ok")), model=omni, coordinator=ALL)
    error = error_of(front, chat(audio(clips.wav(0.25))))
    assert error["code"] == "unsupported_media" and "PyAV is missing on the leader" in error["message"]
    image = {"type": "image_url", "image_url": {"url": url_of(picture(), "image/png")}}
    assert media(front, chat(image)).images == (picture(),)


@pytest.mark.parametrize(
    ("code", "param", "named"),
    [
        ("invalid_audio", "audios[1]", "messages[0].content[2].input_audio"),
        ("invalid_video", "videos[0]", "messages[0].content[1].video_url"),
        ("invalid_audio", "", None),
    ],
)
def test_what_the_engine_refuses_is_a_400_naming_the_part(
    start_front: Any, omni: ModelTokenizer, clips: Any, here: None, code: str, param: str, named: str | None
) -> None:
    async def refuse(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield Failed(id="", code=code, message=f"{param} is not to be used", param=param)

    front = start_front(refuse, model=omni, coordinator=ALL)
    sound = audio(clips.wav(0.25))
    response = front.post(CHAT, chat(sound, video(clips.film()), sound))
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, code, named)
    assert error["message"] == (f"'{named}' is not to be used" if named else " is not to be used")


# ---------------------------------------------------------------- what is said about it


def test_what_the_model_takes_is_said_everywhere(front: Any) -> None:
    said = front.http.get("/v1/capabilities").json()
    assert said["features"]["audio"] is True and said["features"]["video"] is True
    assert "audio/mpeg" in said["media"]["audio"]["media_types"]
    assert "video/mp4" in said["media"]["video"]["media_types"]
    assert (said["limits"]["max_audios"], said["limits"]["max_videos"]) == (8, 4)
    kinds = front.http.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"]
    assert kinds == ["text", "image", "audio", "video"]
    shown = front.post("/api/show", {"model": "local"}).json()["capabilities"]
    assert {"vision", "audio"} <= set(shown)


def test_they_are_counted_and_never_logged(front: Any, clips: Any, caplog: pytest.LogCaptureFixture) -> None:
    def counted() -> dict[str, float]:
        lines = front.http.get("/metrics").text.splitlines()
        return {
            name: float(next(line.split()[1] for line in lines if line.startswith(f"mlx_mesh_{name}_total ")))
            for name in ("audio", "audio_seconds", "videos", "video_frames")
        }

    before = counted()
    with caplog.at_level(logging.DEBUG):
        media(front, chat(audio(clips.wav(0.5)), audio(clips.wav(0.25)), video(clips.film())))
    after = counted()
    grown = {name: after[name] - before[name] for name in after}
    assert grown == {"audio": 2, "audio_seconds": 0.75, "videos": 1, "video_frames": 12}
    assert base64.b64encode(clips.wav(0.5)).decode()[:24] not in caplog.text


def test_a_process_of_its_own_decodes(
    start_front: Any, omni: ModelTokenizer, saying: Any, ids_of: IdsOf
) -> None:
    """As it is served: all above decodes where the tests can follow it."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(16000)
        writer.writeframes(bytes(3200))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Decoder, "_ask", REAL_ASK)
        front = start_front(saying(ids_of("ok")), model=omni, coordinator=ALL)
        assert media(front, chat(audio(file.getvalue()))).audios == (file.getvalue(),)


REAL_ASK = Decoder._ask
