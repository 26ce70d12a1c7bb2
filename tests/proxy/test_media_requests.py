"""Requests with pictures over real HTTP, in every dialect and with the official clients: what the engine
gets, what the client is told, and what never reaches the engine."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import io
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import ollama
import openai
import pytest
from PIL import Image

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk
from mlx_mesh.proxy.media import desk as desk_module
from mlx_mesh.proxy.media import files as files_module
from mlx_mesh.proxy.media.addresses import UrlRefused
from mlx_mesh.proxy.media.fetch import Fetcher, FetchFailed
from mlx_mesh.proxy.media.files import PictureFacts, check_file
from mlx_mesh.proxy.media.item import Item
from mlx_mesh.proxy.tokenizer import ModelTokenizer

CHAT = "/v1/chat/completions"
MARK = "<|image_pad|>"
SHOWN = f"<|vision_start|>{MARK}<|vision_end|>"
IdsOf = Callable[[str], list[int]]


@functools.cache
def image(colour: str = "red", kind: str = "PNG", size: tuple[int, int] = (4, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, colour).save(file, kind)
    return file.getvalue()


def b64(file: bytes) -> str:
    return base64.b64encode(file).decode()


def url_of(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64(file)}"


def image_url(file: bytes, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url_of(file), **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def by(url: Any, **more: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url, **more}}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def chat(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [user(*parts)]}


def block(**source: str) -> dict[str, Any]:
    return {"type": "image", "source": source}


def messages(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"max_tokens": 4, "messages": [user(*blocks)]}


def result(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": list(blocks)}


def ollama_chat(*images: Any, role: str = "user") -> dict[str, Any]:
    return {"model": "local", "messages": [{"role": role, "content": "?", "images": list(images)}]}


def items(kind: str = "input_image", **fields: str) -> dict[str, Any]:
    return {"input": [user({"type": kind, **fields})]}


RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
FIRST = "messages[0].content[0]"
SEES = {"media": ("image",)}


def last_request(front: Any) -> GenerateRequest:
    request = front.coordinator.requests[-1]
    assert isinstance(request, GenerateRequest)
    return request


def asked(front: Any, path: str, body: dict[str, Any]) -> GenerateRequest:
    """The engine's request for a request that is answered."""
    response = front.post(path, body)
    assert response.status_code == 200, response.text
    return last_request(front)


RED, BLUE, GREEN = image("red"), image("blue", "JPEG"), image("green", "WEBP")
BLUE_URL = url_of(BLUE, "image/jpeg")
TWO_SAME = image("black"), image("white")  # one size, two contents


# ---------------------------------------------------------------- dialects


def test_the_engine_gets_the_files_in_order_and_the_prompt_with_its_marks(
    seeing_front: Any, seer: ModelTokenizer
) -> None:
    turns = [
        {"role": "system", "content": "Look."},
        user(
            text("A"),
            image_url(RED),
            text("B"),
            {"type": "image_url", "image_url": url_of(BLUE, "image/jpeg")},
        ),
        {"role": "assistant", "content": "Seen."},
        user(
            {
                "type": "image_url",
                "image_url": {"url": url_of(GREEN, "image/webp"), "detail": "high"},
                "prompt_cache_breakpoint": {"mode": "explicit"},
                "cache_control": {"type": "ephemeral"},
            },
            text("C"),
        ),
    ]
    request = asked(seeing_front, CHAT, {"messages": turns})
    assert request.media is not None
    assert request.media.images == (RED, BLUE, GREEN)
    assert f"A{SHOWN}B{SHOWN}<|im_end|>" in request.media.text and f"{SHOWN}C<|im_end|>" in request.media.text
    assert request.media.text.endswith("<|im_start|>assistant\n")
    assert request.prompt_ids == seer.plain_ids(request.media.text)  # unexpanded: a lower bound of its length
    assert (request.media.min_pixels, request.media.max_pixels) == (0, 0)


def test_two_pictures_of_one_size_stay_apart(seeing_front: Any) -> None:
    first, second = TWO_SAME
    request = asked(seeing_front, CHAT, {"messages": [user(image_url(first), image_url(second))]})
    assert request.media is not None and request.media.images == (first, second) and first != second


def test_text_alone_is_no_different_from_any_model(seeing_front: Any) -> None:
    request = asked(seeing_front, CHAT, {"messages": [user(text("one"), text("two"))]})
    assert request.media is None
    response = seeing_front.chat("hello")
    assert response.json()["choices"][0]["message"]["content"] == "fine"
    assert response.json()["usage"]["prompt_tokens"] == len(last_request(seeing_front).prompt_ids)


def test_openais_client_streamed_and_whole(seeing_front: Any) -> None:
    with openai.OpenAI(base_url=f"{seeing_front.url}/v1", api_key="none", max_retries=0) as client:
        turns: Any = [user(text("what?"), image_url(RED), image_url(TWO_SAME[0]))]
        whole = client.chat.completions.create(model="local", messages=turns)
        assert whole.choices[0].message.content == "fine"
        assert whole.usage is not None and whole.usage.prompt_tokens == 700
        stream = client.chat.completions.create(
            model="local", messages=turns, stream=True, stream_options={"include_usage": True}
        )
        assert list(stream)[-1].usage.prompt_tokens == 700  # type: ignore[union-attr]
        content: Any = [
            {"type": "input_text", "text": "what?"},
            {"type": "input_image", "image_url": url_of(RED), "detail": "auto"},
        ]
        answer = client.responses.create(model="local", input=[{"role": "user", "content": content}])
        assert answer.output_text == "fine"
        assert answer.usage is not None and answer.usage.input_tokens == 700
    media = last_request(seeing_front).media
    assert media is not None and media.images == (RED,)


def test_anthropics_client_with_images_in_messages_and_tool_results(seeing_front: Any) -> None:
    blue = block(type="base64", media_type="image/jpeg", data=b64(BLUE))
    turns: Any = [
        user(block(type="base64", media_type="image/png", data=b64(RED)), text("A")),
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
        user(result(text("seen"), blue), text("B")),
    ]
    with anthropic.Anthropic(base_url=seeing_front.url, api_key="none", max_retries=0) as client:
        answer = client.messages.create(model="local", max_tokens=9, messages=turns)
        assert answer.usage.input_tokens == 700
        with client.messages.stream(model="local", max_tokens=9, messages=turns) as stream:
            assert stream.get_final_message().usage.input_tokens == 700
        counted = client.messages.count_tokens(model="local", messages=turns)
    request = last_request(seeing_front)
    assert request.media is not None and request.media.images == (RED, BLUE)
    assert f"seen{SHOWN}" in request.media.text
    assert counted.input_tokens == len(request.prompt_ids)


def test_ollamas_client(seeing_front: Any) -> None:
    client = ollama.Client(host=seeing_front.url, trust_env=False)
    answer = client.chat(
        model="local", messages=[{"role": "user", "content": "A", "images": [b64(RED), BLUE]}], stream=False
    )
    assert answer.message.content == "fine" and answer.prompt_eval_count == 700
    media = last_request(seeing_front).media
    assert media is not None and media.images == (RED, BLUE) and f"{SHOWN}{SHOWN}A" in media.text
    assert client.generate(model="local", prompt="B", images=[GREEN]).response == "fine"
    media = last_request(seeing_front).media
    assert media is not None and media.images == (GREEN,) and f"{SHOWN}B" in media.text
    assert "vision" in (client.show("local").capabilities or ())
    client._client.close()


def test_a_stored_response_brings_its_pictures_along(seeing_front: Any) -> None:
    part = {"type": "input_image", "image_url": url_of(RED)}
    first = seeing_front.post(
        "/v1/responses", {"input": [user({"type": "input_text", "text": "A"}, part)]}
    ).json()
    more = {"type": "input_image", "image_url": url_of(BLUE, "image/jpeg")}
    body = {"previous_response_id": first["id"], "input": [user(more)]}
    second = seeing_front.post("/v1/responses", body).json()
    media = last_request(seeing_front).media
    assert media is not None and media.images == (RED, BLUE)
    third = asked(seeing_front, "/v1/responses", {"previous_response_id": second["id"], "input": "and?"})
    assert third.media is not None and third.media.images == (RED, BLUE)


def test_every_choice_has_the_pictures_and_the_prompt_counts_once(seeing_front: Any) -> None:
    response = seeing_front.post(CHAT, {"messages": [user(image_url(RED))], "n": 3})
    requests = seeing_front.coordinator.requests[-3:]
    assert {one.media.images for one in requests} == {(RED,)} and len({one.id for one in requests}) == 3
    assert response.json()["usage"]["prompt_tokens"] == 700


def test_a_form_for_the_answer_goes_with_pictures(seeing_front: Any) -> None:
    body = {"messages": [user(image_url(RED))], "guided_choice": ["fine", "bad"]}
    request = asked(seeing_front, CHAT, body)
    assert request.grammar and request.media is not None


def test_tools_go_with_pictures(
    start_front: Any, families: Any, saying: Any, ids_of: IdsOf, model_with: Any
) -> None:
    """A template that reads text only: the mark is written into it."""
    model = model_with(families.template_of(families.FAMILIES["json_tools"]))
    front = start_front(saying(ids_of("ok")), model=model, coordinator=SEES)
    tool = {
        "type": "function",
        "function": {"name": "look", "description": "about <image>", "parameters": {}},
    }
    request = asked(front, CHAT, {"messages": [user(image_url(RED), text("what?"))], "tools": [tool]})
    assert request.media is not None and request.media.text.count("<image>") == 1
    assert "<image>what?" in request.media.text and '"look"' in request.media.text


def test_conversation_headers_count_the_real_prompt(seeing_front: Any) -> None:
    for stream in (False, True):
        response = seeing_front.post(CHAT, {**chat(image_url(RED)), "stream": stream})
        assert response.headers["x-conv-processing-tokens"] == "700"


# ---------------------------------------------------------------- pixels


@pytest.mark.parametrize(
    ("fields", "details", "bounds"),
    [
        ({"min_pixels": 10, "max_pixels": 1000}, ("auto",), (10, 1000)),
        ({"mm_processor_kwargs": {"max_pixels": 1000}}, ("auto",), (0, 1000)),
        ({"max_pixels": 1000, "mm_processor_kwargs": {"max_pixels": 1000}}, ("low",), (0, 1000)),
        ({}, ("low", "low"), (0, 512 * 512)),
        ({}, ("low", "high"), (0, 0)),
        ({"min_pixels": 512 * 513}, ("low",), (512 * 513, 512 * 513)),
    ],
)
def test_pixel_bounds_and_detail(
    seeing_front: Any, fields: dict[str, Any], details: tuple[str, ...], bounds: tuple[int, int]
) -> None:
    turn = user(*(image_url(RED, detail=detail) for detail in details))
    media = asked(seeing_front, CHAT, {"messages": [turn], **fields}).media
    assert media is not None and (media.min_pixels, media.max_pixels) == bounds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"min_pixels": 0}, "min_pixels"),
        ({"max_pixels": 10**9}, "max_pixels"),
        ({"max_pixels": "many"}, "max_pixels"),
        ({"min_pixels": 20, "max_pixels": 10}, "min_pixels"),
        ({"mm_processor_kwargs": {"max_pixels": True}}, "mm_processor_kwargs.max_pixels"),
        ({"mm_processor_kwargs": {"fps": 0}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"num_frames": 9999}}, "mm_processor_kwargs.num_frames"),
        ({"mm_processor_kwargs": {"fps": 1, "num_frames": 4}}, "mm_processor_kwargs.fps"),
        ({"mm_processor_kwargs": {"nframes": 5, "num_frames": 4}}, "mm_processor_kwargs.nframes"),
        ({"mm_processor_kwargs": {"min_frames": 5, "max_frames": 4}}, "mm_processor_kwargs.min_frames"),
        ({"mm_processor_kwargs": {"do_sample_frames": False}}, "mm_processor_kwargs.do_sample_frames"),
        ({"media_io_kwargs": {"video": {"backend": "opencv"}}}, "media_io_kwargs.video.backend"),
        ({"media_io_kwargs": {"audio": {"rate": 1}}}, "media_io_kwargs.audio.rate"),
        ({"media_io_kwargs": {"video": 3}}, "media_io_kwargs.video"),
        ({"max_pixels": 10, "mm_processor_kwargs": {"max_pixels": 11}}, "mm_processor_kwargs.max_pixels"),
    ],
)
def test_bounds_that_are_none(seeing_front: Any, fields: dict[str, Any], param: str) -> None:
    response = seeing_front.post(CHAT, {"messages": [user(image_url(RED))], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


# ---------------------------------------------------------------- refusals

BROKEN = RED[: len(RED) // 2]


@pytest.mark.parametrize(
    ("path", "body", "part", "code"),
    [
        (CHAT, chat(text("b"), image_url(BROKEN)), "messages[0].content[1].image_url", "invalid_image"),
        (CHAT, chat(image_url(RED), image_url(b"no")), "messages[0].content[1].image_url", "invalid_image"),
        (CHAT, chat(by(url_of(RED, "image/jpeg"))), f"{FIRST}.image_url", "invalid_image"),
        (CHAT, chat(by("data:image/png;base64,!!!")), f"{FIRST}.image_url", "invalid_image"),
        (CHAT, chat(by(5)), f"{FIRST}.image_url", "invalid_image"),
        (CHAT, chat({"type": "image_url"}), f"{FIRST}.image_url", "invalid_image"),
        (CHAT, chat(image_url(RED, fps="9")), f"{FIRST}.image_url.fps", "unsupported_parameter"),
        (CHAT, chat(image_url(RED, detail="most")), f"{FIRST}.image_url.detail", "invalid_value"),
        (CHAT, chat(by("file:///etc/passwd")), f"{FIRST}.image_url", "image_url_not_allowed"),
        (CHAT, chat(by("/etc/passwd")), f"{FIRST}.image_url", "image_url_not_allowed"),
        (CHAT, chat(by("http://127.0.0.1:1/x.png")), f"{FIRST}.image_url", "image_url_not_allowed"),
        (CHAT, {"messages": [{"role": "system", "content": [image_url(RED)]}]}, FIRST, "unsupported_media"),
        (CHAT, chat({"type": "input_audio", "input_audio": {}}), FIRST, "unsupported_media"),
        (CHAT, chat({"type": "video_url", "video_url": {"url": "x"}}), FIRST, "unsupported_media"),
        (CHAT, chat(*[image_url(RED)] * 33), "messages[0].content[32].image_url", "too_many_images"),
        (RESPONSES, items(file_id="f"), "input[0].content[0].file_id", "unsupported_media"),
        (RESPONSES, items(image_url=url_of(BROKEN)), "input[0].content[0].image_url", "invalid_image"),
        (RESPONSES, items("input_file", file_id="f"), "input[0].content[0]", "unsupported_media"),
    ],
)
def test_media_that_cannot_be_used_is_a_400_naming_the_part_and_reaches_no_engine(
    seeing_front: Any, path: str, body: dict[str, Any], part: str, code: str
) -> None:
    num_before = len(seeing_front.coordinator.requests)
    for more in ({}, {"stream": True}):
        response = seeing_front.post(path, {**body, **more})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["param"], error["code"]) == (part, code) and f"'{part}'" in error["message"]
    assert len(seeing_front.coordinator.requests) == num_before


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        (MESSAGES, messages({"type": "image"}), f"{FIRST}.source"),
        (MESSAGES, messages(block(type="file", file_id="f")), f"{FIRST}.source.type"),
        (MESSAGES, messages(block(type="base64", data=b64(RED))), f"{FIRST}.source.media_type"),
        (MESSAGES, messages(block(type="base64", media_type="image/gif", data=b64(RED))), f"{FIRST}.source"),
        (MESSAGES, messages(block(type="url", url="http://10.0.0.1/x")), f"{FIRST}.source"),
        (MESSAGES, messages({"type": "document", "source": {}}), FIRST),
        (MESSAGES, messages(result({"type": "image"})), f"{FIRST}.content[0].source"),
        (MESSAGES, {**messages(text("a")), "system": [{"type": "image"}]}, "system[0]"),
        (COUNT, messages(block(type="base64", media_type="image/png", data="x")), f"{FIRST}.source"),
        ("/api/chat", ollama_chat(b64(RED), "x"), "messages[0].images[1]"),
        ("/api/chat", ollama_chat(b64(RED), role="assistant"), "messages[0].images"),
        ("/api/generate", {"model": "local", "prompt": "?", "images": [5]}, "images[0]"),
        ("/api/generate", {"model": "local", "prompt": "?", "images": [b64(RED)], "raw": True}, "images"),
    ],
)
def test_the_other_dialects_name_the_part_in_their_own_shape(
    seeing_front: Any, path: str, body: dict[str, Any], part: str
) -> None:
    num_before = len(seeing_front.coordinator.requests)
    response = seeing_front.post(path, body)
    assert response.status_code == 400 and f"'{part}'" in response.text, response.text
    assert len(seeing_front.coordinator.requests) == num_before


def test_all_files_together_are_bounded(seeing_front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    body = chat(*[image_url(RED)] * 3)
    monkeypatch.setattr(desk_module, "MAX_TOTAL_BYTES", len(RED) * 3 - 1)
    error = seeing_front.post(CHAT, body).json()["error"]
    assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[2].image_url")
    monkeypatch.setattr(desk_module, "MAX_TOTAL_BYTES", len(RED) * 3)
    monkeypatch.setattr(desk_module, "MAX_SEQUENCE_BYTES", len(RED) * 6 - 1)
    assert seeing_front.post(CHAT, body).status_code == 200
    assert seeing_front.post(CHAT, {**body, "n": 2}).json()["error"]["param"] == "n"


def test_all_pictures_together_have_so_many_pixels(
    seeing_front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "MAX_TOTAL_PIXELS", 4 * 3 * 2)
    assert seeing_front.post(CHAT, chat(*[image_url(RED)] * 2)).status_code == 200
    error = seeing_front.post(CHAT, chat(*[image_url(RED)] * 3)).json()["error"]
    assert (error["code"], error["param"]) == ("image_too_large", "messages[0].content[2].image_url")


def test_pictures_that_take_long_keep_no_text_waiting_and_end_with_their_client(
    start_front: Any, seer: ModelTokenizer, saying: Any, ids_of: IdsOf, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: queue.Queue[str] = queue.Queue()
    may_end = threading.Event()

    def slow(item: Item, *rest: Any) -> PictureFacts:
        begun.put(item.param)
        assert may_end.wait(20)
        return check_file(item, *rest)

    monkeypatch.setattr(desk_module, "check_file", slow)
    front = start_front(saying(ids_of("fine")), model=seer, coordinator=SEES)
    body = json.dumps(chat(*[image_url(RED)] * 3)).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    with contextlib.ExitStack() as clients:
        for _ in range(3):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", front.port)))
            client.sendall(head + body)
        assert [begun.get(timeout=10) for _ in range(2)] == [f"{FIRST}.image_url"] * 2
        assert front.chat().status_code == 200  # both threads for pictures are taken
    wait_for(lambda: "client_disconnects_total 3.0" in front.http.get("/metrics").text)
    may_end.set()
    assert front.post(CHAT, chat(image_url(RED), image_url(RED))).status_code == 200
    assert begun.qsize() == 2  # those of this request alone
    assert len(front.coordinator.requests) == 2


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)  # the poll interval of a wait that has a deadline


@pytest.mark.parametrize(
    ("param", "named"),
    [("images[1]", "messages[0].content[1].image_url"), ("", None), ("images[7]", None)],
)
def test_a_picture_that_the_engine_refuses_is_a_400_naming_the_part(
    start_front: Any, seer: ModelTokenizer, param: str, named: str | None
) -> None:
    async def refuse(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield Failed(id="", code="invalid_image", message="no pixels are left", param=param)

    front = start_front(refuse, model=seer, coordinator=SEES)
    for stream in (False, True):
        response = front.post(CHAT, {"messages": [user(image_url(RED), image_url(RED))], "stream": stream})
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (400, "invalid_image", named)
    one = front.post(CHAT, {"messages": [user(text("a"), image_url(RED))]}).json()["error"]
    assert one["param"] == ("messages[0].content[1].image_url" if not param else None)


@pytest.mark.parametrize("words", [MARK, SHOWN, "<|vision_start|>", f"{MARK}{MARK}"])
def test_text_that_looks_like_a_picture_is_none(seeing_front: Any, words: str, seer: ModelTokenizer) -> None:
    body = {
        "messages": [{"role": "system", "content": words}, user(text(words), image_url(RED), text(words))]
    }
    media = asked(seeing_front, CHAT, body).media
    assert media is not None and media.text.count(MARK) == 1 and media.images == (RED,)
    alone = asked(seeing_front, CHAT, {"messages": [user(text(words))]})
    assert seer.special_token_id(MARK) not in alone.prompt_ids and alone.media is None


# ---------------------------------------------------------------- URLs


class Hosts:
    """In place of the internet."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def fetch(self, url: str) -> bytes:
        self.asked.append(url)
        await asyncio.sleep(0)
        if url.endswith("404"):
            raise FetchFailed("is answered by img.example with status 404")
        if "private" in url:
            raise UrlRefused("leads to an address that is not asked (private or reserved)")
        return b"<html>" if url.endswith("html") else {"red": RED, "blue": BLUE}[url.rpartition("/")[2]]


def test_pictures_by_url_from_an_allowed_host(
    start_front: Any, saying: Any, ids_of: IdsOf, seer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = Hosts()
    monkeypatch.setattr(Fetcher, "fetch", lambda self, url, kind, inline: hosts.fetch(url))
    front = start_front(
        saying(ids_of("ok")), model=seer, coordinator=SEES, allowed_media_domains=("img.example",)
    )

    def by_url(name: str) -> dict[str, Any]:
        return by(f"https://img.example/{name}")

    media = asked(front, CHAT, {"messages": [user(by_url("blue"), by_url("red"))]}).media
    assert media is not None and media.images == (BLUE, RED)
    media = asked(front, MESSAGES, messages(block(type="url", url="https://img.example/red"))).media
    assert media is not None and media.images == (RED,)
    for name, code in (
        ("404", "invalid_image"),
        ("private", "image_url_not_allowed"),
        ("x.html", "invalid_image"),
    ):
        error = front.post(CHAT, {"messages": [user(by_url("red"), by_url(name))]}).json()["error"]
        assert (error["code"], error["param"]) == (code, "messages[0].content[1].image_url")
    assert front.http.get("/v1/capabilities").json()["media"]["image"]["url_domains"] == ["img.example"]


# ---------------------------------------------------------------- what is said about it


def test_what_the_model_takes_is_said_everywhere(seeing_front: Any, plain_front: Any) -> None:
    for front, sees in ((seeing_front, True), (plain_front, False)):
        said = front.http.get("/v1/capabilities").json()
        assert said["features"]["images"] is sees and said["features"]["audio"] is False
        assert (
            said["media"]["image"]["available"] is sees and bool(said["media"]["image"]["reason"]) is not sees
        )
        assert said["limits"]["max_images"] == 32
        kinds = ["text", "image"] if sees else ["text"]
        assert front.http.get("/v1/models").json()["data"][0]["architecture"]["input_modalities"] == kinds
        shown = front.post("/api/show", {"model": "local"}).json()["capabilities"]
        assert ("vision" in shown) is sees


def test_pictures_are_counted_and_never_logged(seeing_front: Any, caplog: pytest.LogCaptureFixture) -> None:
    def counted(name: str) -> float:
        lines = seeing_front.http.get("/metrics").text.splitlines()
        return float(next(line.split()[1] for line in lines if line.startswith(name + " ")))

    before = counted("mlx_mesh_images_total"), counted("mlx_mesh_image_bytes_total")
    with caplog.at_level(logging.DEBUG):
        asked(seeing_front, CHAT, {"messages": [user(image_url(RED), image_url(RED))]})
        seeing_front.post(CHAT, {"messages": [user(image_url(BROKEN))]})
    after = counted("mlx_mesh_images_total"), counted("mlx_mesh_image_bytes_total")
    assert (after[0] - before[0], after[1] - before[1]) == (2, 2 * len(RED))
    assert b64(RED)[:24] not in caplog.text and "x89PNG" not in caplog.text


def test_without_pillow_the_refusal_says_what_to_install(
    start_front: Any, saying: Any, ids_of: IdsOf, seer: ModelTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(desk_module, "can_read", lambda: False)
    front = start_front(saying(ids_of("ok")), model=seer, coordinator=SEES)
    error = front.post(CHAT, {"messages": [user(image_url(RED))]}).json()["error"]
    assert error["code"] == "unsupported_media" and "pip install 'mlx-mesh[vision]'" in error["message"]
    assert front.chat("hello").status_code == 200


def test_a_template_without_a_place_refuses_pictures_and_says_so(
    start_front: Any, saying: Any, ids_of: IdsOf, model_with: Any
) -> None:
    template = "{% for m in messages %}{{ m.role }}{{ m.content | replace('<', '(') }}{% endfor %}"
    front = start_front(saying(ids_of("ok")), model=model_with(template), coordinator=SEES)
    error = front.post(CHAT, {"messages": [user(image_url(RED))]}).json()["error"]
    assert error["code"] == "unsupported_media" and "chat template has no place" in error["message"]


def test_why_a_model_with_a_tower_takes_no_pictures(
    start_front: Any, saying: Any, ids_of: IdsOf, seer: ModelTokenizer
) -> None:
    why = "it was started with --no-vision."
    front = start_front(saying(ids_of("ok")), model=seer, coordinator={"media_refusals": {"image": why}})
    error = front.post(CHAT, chat(image_url(RED))).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_media", FIRST)
    assert error["message"].endswith("; it was started with --no-vision.")
