"""Videos for a model that takes pictures alone: frames in the video's place, as pictures."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk, Video
from mlx_mesh.proxy.media.decode_child import outcome_of
from mlx_mesh.proxy.media.decoder import Decoder
from mlx_mesh.proxy.media.decoding import Outcome, Task
from mlx_mesh.proxy.media.item import Item, item_part, items_of, text_part
from mlx_mesh.proxy.media.stills import with_stills
from mlx_mesh.proxy.tokenizer import ModelTokenizer

MARK = "<|vision_start|><|image_pad|><|vision_end|>"
FIRST = "messages[0].content[0].video_url"


def film_of(num_frames: int, param: str = "a film") -> Item:
    item = Item("", param, kind="video")
    frames = tuple(b"%s %d" % (param.encode(), i) for i in range(num_frames))
    item.video = Video(frames=frames, fps=1.0, times=tuple(map(float, range(num_frames))))
    return item


def turn(*items: Item) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [text_part("A"), *map(item_part, items), text_part("B")]}]


def numbers(items: list[Item]) -> list[int]:
    return [int(item.file.split()[-1]) for item in items]


@pytest.mark.parametrize(
    ("num_frames", "shown"),
    [
        (1, [0]),
        (5, [0, 1, 2, 3, 4]),
        (16, list(range(16))),
        (31, list(range(0, 31, 2))),
    ],
)
def test_frames_stand_in_the_place_of_the_video_evenly_over_its_length(
    num_frames: int, shown: list[int]
) -> None:
    (made,) = with_stills(turn(film_of(num_frames)))
    assert [part["type"] for part in made["content"]] == ["text", *["image"] * len(shown), "text"]
    items = items_of([made])
    assert numbers(items) == shown
    assert {(item.kind, item.param, item.is_read) for item in items} == {("image", "a film", True)}


def test_several_videos_have_equal_shares_of_a_prompt() -> None:
    picture = Item("", "a picture")
    picture.file = b"p 0"
    turns = [*turn(film_of(40, "one"), picture), *turn(film_of(3, "two"), film_of(40, "three"))]
    items = items_of(with_stills(turns))
    assert [item.param for item in items] == ["one"] * 5 + ["a picture"] + ["two"] * 3 + ["three"] * 5
    assert numbers(items)[:5] == [0, 10, 20, 29, 39]
    assert [item.kind for item in items_of(turns)] == ["video", "image", "video", "video"]
    many = items_of(with_stills(turn(*(film_of(4, f"{i}") for i in range(20)))))
    assert len(many) == 20


def test_turns_without_a_video_are_as_they_were() -> None:
    turns = [{"role": "user", "content": "no film"}, *turn()]
    assert with_stills(turns) is turns


@pytest.fixture
def front(
    seer: ModelTokenizer,
    start_front: Any,
    ids_of: Callable[[str], list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    async def decode_here(self: Decoder, task: Task, data: bytes) -> Outcome:
        return outcome_of(task, data)

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        if request.media is not None and b"refuse" in request.media.text.encode():
            yield Failed(id="", code="invalid_image", message="no", param="images[3]")
            return
        yield TokenChunk(id="", token_ids=tuple(ids_of("fine")), finish_reason="stop")

    monkeypatch.setattr(Decoder, "_ask", decode_here)
    return start_front(script, model=seer, coordinator={"media": ("image", "stills")})


def chat(film: bytes, words: str = "what?", **more: Any) -> dict[str, Any]:
    url = "data:video/mp4;base64," + base64.b64encode(film).decode()
    part = {"type": "video_url", "video_url": {"url": url}}
    content = [part, {"type": "text", "text": words}]
    return {"messages": [{"role": "user", "content": content}], **more}


def test_the_engine_gets_pictures_and_a_mark_for_each(front: Any, clips: Any) -> None:
    assert front.post("/v1/chat/completions", chat(clips.film())).status_code == 200
    media = front.coordinator.requests[-1].media
    assert (len(media.images), media.videos) == (12, ())
    assert media.text.count(MARK * 12 + "what?") == 1
    long = chat(clips.film(num_frames=200))
    assert front.post("/v1/chat/completions", long).status_code == 200
    assert len(front.coordinator.requests[-1].media.images) == 16
    wished = chat(clips.film(), mm_processor_kwargs={"num_frames": 4})
    assert front.post("/v1/chat/completions", wished).status_code == 200
    assert len(front.coordinator.requests[-1].media.images) == 4
    # and no more frames were decoded than are shown
    assert "mlx_mesh_video_frames_total 32.0" in front.http.get("/metrics").text


def test_what_the_model_takes_is_said_and_errors_name_the_video(front: Any, clips: Any) -> None:
    told = front.http.get("/v1/capabilities").json()
    assert told["features"]["video"] and told["media"]["video"]["available"]
    broken = front.post("/v1/chat/completions", chat(clips.film()[:400])).json()["error"]
    assert (broken["code"], broken["param"]) == ("invalid_video", FIRST)
    refused = front.post("/v1/chat/completions", chat(clips.film(), "refuse"))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == FIRST
