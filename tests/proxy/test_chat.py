"""/v1/chat/completions over real HTTP, streamed and whole, against a scripted coordinator."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk, TokenLogprobs
from mlx_mesh.proxy.tokenizer import ModelTokenizer

IdsOf = Callable[[str], list[int]]
CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}


def text_of(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content", "")
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
    )


def finish_reasons(events: list[Any]) -> list[str]:
    return [
        choice["finish_reason"]
        for event in events
        if isinstance(event, dict)
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    ]


def test_a_whole_answer_has_openais_shape(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    ids = ids_of("Paris is the capital")
    front = start_front(saying(ids, cached_tokens=3, prefill_s=0.5))
    response = front.chat("hello")
    assert response.status_code == 200
    assert response.headers["x-mlx-mesh-world-size"] == "2"
    body = response.json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["model"] == "mlx-community/tiny-model"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["content"] == "Paris is the capital"
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    num_prompt = len(front.coordinator.requests[0].prompt_ids)
    assert usage["prompt_tokens"] == usage["input_tokens"] == num_prompt
    assert usage["completion_tokens"] == usage["output_tokens"] == len(ids)
    assert usage["total_tokens"] == num_prompt + len(ids)
    assert usage["tokens_per_second"] > 0
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}
    assert usage["prompt_tokens_per_second"] == pytest.approx((num_prompt - 3) / 0.5, abs=0.01)


def test_a_stream_has_a_role_one_finish_a_usage_chunk_and_done(
    start_front: Any, saying: Any, ids_of: IdsOf
) -> None:
    ids = ids_of("one two")
    front = start_front(saying(ids, finish="stop"))
    events = front.events(CHAT, {**USER, "stream_options": {"include_usage": True}})
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert text_of(events) == "one two"
    assert finish_reasons(events) == ["stop"]
    assert events[-1] == "[DONE]"
    assert events[-2]["choices"] == [] and events[-2]["object"] == "chat.completion.chunk"
    assert events[-2]["usage"]["completion_tokens"] == len(ids)
    assert len(events) == 1 + len(ids) + 1 + 1 + 1  # role, a chunk per token, finish, usage, [DONE]
    assert all(event["usage"] is None for event in events[:-2])
    assert len({event["id"] for event in events[:-1]}) == 1


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}])
def test_without_include_usage_the_stream_has_no_usage_and_ends_with_done(
    start_front: Any, saying: Any, ids_of: IdsOf, options: Any
) -> None:
    front = start_front(saying(ids_of("one")))
    events = front.events(CHAT, {**USER, "stream_options": options})
    assert events[-1] == "[DONE]"
    assert not any("usage" in event for event in events[:-1])


@pytest.mark.parametrize("per_chunk", [1, 3, 100])
@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("1 2 3 4 5 6 7 8", "6", "1 2 3 4 5 "),
        ("we say hello world and go on", ["hello world"], "we say "),
        ("hello world", ["hello world"], ""),
        ("a b", ["zzz", "not there"], "a b"),
    ],
)
def test_stop_strings_end_the_answer_before_them_in_both_modes(
    start_front: Any, saying: Any, ids_of: IdsOf, said: str, stop: Any, expected: str, per_chunk: int
) -> None:
    front = start_front(saying(ids_of(said), finish="length", per_chunk=per_chunk))
    whole = front.chat(stop=stop).json()
    events = front.events(CHAT, {**USER, "stop": stop})
    assert whole["choices"][0]["message"]["content"] == text_of(events) == expected
    reason = "stop" if expected != said else "length"
    assert [whole["choices"][0]["finish_reason"]] == finish_reasons(events) == [reason]


def test_a_stop_string_cancels_the_request_and_usage_counts_up_to_it(start_front: Any, ids_of: IdsOf) -> None:
    ids = ids_of("go on and stop")

    async def endless(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        for token_id in ids:
            yield TokenChunk(id="", token_ids=(token_id,))
        await asyncio.Event().wait()

    front = start_front(endless)
    body = front.chat(stop="stop").json()
    assert body["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "message": {"role": "assistant", "content": "go on and ", "refusal": None},
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert body["usage"]["completion_tokens"] == len(ids)
    assert front.coordinator.cancelled.get(timeout=5) == front.coordinator.requests[0].id


def test_a_stop_string_that_is_a_special_token_ends_the_engine_itself(
    start_front: Any, saying: Any, ids_of: IdsOf, tokenizer: ModelTokenizer
) -> None:
    front = start_front(saying(ids_of("a")))
    front.chat(stop=["<|im_start|>"])
    assert tokenizer.special_token_id("<|im_start|>") in front.coordinator.requests[0].stop_token_ids


def test_characters_are_never_split_in_either_mode(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    said = "你好 👩‍👩‍👧 žluťoučký"
    front = start_front(saying(ids_of(said)))
    events = front.events(CHAT, USER)
    assert text_of(events) == front.chat().json()["choices"][0]["message"]["content"] == said
    assert "�" not in str(events)
    cut = front.chat(max_tokens=2).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == ("", "length")


def test_the_newer_name_of_the_token_limit_wins(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("one two three four five six")))
    for fields in ({"max_completion_tokens": 5}, {"max_completion_tokens": 5, "max_tokens": 50}):
        body = front.chat(**fields).json()
        assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (5, "length")


def test_the_token_limit_is_what_the_context_leaves_unless_given(
    start_front: Any, saying: Any, ids_of: IdsOf
) -> None:
    front = start_front(saying(ids_of("a")), coordinator={"context_length": 200})
    assert "x-mlx-mesh-max-tokens-clamped" not in front.chat().headers
    left = 200 - len(front.coordinator.requests[-1].prompt_ids)
    assert front.coordinator.requests[-1].max_tokens == left
    response = front.chat(max_tokens=100_000)
    assert response.headers["x-mlx-mesh-max-tokens-clamped"] == str(left)
    assert front.coordinator.requests[-1].max_tokens == left


def test_a_prompt_over_the_context_is_refused_with_numbers(
    start_front: Any, saying: Any, ids_of: IdsOf
) -> None:
    front = start_front(saying(ids_of("a")), coordinator={"context_length": 20})
    response = front.chat("x" * 30)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "context_length_exceeded",
        "messages",
    )
    assert "20 tokens" in error["message"]
    assert not front.coordinator.requests


def test_sampling_reaches_the_engine_as_given(
    start_front: Any, saying: Any, ids_of: IdsOf, tokenizer: ModelTokenizer
) -> None:
    front = start_front(saying(ids_of("a")))
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "repetition_context_size": 64,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"7": -100, "8": 2.5},
        "xtc_probability": 0.5,
        "xtc_threshold": 0.1,
        "seed": 42,
    }
    assert front.chat(**given).status_code == 200
    sampling = front.coordinator.requests[0].sampling
    for name, value in given.items():
        assert getattr(sampling, name) == ({7: -100, 8: 2.5} if name == "logit_bias" else value)
    assert sampling.xtc_kept == (*tokenizer.end_token_ids, *ids_of("\n"))
    assert front.coordinator.requests[0].logprobs is None


def test_without_a_seed_every_request_draws_its_own(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("a")))
    for _ in range(3):
        front.chat(temperature=None)
    requests = front.coordinator.requests
    assert len({request.sampling.seed for request in requests}) == 3
    assert requests[0].sampling.temperature == 1.0


def test_top_p_zero_means_the_most_probable_token(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("a")))
    front.chat(temperature=1, top_p=0)
    assert front.coordinator.requests[0].sampling.temperature == 0.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"temperature": "0.5"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"logit_bias": {"7": 101}}, "logit_bias.7"),
        ({"logit_bias": {"seven": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"seed": "x"}, "seed"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": 6}, "stop"),
        ({"logprobs": 2}, "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include": True}}, "stream_options.include"),
        ({"n": 0}, "n"),
        ({"n": 17}, "n"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"enable_thinking": True}, "enable_thinking"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs.tools"),
        ({"thinking_budget": -1}, "thinking_budget"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
        ({"conversation_id": "a b"}, "conversation_id"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            "response_format.json_schema.schema",
        ),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"made_up": 1}, "made_up"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"top_n_sigma": 1.5}, "top_n_sigma"),
        ({"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}, "messages[0].function_call"),
    ],
)
def test_a_bad_field_is_refused_by_name(plain_front: Any, fields: dict[str, Any], param: str) -> None:
    num_before = len(plain_front.coordinator.requests)
    for stream in (False, True):
        response = plain_front.post(CHAT, {**USER, **fields, "stream": fields.get("stream", stream)})
        error = response.json()["error"]
        assert response.status_code == 400
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert param.split("[")[0].split(".")[-1] in error["message"] and error["code"]
    assert len(plain_front.coordinator.requests) == num_before


def test_null_is_absent_and_harmless_fields_are_taken(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("fine")))
    optional = ("model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n", "stop", "stream")
    more = (
        "tools",
        "tool_choice",
        "response_format",
        "logprobs",
        "top_logprobs",
        "logit_bias",
        "seed",
        "user",
    )
    nulls = dict.fromkeys((*optional, *more, "user", "stream_options", "unheard_of"))
    assert front.chat(**nulls).status_code == 200
    neutral = {
        "n": 1,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "parallel_tool_calls": True,
    }
    assert front.chat(**neutral).json()["choices"][0]["message"]["content"] == "fine"


def test_null_content_text_parts_and_tool_turns_reach_the_template(
    start_front: Any, saying: Any, ids_of: IdsOf, tokenizer: ModelTokenizer
) -> None:
    front = start_front(saying(ids_of("a")))
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "be"}, {"type": "text", "text": "brief"}]},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    response = front.post(CHAT, {"messages": messages})
    assert response.status_code == 200, response.text
    prompt = "".join(
        tokenizer.raw_token_bytes(token_id).decode() for token_id in front.coordinator.requests[0].prompt_ids
    )
    assert prompt == (
        "<|im_start|>system\nbe\nbrief<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_image_is_refused_naming_the_part(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("a")))
    parts = [{"type": "text", "text": "look"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    error = front.post(CHAT, {"messages": [{"role": "user", "content": parts}]}).json()["error"]
    assert (error["code"], error["param"]) == ("unsupported_media", "messages[0].content[1]")


def test_log_probabilities_have_bytes_and_the_best_alternatives(
    start_front: Any, chunks_of: Any, ids_of: IdsOf
) -> None:
    ids = ids_of("a好")
    (other,) = ids_of("z")

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        for token_id in ids:
            logprobs = TokenLogprobs(logprob=-0.5, top=((token_id, -0.5), (other, float("-inf"))))
            yield TokenChunk(id="", token_ids=(token_id,), logprobs=(logprobs,))
        yield TokenChunk(id="", finish_reason="stop")

    front = start_front(script)
    content = front.chat(logprobs=True, top_logprobs=2).json()["choices"][0]["logprobs"]["content"]
    assert front.coordinator.requests[0].logprobs == 2
    assert bytes(byte for entry in content for byte in entry["bytes"]).decode() == "a好"
    assert content[0]["token"] == "a" and content[1]["token"].startswith("bytes:\\x")
    assert content[0]["top_logprobs"][1] == {"token": "z", "logprob": -9999.0, "bytes": [122]}
    events = front.events(CHAT, {**USER, "logprobs": True, "top_logprobs": 2})
    streamed = [
        entry
        for event in events[:-1]
        for choice in event["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert streamed == content


def test_log_probabilities_of_tokens_in_a_stop_string_are_not_given_out(
    start_front: Any, ids_of: IdsOf
) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        for token_id in ids_of("x END"):
            yield TokenChunk(id="", token_ids=(token_id,), logprobs=(TokenLogprobs(logprob=-1.0),))
        yield TokenChunk(id="", finish_reason="length")

    front = start_front(script)
    choice = front.chat(logprobs=True, stop="END").json()["choices"][0]
    told = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    assert told.decode() == choice["message"]["content"] == "x "


def test_keepalive_comments_come_by_the_clock_while_nothing_is_generated(
    start_front: Any, chunks_of: Any, ids_of: IdsOf
) -> None:
    go_on = threading.Event()

    async def slow(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        await asyncio.to_thread(go_on.wait, 10)
        for chunk in chunks_of(ids_of("late")):
            yield chunk

    front = start_front(slow, keepalive_s=0.05)
    started = time.monotonic()
    with front.http.stream("POST", CHAT, json={**USER, "stream": True}) as response:
        lines = response.iter_lines()
        assert "assistant" in next(lines)
        assert time.monotonic() - started < 2  # the headers did not wait for a token
        comments = 0
        for line in lines:
            comments += line == ": keepalive"
            if comments == 3:
                go_on.set()
        assert comments >= 3


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_request(start_front: Any, stream: bool) -> None:
    submitted = threading.Event()

    async def endless(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        submitted.set()
        await asyncio.Event().wait()
        yield TokenChunk(id="")

    front = start_front(endless, keepalive_s=60.0)
    body = json.dumps({**USER, "stream": stream}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    client = socket.create_connection(("127.0.0.1", front.port))
    client.sendall(head.encode() + body)
    assert submitted.wait(10)
    if stream:
        assert client.recv(100).startswith(b"HTTP/1.1 200")
    gone = time.monotonic()
    client.close()
    assert front.coordinator.cancelled.get(timeout=5) == front.coordinator.requests[0].id
    assert time.monotonic() - gone < 1
    assert front.http.get("/health").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("code", "retry", "status"),
    [("queue_full", 3, 429), ("no_memory_for_context", 0, 500), ("rank_lost", 5, 503), ("invalid_x", 0, 400)],
)
def test_a_refusal_by_the_coordinator_is_a_status_in_both_modes(
    start_front: Any, stream: bool, code: str, retry: int, status: int
) -> None:
    async def refuse(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield Failed(id="", code=code, message="mac1 says no", retry_after_s=retry)

    response = start_front(refuse).chat(stream=stream)
    assert response.status_code == status
    assert response.json()["error"] | {"type": ""} == {
        "message": "mac1 says no",
        "type": "",
        "param": None,
        "code": code,
    }
    assert response.headers.get("retry-after") == (str(retry) if status in (429, 503) else None)


def test_an_error_after_the_first_byte_is_an_event_and_then_the_end(start_front: Any, ids_of: IdsOf) -> None:
    async def breaks(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=tuple(ids_of("some")))
        yield Failed(id="", code="rank_lost", message="mac1 is gone", retry_after_s=5)

    front = start_front(breaks)
    events = front.events(CHAT, USER)
    assert text_of(events[:-1]) == "some"
    assert events[-1]["error"]["code"] == "rank_lost" and "[DONE]" not in events
    response = front.chat()
    assert (response.status_code, response.headers["retry-after"]) == (503, "5")


def test_an_answer_that_the_mesh_cancels_is_an_error_and_not_a_short_answer(start_front: Any) -> None:
    async def cancelled(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", finish_reason="cancelled")

    response = start_front(cancelled).chat()
    assert (response.status_code, response.json()["error"]["code"]) == (503, "cancelled")


def test_while_the_mesh_is_not_ready_new_requests_are_told_when_to_come_back(
    start_front: Any, saying: Any, ids_of: IdsOf
) -> None:
    front = start_front(saying(ids_of("a")), ready=False)
    response = front.chat()
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) > 0
    assert "rank 1 on mac1 is loading" in response.json()["error"]["message"]
    front.set_ready(True)
    assert front.chat().status_code == 200
    front.drain()
    assert front.chat().json()["error"]["code"] == "draining"


def test_an_open_stream_waits_through_a_recovery(start_front: Any, ids_of: IdsOf) -> None:
    resume = threading.Event()
    ids = ids_of("before and after")

    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=tuple(ids[:2]))
        await asyncio.to_thread(resume.wait, 10)
        yield TokenChunk(id="", token_ids=tuple(ids[2:]), finish_reason="stop")

    front = start_front(script)
    with front.http.stream("POST", CHAT, json={**USER, "stream": True}) as response:
        parts = response.iter_text()
        received = next(parts)
        front.set_ready(False, "rank 1 died")
        assert front.http.get("/ready").status_code == 503
        front.set_ready(True)
        resume.set()
        received += "".join(parts)
    assert received.rstrip().endswith("data: [DONE]") and '"finish_reason":"stop"' in received


def test_requests_side_by_side_do_not_mix(
    start_front: Any, chunks_of: Any, tokenizer: ModelTokenizer, ids_of: IdsOf
) -> None:
    async def echo(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        said = tokenizer.decode(request.prompt_ids).split("\n")[1]
        for chunk in chunks_of(ids_of(said)):
            await asyncio.sleep(0)
            yield chunk

    front = start_front(echo)
    results: dict[int, str] = {}

    def ask(number: int) -> None:
        text = f"request {number} says {number * 'word '}."
        if number % 2:
            results[number] = front.chat(text).json()["choices"][0]["message"]["content"]
        else:
            messages = [{"role": "user", "content": text}]
            results[number] = text_of(front.events(CHAT, {"messages": messages}))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == {number: f"request {number} says {number * 'word '}." for number in range(16)}


def test_a_template_that_refuses_the_messages_is_the_clients_error(
    start_front: Any, saying: Any, ids_of: IdsOf, monkeypatch: pytest.MonkeyPatch, tokenizer: ModelTokenizer
) -> None:
    monkeypatch.setattr(tokenizer, "chat_template", "{{ raise_exception('roles must alternate') }}")
    response = start_front(saying(ids_of("a"))).chat()
    assert response.status_code == 400
    assert "roles must alternate" in response.json()["error"]["message"]
