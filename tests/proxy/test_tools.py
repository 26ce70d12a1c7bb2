"""Tool calls over HTTP, streamed and whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk
from mlx_mesh.proxy.tokenizer import ModelTokenizer

CHAT = "/v1/chat/completions"
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def serve(start_front: Any, saying: Any, thinker: ModelTokenizer) -> Callable[..., Any]:
    """A front end whose model reasons and calls tools, and says this."""
    return lambda text, **options: start_front(saying(thinker.plain_ids(text)), model=thinker, **options)


def joined(events: list[Any]) -> dict[str, Any]:
    """A stream put together as clients do it."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "reasoning": "", "tool_calls": []}
    finish = []
    for event in events:
        for choice in event["choices"] if isinstance(event, dict) else ():
            finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            for key in ("content", "reasoning_content", "reasoning"):
                message[key] += choice["delta"].get(key, "")
            for part in choice["delta"].get("tool_calls", ()):
                if "id" in part:
                    assert part["index"] == len(message["tool_calls"])
                    message["tool_calls"].append(json.loads(json.dumps(part)))
                else:
                    call = message["tool_calls"][part["index"]]
                    call["function"]["arguments"] += part["function"]["arguments"]
    assert events[-1] == "[DONE]"
    return {**message, "finish": finish}


@pytest.mark.parametrize("text", ["", "I will look.\n\n"])
def test_calls_come_as_openai_sends_them_in_both_modes(serve: Any, families: Any, text: str) -> None:
    long = {"name": "add", "arguments": {"x": "long " * 200}}
    calls = [f"<tool_call>{call}</tool_call>" for call in (families.JSON_CALL, json.dumps(long))]
    said = "</think>\n\n" + text + "\n".join(calls)
    front = serve(said, coordinator={"context_length": 5000})
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [families.WEATHER, ADD]}
    (choice,) = front.post(CHAT, body).json()["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == (text.strip() or None)
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["get_weather", "add"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == families.ARGUMENTS
    assert all(call["type"] == "function" and call["id"] for call in message["tool_calls"])
    events = front.events(CHAT, body)
    stream = joined(events)
    assert stream["finish"] == ["tool_calls"] and stream["content"] == text.strip()
    for call, whole in zip(stream["tool_calls"], message["tool_calls"], strict=True):
        assert call["function"] == whole["function"]
    assert sum("tool_calls" in str(event) for event in events) > 5, "arguments come in parts"
    assert "<tool_call>" not in json.dumps(events)


def test_the_template_sees_the_tools_and_none_hides_them(
    serve: Any, families: Any, thinker: ModelTokenizer
) -> None:
    front = serve(f"</think><tool_call>{families.JSON_CALL}</tool_call>")
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [families.WEATHER]}
    for choice, is_shown in (("auto", True), ("none", False)):
        answer = front.post(CHAT, {**body, "tool_choice": choice}).json()["choices"][0]
        prompt = thinker.decode(front.coordinator.requests[-1].prompt_ids)
        assert ("get_weather" in prompt) is is_shown
        assert (answer["finish_reason"] == "tool_calls") is is_shown
        assert bool(answer["message"].get("tool_calls")) is is_shown


def test_without_parallel_calls_the_first_one_ends_the_answer_on_all_ranks(
    start_front: Any, thinker: ModelTokenizer, families: Any
) -> None:
    async def endless(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(
            id="", token_ids=thinker.plain_ids(f"</think><tool_call>{families.JSON_CALL}</tool_call>")
        )
        await asyncio.Event().wait()

    front = start_front(endless, model=thinker)
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [families.WEATHER]}
    answer = front.post(CHAT, {**body, "parallel_tool_calls": False}).json()["choices"][0]
    assert (answer["finish_reason"], len(answer["message"]["tool_calls"])) == ("tool_calls", 1)
    assert front.coordinator.cancelled.get(timeout=5) == front.coordinator.requests[0].id


@pytest.mark.parametrize(
    "broken", ['<tool_call>{"name": "get_w', "<tool_call>{oops}</tool_call>", "<tool_call>"]
)
def test_a_broken_call_is_text_in_both_modes(serve: Any, families: Any, broken: str) -> None:
    front = serve(f"</think>Look: {broken}")
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [families.WEATHER]}
    answer = front.post(CHAT, body).json()["choices"][0]
    stream = joined(front.events(CHAT, body))
    assert answer["message"]["content"] == stream["content"] == f"Look: {broken}"
    assert [answer["finish_reason"]] == stream["finish"] == ["stop"]


def test_a_call_that_the_limit_cuts_is_a_length(serve: Any, families: Any) -> None:
    front = serve(f"</think>x<tool_call>{families.JSON_CALL}</tool_call>")
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [families.WEATHER], "max_tokens": 30}
    answer = front.post(CHAT, body).json()["choices"][0]
    assert answer["finish_reason"] == "length" and answer["message"]["content"].startswith("x<tool_call>")
    assert joined(front.events(CHAT, body))["finish"] == ["length"]


def test_an_answer_in_text_after_reasoning_is_in_the_content_though_tools_are_given(
    serve: Any, families: Any
) -> None:
    front = serve("No tool is needed.</think>\n\nIt is sunny.", coordinator={"context_length": 5000})
    body = {"messages": [{"role": "user", "content": "?"}], "tools": [families.WEATHER, ADD] * 2}
    stream = joined(front.events(CHAT, body))
    assert (stream["content"], stream["reasoning_content"]) == ("It is sunny.", "No tool is needed.")


def test_a_turn_with_calls_and_null_content_reaches_the_template(
    serve: Any, thinker: ModelTokenizer, families: Any
) -> None:
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Brno"}'},
    }
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "5", "tool_call_id": "1"},
    ]
    front = serve("</think>fine")
    events = front.events(CHAT, {"messages": messages, "tools": [families.WEATHER]})
    assert joined(events)["content"] == "fine"
    prompt = thinker.decode(front.coordinator.requests[0].prompt_ids)
    assert "assistant\n(hm)[get_weather Brno]" in prompt and "None" not in prompt


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "subtract"}}}, "tool_choice"),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"name": "add"}]}},
            "tool_choice",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [3]}},
            "tool_choice.tools[0]",
        ),
        ({"tool_choice": {"type": "allowed_tools", "mode": "required", "tools": 3}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools[0].type"),
        ({"tools": [ADD, {"type": "function"}]}, "tools[1].function"),
        ({"tools": [{"type": "function", "function": {"name": "no spaces"}}]}, "tools[0].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [ADD] * 513}, "tools"),
        ({"tools": "add"}, "tools"),
    ],
)
def test_what_cannot_be_done_with_tools_is_refused_by_name(serve: Any, fields: Any, param: str) -> None:
    front = serve("x")
    response = front.post(CHAT, {"messages": [{"role": "user", "content": "?"}], "tools": [ADD], **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert not front.coordinator.requests


def test_the_official_client_reads_calls_in_both_modes(serve: Any, families: Any) -> None:
    front = serve(f"hm</think>Well.<tool_call>{families.JSON_CALL}</tool_call>")
    with openai.OpenAI(base_url=front.url + "/v1", api_key="x", max_retries=0) as client:
        arguments: dict[str, Any] = {
            "model": "local",
            "messages": [{"role": "user", "content": "?"}],
            "tools": [families.WEATHER],
        }
        whole = client.chat.completions.create(**arguments).choices[0]
        with client.chat.completions.stream(**arguments) as stream:
            last = stream.get_final_completion().choices[0]
    for choice in (whole, last):
        assert choice.finish_reason == "tool_calls" and choice.message.content == "Well."
        (call,) = list(choice.message.tool_calls or [])
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == (
            "get_weather",
            families.ARGUMENTS,
        )
    assert whole.message.model_extra and whole.message.model_extra["reasoning_content"] == "hm"
