"""Requests that broke other servers, as their users sent them. Each names where it was reported."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk
from mlx_mesh.proxy.schemas.chat import CHAT_FIELDS
from mlx_mesh.proxy.tokenizer import ModelTokenizer

CHAT = "/v1/chat/completions"
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


@pytest.fixture
def serve(start_front: Any, saying: Any, thinker: ModelTokenizer) -> Callable[..., Any]:
    """A front end whose model reasons and calls tools, and says this."""

    def start(text: str, **said: Any) -> Any:
        return start_front(
            saying(thinker.plain_ids(text), **said), model=thinker, coordinator={"context_length": 4000}
        )

    return start


def both(front: Any, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choice of the whole answer, and the streamed one put together."""
    whole = front.post(CHAT, body)
    assert whole.status_code == 200, whole.text
    message: dict[str, Any] = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    ends = []
    events = front.events(CHAT, body)
    assert events[-1] == "[DONE]"
    for event in events[:-1]:
        for choice in event["choices"] if isinstance(event, dict) else ():
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
            for key in ("content", "reasoning_content"):
                message[key] += choice["delta"].get(key) or ""
            for part in choice["delta"].get("tool_calls", ()):
                calls += [part] if "id" in part else []
                if "id" not in part:
                    calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    assert len(ends) == 1, "exactly one chunk has a finish_reason"
    streamed = {"message": {**message, "tool_calls": calls}, "finish_reason": ends[0]}
    choice = whole.json()["choices"][0]
    plain = {"reasoning_content": "", "tool_calls": [], **choice["message"]}
    plain["content"] = plain["content"] or ""
    assert {key: plain[key] for key in message} == message
    assert [call["function"] for call in plain["tool_calls"]] == [call["function"] for call in calls]
    assert choice["finish_reason"] == ends[0]
    return [{"message": plain, "finish_reason": ends[0]}, streamed]


def test_null_content_in_a_tool_turn(serve: Any, thinker: ModelTokenizer) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/185"""
    front = serve("</think>Five.")
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'}}
    messages = [
        {"role": "user", "content": "What is 2+3?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "5"},
    ]
    for choice in both(front, {"messages": messages, "tools": [ADD]}):
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Five.", "stop")
    assert "None" not in thinker.decode(front.coordinator.requests[0].prompt_ids)


@pytest.mark.parametrize("fields", [{}, {"max_tokens": 50}])
def test_max_completion_tokens_alone_and_beside_the_older_name(serve: Any, fields: dict[str, Any]) -> None:
    """https://github.com/asher/gmlx/issues/66"""
    front = serve("</think>" + "word " * 60)
    body = {"messages": [{"role": "user", "content": "go"}], "max_completion_tokens": 5, **fields}
    for choice in both(front, body):
        assert choice["finish_reason"] == "length"
    assert front.post(CHAT, body).json()["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize(
    ("said", "stop", "expected"),
    [
        ("1, 2, 3, 4, 5, 6, 7, 8, 9, 10", "6", "1, 2, 3, 4, 5, "),
        ("I say hello world to you", ["hello world"], "I say "),
        ("hello world", ["hello world"], ""),
    ],
)
@pytest.mark.parametrize("per_chunk", [1, 4])
def test_stop_strings(serve: Any, said: str, stop: Any, expected: str, per_chunk: int) -> None:
    """https://github.com/lablup/mlxcel/issues/1466 and https://github.com/smg-project/smg/pull/1447"""
    front = serve(f"</think>{said}", per_chunk=per_chunk)
    for choice in both(front, {"messages": [{"role": "user", "content": "count"}], "stop": stop}):
        assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")


def test_usage_comes_in_one_more_chunk_with_the_cached_tokens(serve: Any, thinker: ModelTokenizer) -> None:
    """https://github.com/ARahim3/mlx-dspark/issues/37 and https://github.com/jundot/omlx/issues/919"""
    said = "</think>fine"
    front = serve(said, cached_tokens=7)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}}
    events = front.events(CHAT, body)
    last = events[-2]
    assert (last["choices"], last["object"], events[-1]) == ([], "chat.completion.chunk", "[DONE]")
    whole = front.post(CHAT, {"messages": body["messages"]}).json()["usage"]
    for used in (last["usage"], whole):
        assert used["completion_tokens"] == len(thinker.plain_ids(said))
        assert used["prompt_tokens_details"]["cached_tokens"] == 7
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]


def test_a_call_is_plural_and_its_arguments_are_text(serve: Any) -> None:
    """https://github.com/Blaizzy/mlx-vlm/pull/964 and https://github.com/waybarrios/vllm-mlx/issues/107"""
    front = serve(f"Let me add.</think>\n\n{CALL}")
    body = {"messages": [{"role": "user", "content": "2+3?"}], "tools": [ADD]}
    for choice in both(front, body):
        assert choice["finish_reason"] == "tool_calls"
        (call,) = choice["message"]["tool_calls"]
        assert isinstance(call["function"]["arguments"], str)
        assert json.loads(call["function"]["arguments"]) == {"a": 2, "b": 3}
        assert choice["message"]["content"] == ""
    first = next(
        event["choices"][0]["delta"]["tool_calls"][0]
        for event in front.events(CHAT, body)
        if isinstance(event, dict) and "tool_calls" in event["choices"][0]["delta"]
    )
    assert {"index", "id", "type", "function"} == set(first) and first["function"]["name"] == "add"


def test_a_final_answer_in_text_is_content_though_five_tools_are_given(serve: Any) -> None:
    """https://github.com/Blaizzy/mlx-vlm/issues/1850"""
    tools = [{**ADD, "function": {**ADD["function"], "name": f"add_{at}"}} for at in range(5)]  # type: ignore[dict-item]
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": tools}
    for choice in both(serve("They greet me.\n</think>\n\nHello!"), body):
        assert choice["message"]["content"] == "Hello!"
        assert choice["message"]["reasoning_content"] == "They greet me."


@pytest.mark.parametrize("said", ["why\n</think>\n\nso", "</thin</think>so", "a </ b </think>so"])
@pytest.mark.parametrize("per_chunk", [1, 2, 3, 5, 8])
def test_a_tag_cut_across_chunks_leaves_nothing_of_it(serve: Any, said: str, per_chunk: int) -> None:
    """https://github.com/youssofal/MTPLX/pull/149"""
    front = serve(said, per_chunk=per_chunk)
    for choice in both(front, {"messages": [{"role": "user", "content": "?"}]}):
        assert choice["message"]["content"] == "so"
        assert "think>" not in choice["message"]["reasoning_content"]


def test_emoji_cjk_and_czech_are_never_split(serve: Any) -> None:
    """https://github.com/waybarrios/vllm-mlx/pull/109"""
    text = "👩‍👩‍👧‍👦 žluťoučký kůň 你好，世界 🇨🇿"
    front = serve(f"</think>{text}")
    body = {"messages": [{"role": "user", "content": "?"}], "n": 2}
    events = front.events(CHAT, body)
    assert "\N{REPLACEMENT CHARACTER}" not in json.dumps(events, ensure_ascii=False)
    texts = {0: "", 1: ""}
    for event in events[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == {0: text, 1: text}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,!!!"}},
        {"type": "image_url", "image_url": {"url": "https://127.0.0.1:1/none.png"}},
        {"type": "input_audio", "input_audio": {"data": "", "format": "wav"}},
        {"type": "file", "file": {"file_id": "x"}},
    ],
)
def test_media_to_a_text_model_is_an_error_that_names_the_part_and_fetches_nothing(
    serve: Any, part: Any
) -> None:
    """https://github.com/raullenchai/Rapid-MLX/issues/457"""
    front = serve("x")
    content = [{"type": "text", "text": "what is this?"}, part]
    response = front.post(CHAT, {"messages": [{"role": "user", "content": content}]})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_media",
        "messages[0].content[1]",
    )
    assert not front.coordinator.requests


def test_content_as_a_list_of_text_parts(serve: Any, thinker: ModelTokenizer) -> None:
    """https://github.com/ml-explore/mlx-examples/issues/1195"""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    front = serve("</think>ok")
    both(front, {"messages": [{"role": "system", "content": parts}, {"role": "user", "content": parts}]})
    assert thinker.decode(front.coordinator.requests[0].prompt_ids).startswith("system\na\nb\nuser\na\nb\n")


def test_sixteen_answers_with_reasoning_and_calls_side_by_side_equal_those_alone(
    start_front: Any, chunks_of: Any, thinker: ModelTokenizer
) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/965"""

    async def echo(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        number = int(thinker.decode(request.prompt_ids).split("number ")[1].split()[0])
        call = CALL.replace("2", str(number)) if number % 3 == 0 else ""
        said = f"thought {number}</think>answer {number} {'on ' * number}{call}"
        for chunk in chunks_of(thinker.plain_ids(said), per_chunk=1 + number % 4):
            await asyncio.sleep(0)
            yield chunk

    front = start_front(echo, model=thinker, coordinator={"context_length": 4000})

    def ask(number: int) -> Any:
        body = {"messages": [{"role": "user", "content": f"number {number} "}], "tools": [ADD]}
        if number % 2:
            message = front.post(CHAT, body).json()["choices"][0]["message"]
            calls = [call["function"] for call in message.get("tool_calls", ())]
            return message["content"], message["reasoning_content"], calls
        message = both(front, body)[1]["message"]
        calls = [call["function"] for call in message["tool_calls"]]
        return message["content"], message["reasoning_content"], calls

    alone = {number: ask(number) for number in range(16)}
    together: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda at=number: together.__setitem__(at, ask(at))) for number in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert together == alone
    assert alone[3][1] == "thought 3" and alone[3][2][0]["name"] == "add"


@pytest.mark.parametrize("fields", [{}, {"seed": 1}])
def test_a_reset_connection_ends_the_generation_and_the_next_request_is_served(
    start_front: Any, thinker: ModelTokenizer, fields: dict[str, Any]
) -> None:
    """https://github.com/jundot/omlx/issues/3013"""

    async def endless(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=thinker.plain_ids("</think>some"))
        if request.max_tokens == 7:
            yield TokenChunk(id="", finish_reason="stop")
        await asyncio.Event().wait()

    front = start_front(endless, model=thinker)
    message = [{"role": "user", "content": "hi"}]
    for at in range(5):
        body = json.dumps({"messages": message, "stream": True, **fields}).encode()
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", front.port), timeout=20) as client:
            client.sendall(head.encode() + body)
            received = b""
            while received.count(b'"content"') < 2:  # the opening, and text
                received += client.recv(1000)
            # Closing with a linger time of zero resets the connection.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        assert front.coordinator.cancelled.get(timeout=5) == front.coordinator.requests[2 * at].id
        started = time.monotonic()
        assert front.post(CHAT, {"messages": message, "max_tokens": 7}).status_code == 200
        assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b'{"messages": []}', 400, "messages"),
        (b"{}", 400, "messages"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 0}', 400, "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400, "max_tokens"),
        (b'{"messages": [{"role": "user", "content": "x"}], "temperature": "0.5"}', 400, "temperature"),
        (b"not json", 400, None),
        (b'{"messages": [{"role": "user", "content": "' + b"long " * 2_000_000 + b'"}]}', 400, "messages"),
        (b" " * (33 * 1024 * 1024), 413, None),
    ],
)
def test_bad_requests_are_answered_fast_in_openais_envelope(
    plain_front: Any, body: bytes, status: int, param: str | None
) -> None:
    """https://github.com/raullenchai/Rapid-MLX/issues/463 and https://github.com/ROCm/ATOM/pull/2188"""
    started = time.monotonic()
    response = plain_front.http.post(CHAT, content=body)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.json()["error"]["param"] == param
    assert time.monotonic() - started < 10


def test_a_malformed_call_among_good_ones_does_not_end_the_stream(serve: Any) -> None:
    """https://github.com/ml-explore/mlx-lm/issues/607"""
    broken = "<tool_call>\n{'name': add}\n</tool_call>"
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [ADD]}
    for choice in both(serve(f"</think>{broken}\n{CALL}"), body):
        assert choice["message"]["content"] == broken
        assert len(choice["message"]["tool_calls"]) == 1
        assert choice["finish_reason"] == "tool_calls"


def test_every_optional_field_may_be_null(serve: Any) -> None:
    """https://github.com/containers/ramalama/issues/2465"""
    names = set(CHAT_FIELDS.honoured) - {"messages"} | set(CHAT_FIELDS.refused) | set(CHAT_FIELDS.ignored)
    message = {"role": "user", "content": "hi", "name": None, "tool_calls": None, "tool_call_id": None}
    response = serve("</think>ok").post(CHAT, {"messages": [message], **dict.fromkeys(names)})
    assert response.status_code == 200, response.text
