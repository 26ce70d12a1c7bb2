"""/v1/completions over real HTTP against a scripted coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk, TokenLogprobs
from mlx_mesh.proxy.tokenizer import ModelTokenizer

IdsOf = Callable[[str], list[int]]
PATH = "/v1/completions"


@pytest.fixture
def upper(chunks_of: Any, ids_of: IdsOf, tokenizer: ModelTokenizer) -> Any:
    """Continues each prompt with itself in capitals."""

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        for chunk in chunks_of(ids_of(tokenizer.decode(request.prompt_ids).upper())):
            yield chunk

    return script


def test_a_whole_answer_has_openais_shape(start_front: Any, upper: Any) -> None:
    body = start_front(upper).post(PATH, {"prompt": "say it"}).json()
    assert body["object"] == "text_completion" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "SAY IT", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + len("SAY IT")


def test_a_stream_begins_with_a_comment_and_ends_with_usage_and_done(start_front: Any, upper: Any) -> None:
    front = start_front(upper)
    events = front.events(PATH, {"prompt": "abc", "stream_options": {"include_usage": True}})
    assert events[0] == ": keepalive" and events[-1] == "[DONE]"
    choices = [choice for event in events[1:-1] for choice in event["choices"]]
    assert "".join(choice["text"] for choice in choices) == "ABC"
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert events[-2]["choices"] == [] and events[-2]["usage"]["completion_tokens"] == 3


def test_token_ids_are_shown_when_asked_for(start_front: Any, upper: Any, ids_of: IdsOf) -> None:
    front = start_front(upper)
    asked = {"prompt": ["abc", "de"], "return_token_ids": True, "logprobs": 1}
    for number, (choice, text) in enumerate(
        zip(front.post(PATH, asked).json()["choices"], ("abc", "de"), strict=True)
    ):
        assert choice["prompt_token_ids"] == ids_of(text) and choice["token_ids"] == ids_of(text.upper())
        seen: dict[str, list[int]] = {"token_ids": [], "prompt_token_ids": []}
        for event in front.events(PATH, asked)[:-1]:
            for part in event["choices"]:
                if part["index"] == number:
                    assert len(part["token_ids"]) == len(part["logprobs"]["tokens"])
                    for name, ids in seen.items():
                        ids += part.get(name, [])
        assert seen == {"token_ids": ids_of(text.upper()), "prompt_token_ids": ids_of(text)}


def test_several_prompts_give_a_choice_each_in_order(start_front: Any, upper: Any) -> None:
    front = start_front(upper)
    body = front.post(PATH, {"prompt": ["one", "two", "three"]}).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "ONE"), (1, "TWO"), (2, "THREE")]
    assert body["usage"]["prompt_tokens"] == sum(len(r.prompt_ids) for r in front.coordinator.requests)
    events = front.events(PATH, {"prompt": ["one", "two", "three"]})
    texts = ["", "", ""]
    for event in events[1:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == ["ONE", "TWO", "THREE"]


def test_prompts_may_be_token_ids(start_front: Any, upper: Any, ids_of: IdsOf) -> None:
    front = start_front(upper)
    assert front.post(PATH, {"prompt": ids_of("abc")}).json()["choices"][0]["text"] == "ABC"
    body = front.post(PATH, {"prompt": [ids_of("ab"), ids_of("cd")]}).json()
    assert [choice["text"] for choice in body["choices"]] == ["AB", "CD"]
    error = front.post(PATH, {"prompt": [5, 99_999]}).json()["error"]
    assert (error["param"], "99999" in error["message"]) == ("prompt", True)


def test_an_empty_prompt_starts_from_the_beginning_of_text(start_front: Any, upper: Any) -> None:
    front = start_front(upper)
    assert front.post(PATH, {"prompt": ""}).status_code == 200
    assert front.coordinator.requests[0].prompt_ids == (0,)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt[1]"),
        ({"prompt": ["a", [5]]}, "prompt[1]"),
        ({"prompt": [[5], "a"]}, "prompt[1]"),
        ({"prompt": "a", "max_time_s": 0}, "max_time_s"),
        ({"prompt": "a", "max_time_s": "5"}, "max_time_s"),
        ({"prompt": [1, True]}, "prompt[0]"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["a"] * 65}, "prompt"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "echo"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "p_less": True}, "p_less"),
        ({"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        ({"prompt": "a", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": ["a"] * 64, "n": 2}, "n"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "logprobs": True}, "logprobs"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
)
def test_a_bad_field_is_refused_by_name(plain_front: Any, fields: dict[str, Any], param: str) -> None:
    response = plain_front.post(PATH, fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def test_neutral_values_of_refused_fields_are_taken(start_front: Any, upper: Any) -> None:
    fields = {"prompt": "a", "n": 1, "best_of": 1, "echo": False, "suffix": "", "user": "me"}
    fields |= {"typical_p": 1, "p_less": False}
    assert start_front(upper).post(PATH, fields).status_code == 200


def test_log_probabilities_have_the_legacy_shape(start_front: Any, ids_of: IdsOf) -> None:
    (a, b), (z,) = ids_of("ab"), ids_of("z")

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        for token_id in (a, b):
            top = ((token_id, -0.25), (z, -2.0))
            yield TokenChunk(id="", token_ids=(token_id,), logprobs=(TokenLogprobs(logprob=-0.25, top=top),))
        yield TokenChunk(id="", finish_reason="length")

    body = start_front(script).post(PATH, {"prompt": "x", "logprobs": 2}).json()
    assert body["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.25, -0.25],
        "top_logprobs": [{"a": -0.25, "z": -2.0}, {"b": -0.25, "z": -2.0}],
        "text_offset": [0, 1],
    }


def test_one_failing_sequence_fails_the_request_and_cancels_the_others(start_front: Any) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        if request.id.endswith("-0"):
            yield Failed(id="", code="queue_full", message="full", retry_after_s=1)
        else:
            await asyncio.Event().wait()

    front = start_front(script)
    response = front.post(PATH, {"prompt": ["one", "two"]})
    assert (response.status_code, response.json()["error"]["code"]) == (429, "queue_full")
    assert front.coordinator.cancelled.get(timeout=5).endswith("-1")
