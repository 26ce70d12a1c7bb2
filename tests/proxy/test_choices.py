"""Several answers to one request, the prompt in the answer, ids of conversations, and the end on request."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk, TokenLogprobs

IdsOf = Callable[[str], list[int]]
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def numbered(start_front: Any, ids_of: IdsOf) -> Any:
    """Every sequence says the last part of its id; the later, the more probable."""

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        number = request.id.rpartition("-")[2]
        for token_id in ids_of(f"choice {number}"):
            logprobs = (TokenLogprobs(logprob=-9.0 + int(number)),) if request.logprobs is not None else ()
            yield TokenChunk(id="", token_ids=(token_id,), logprobs=logprobs, cached_tokens=1, prefill_s=0.5)
            await asyncio.sleep(0)
        yield TokenChunk(id="", finish_reason="stop")

    return start_front(script)


def test_n_choices_share_the_prompt_and_the_first_is_that_of_n_1(numbered: Any, ids_of: IdsOf) -> None:
    body = numbered.chat(n=3, seed=7).json()
    assert [choice["message"]["content"] for choice in body["choices"]] == [
        "choice 0",
        "choice 1",
        "choice 2",
    ]
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    requests = numbered.coordinator.requests
    assert len({request.prompt_ids for request in requests}) == 1
    assert requests[0].sampling.seed == 7
    assert len({request.sampling.seed for request in requests}) == 3
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(requests[0].prompt_ids)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1
    assert usage["completion_tokens"] == 3 * len(ids_of("choice 0"))
    assert usage["timings"]["prompt_ms"] == 500.0


def test_streamed_choices_have_a_role_and_an_end_each(numbered: Any) -> None:
    events = numbered.events(CHAT, {**USER, "n": 2})
    texts, ends, roles = {0: "", 1: ""}, [], []
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            roles += [choice["index"]] if "role" in choice["delta"] else []
            ends += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "choice 0", 1: "choice 1"}
    assert (sorted(roles), sorted(ends)) == ([0, 1], [0, 1])


def test_best_of_gives_the_most_probable_and_counts_them_all(numbered: Any, ids_of: IdsOf) -> None:
    body = numbered.post(TEXT, {"prompt": "a", "best_of": 4, "n": 2}).json()
    assert [choice["text"] for choice in body["choices"]] == ["choice 3", "choice 2"]
    assert [choice["index"] for choice in body["choices"]] == [0, 1]
    assert body["choices"][0]["logprobs"] is None
    assert body["usage"]["completion_tokens"] == 4 * len(ids_of("choice 0"))


def test_prompts_times_n_are_in_order(numbered: Any) -> None:
    body = numbered.post(TEXT, {"prompt": ["a", "b"], "n": 2}).json()
    assert [choice["text"] for choice in body["choices"]] == [f"choice {at}" for at in range(4)]


def test_echo_puts_the_prompt_before_the_answer_in_both_modes(numbered: Any, ids_of: IdsOf) -> None:
    body = {"prompt": [ids_of("say "), ids_of("tell ")], "echo": True}
    assert [c["text"] for c in numbered.post(TEXT, body).json()["choices"]] == [
        "say choice 0",
        "tell choice 1",
    ]
    texts = {0: "", 1: ""}
    for event in numbered.events(TEXT, body)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "say choice 0", 1: "tell choice 1"}


@pytest.mark.parametrize(
    ("fields", "headers", "expected"),
    [
        ({"conversation_id": "a"}, {"X-Conversation-Id": "b"}, "a"),
        ({"conversation": "c", "conversation_id": "a"}, {}, "c"),
        ({}, {"X-Conversation-Id": "b"}, "b"),
        ({"metadata": {"conversation_id": "d"}}, {}, "d"),
        ({"metadata": {"other": "d"}}, {}, "default"),
    ],
)
def test_the_conversations_id_comes_back(
    plain_front: Any, fields: dict[str, Any], headers: dict[str, str], expected: str
) -> None:
    response = plain_front.post(CHAT, {**USER, **fields}, headers=headers)
    assert response.headers.get("x-conv-id") == expected
    assert response.json().get("metadata", {}).get("conversation_id") == expected
    with plain_front.http.stream(
        "POST", CHAT, json={**USER, **fields, "stream": True}, headers=headers
    ) as stream:
        assert stream.headers.get("x-conv-id") == expected


@pytest.mark.parametrize("stream", [False, True])
def test_an_open_answer_ends_on_request_on_all_ranks(start_front: Any, ids_of: IdsOf, stream: bool) -> None:
    started = threading.Event()

    async def endless(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=tuple(ids_of("some")))
        started.set()
        await asyncio.Event().wait()

    front = start_front(endless)
    answers: list[Any] = []

    def ask() -> None:
        answers.append(front.post(CHAT, {**USER, "stream": stream}, headers={"X-Request-Id": "mine-1"}))

    thread = threading.Thread(target=ask)
    thread.start()
    assert started.wait(10)
    assert front.http.post("/v1/requests/mine-1/cancel").json()["cancelled"] is True
    thread.join(10)
    (response,) = answers
    assert response.headers["x-request-id"] == "mine-1"
    assert "request_cancelled" in response.text and "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 400)
    assert front.coordinator.cancelled.get(timeout=5) == front.coordinator.requests[0].id
    again = front.http.post("/v1/requests/mine-1/cancel")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "request_not_found")


def test_a_stream_is_ended_by_the_id_that_it_shows(start_front: Any, ids_of: IdsOf) -> None:
    async def endless(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=tuple(ids_of("some")))
        await asyncio.Event().wait()

    front = start_front(endless)
    for path, body, cancel in (
        (CHAT, USER, "/v1/requests/{}/cancel"),
        ("/v1/responses", {"input": "hi"}, "/v1/responses/{}/cancel"),
        ("/v1/messages", {**USER, "max_tokens": 9}, "/v1/requests/{}/cancel"),
    ):
        with front.http.stream("POST", path, json={**body, "stream": True}) as response:
            lines = response.iter_lines()
            first = next(line for line in lines if line.startswith("data: "))
            (answer_id,) = re.findall(r'"id":"((?:chatcmpl-|resp_|msg_)\w+)"', first)
            assert front.http.post(cancel.format(answer_id)).status_code == 200
            assert "was cancelled" in "".join(lines)
        assert front.coordinator.cancelled.get(timeout=5) == answer_id
    assert front.http.post("/v1/responses/resp_1/cancel").status_code == 404


def test_models_list_their_aliases_and_each_of_them_is_taken(plain_front: Any, model_folder: Any) -> None:
    (first, _) = plain_front.http.get("/v1/models").json()["data"]
    assert first["aliases"] == ["mlx-community/tiny-model", "local", "tiny-model", "default"]
    for name in (*first["aliases"], str(model_folder)):
        assert plain_front.chat(model=name).status_code == 200
    assert plain_front.chat(model="gpt-4o").status_code == 404
