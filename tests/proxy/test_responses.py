"""/v1/responses, asked by the official client."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk, TokenLogprobs
from mlx_mesh.proxy.response_store import ResponseStore, StoredResponse
from mlx_mesh.proxy.tokenizer import ModelTokenizer

PATH = "/v1/responses"


@pytest.fixture
def connect() -> Iterator[Callable[..., openai.OpenAI]]:
    clients: list[openai.OpenAI] = []

    def make(front: Any) -> openai.OpenAI:
        clients.append(openai.OpenAI(base_url=front.url + "/v1", api_key="none", max_retries=0, timeout=20.0))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def serve(start_front: Any, saying: Any, thinker: ModelTokenizer) -> Callable[..., Any]:
    """A front end whose model reasons and calls tools, and says this."""

    def start(text: str, **said: Any) -> Any:
        ids = thinker.plain_ids(text)
        return start_front(saying(ids, **said), model=thinker, coordinator={"context_length": 3000})

    return start


@pytest.fixture
def weather(families: Any) -> dict[str, Any]:
    return {"type": "function", **families.WEATHER["function"], "strict": False}


def prompt_of(front: Any, model: ModelTokenizer) -> str:
    return model.decode(front.coordinator.requests[-1].prompt_ids)


def without_ids(items: Any) -> Any:
    """Items without ids, and without what the streaming client adds."""
    dumped = [{key: value for key, value in item.model_dump().items() if "id" not in key} for item in items]
    for item in dumped:
        for part in item["content"]:
            part.pop("parsed", None)
    return dumped


def test_a_response_whole_and_streamed_says_the_same(
    serve: Any, connect: Any, thinker: ModelTokenizer
) -> None:
    front = serve("Hm 🗼.\n</think>\n\nParis — 巴黎.", cached_tokens=2)
    client = connect(front)
    whole = client.responses.create(model="local", input="Where?", instructions="Be brief.")
    assert (whole.status, whole.output_text) == ("completed", "Paris — 巴黎.")
    assert [item.type for item in whole.output] == ["reasoning", "message"]
    assert whole.output[0].content[0].text == "Hm 🗼."
    assert whole.usage.input_tokens == len(front.coordinator.requests[0].prompt_ids)
    assert whole.usage.input_tokens_details.cached_tokens == 2
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert prompt_of(front, thinker).startswith("system\nBe brief.\nuser\nWhere?")
    with client.responses.stream(model="local", input="Where?", instructions="Be brief.") as stream:
        events = list(stream)
        last = stream.get_final_response()
    assert without_ids(last.output) == without_ids(whole.output)
    assert last.usage.total_tokens == whole.usage.total_tokens
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "Paris — 巴黎."


def test_the_events_are_complete_and_numbered(serve: Any, connect: Any, families: Any, weather: Any) -> None:
    client = connect(serve(f"hm</think>so<tool_call>{families.JSON_CALL}</tool_call>"))
    events = list(client.responses.create(model="local", input="?", tools=[weather], stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    names = [event.type.removeprefix("response.") for event in events]
    shape = [name for at, name in enumerate(names) if at == 0 or name != names[at - 1]]
    assert shape == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    added = [event for event in events if event.type == "response.output_item.added"]
    done = [event for event in events if event.type == "response.output_item.done"]
    assert [event.output_index for event in added] == [event.output_index for event in done] == [0, 1, 2]
    assert [event.item.id for event in added] == [event.item.id for event in done]
    final = events[-1].response
    assert [item.id for item in final.output] == [event.item.id for event in done]


def test_a_call_and_its_output_go_on_by_items_or_by_id(
    serve: Any, connect: Any, families: Any, weather: Any, thinker: ModelTokenizer
) -> None:
    front = serve(f"hm</think>Look.<tool_call>{families.JSON_CALL}</tool_call>")
    client = connect(front)
    first = client.responses.create(model="local", input="Weather?", tools=[weather])
    call = first.output[-1]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "get_weather",
        families.ARGUMENTS,
    )
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "21 C"}
    client.responses.create(model="local", previous_response_id=first.id, input=[output], tools=[weather])
    by_id = prompt_of(front, thinker)
    items = [{"role": "user", "content": "Weather?"}, *first.output, output]
    client.responses.create(model="local", input=items, tools=[weather], store=False)
    assert prompt_of(front, thinker) == by_id
    assert "user\nWeather?\nassistant\nLook.(hm)[get_weather Praha, ČR]\ntool\n21 C\nassistant" in by_id


def test_instructions_are_not_carried_over(serve: Any, connect: Any, thinker: ModelTokenizer) -> None:
    front = serve("</think>one")
    client = connect(front)
    first = client.responses.create(model="local", input="a", instructions="Old.")
    parts = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "b"}]}]
    second = client.responses.create(
        model="local", input=parts, instructions="New.", previous_response_id=first.id
    )
    client.responses.create(model="local", input="c", previous_response_id=second.id)
    assert prompt_of(front, thinker).startswith(
        "user\na\nassistant\none\nuser\nb\nassistant\none\nuser\nc\nassistant"
    )


def test_stored_responses_are_read_listed_and_deleted(serve: Any, connect: Any) -> None:
    front = serve("</think>one")
    client = connect(front)
    kept = client.responses.create(model="local", input="a", metadata={"k": "v"})
    assert client.responses.retrieve(kept.id) == kept
    assert kept.metadata == {"k": "v"}
    assert [item.content for item in client.responses.input_items.list(kept.id)] == ["a"]
    with client.responses.stream(model="local", input="b") as stream:
        streamed = stream.get_final_response()
    assert client.responses.retrieve(streamed.id).output_text == "one"
    client.responses.delete(kept.id)
    unkept = client.responses.create(model="local", input="a", store=False)
    for gone in (kept.id, unkept.id, "resp_none"):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    with pytest.raises(openai.BadRequestError) as missing:
        client.responses.create(model="local", input="a", previous_response_id=kept.id)
    assert (missing.value.code, missing.value.param) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_the_store_is_bounded_in_number_and_bytes() -> None:
    store = ResponseStore(max_responses=2, max_bytes=400)
    small = StoredResponse({"a": 1}, [], [])
    for name in "abc":
        store.put(name, small)
    assert (store.get("a"), store.get("b"), len(store)) == (None, small, 2)
    store.put("d", small)
    assert store.get("c") is None and store.get("b") is small  # b was used last
    store.put("big", StoredResponse({"a": "x" * 370}, [], []))
    assert len(store) == 1
    store.put("huge", StoredResponse({"a": "x" * 1000}, [], []))
    assert store.get("huge") is None and store.get("big") is not None


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_is_an_incomplete_response(serve: Any, connect: Any, stream: bool) -> None:
    client = connect(serve("</think>one two three four"))
    response = client.responses.create(model="local", input="a", max_output_tokens=10, stream=stream)
    if stream:
        last = list(response)[-1]
        assert last.type == "response.incomplete"
        response = last.response
    assert response.status == response.output[-1].status == "incomplete"
    assert response.incomplete_details.reason == "max_output_tokens"


def test_log_probabilities_are_included_when_asked_for(
    start_front: Any, connect: Any, thinker: ModelTokenizer
) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        assert request.logprobs == 1
        for token_id in thinker.plain_ids("</think>ab"):
            one = TokenLogprobs(logprob=-0.5, top=((token_id, -0.5),))
            yield TokenChunk(id="", token_ids=(token_id,), logprobs=(one,))
        yield TokenChunk(id="", finish_reason="stop")

    client = connect(start_front(script, model=thinker))
    arguments: dict[str, Any] = {
        "model": "local",
        "input": "a",
        "include": ["message.output_text.logprobs"],
        "top_logprobs": 1,
    }
    whole = client.responses.create(**arguments)
    logprobs = whole.output[-1].content[0].logprobs
    assert "".join(one.token for one in logprobs) == "ab" and logprobs[0].logprob == -0.5
    deltas = [
        e for e in client.responses.create(**arguments, stream=True) if e.type == "response.output_text.delta"
    ]
    assert "".join(one.token for event in deltas for one in event.logprobs) == "ab"


def test_input_tokens_are_counted(serve: Any) -> None:
    front = serve("</think>x")
    counted = front.post(f"{PATH}/input_tokens", {"input": "Where?"}).json()["input_tokens"]
    assert not front.coordinator.requests
    front.post(PATH, {"input": "Where?"})
    assert counted == len(front.coordinator.requests[0].prompt_ids)


def test_a_failure_in_a_stream_is_an_event(start_front: Any, thinker: ModelTokenizer) -> None:
    async def breaks(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=thinker.plain_ids("</think>some"))
        yield Failed(id="", code="rank_lost", message="mac1 is gone", retry_after_s=5)

    front = start_front(breaks, model=thinker)
    with front.http.stream("POST", PATH, json={"input": "a", "stream": True}) as response:
        events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["code"] == "rank_lost"
    assert events[-1]["response"]["status"] == "failed"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": [], "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "summary": {"text": "x"}}]}, "input[0].summary"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": 5}]}, "input[0]"),
        ({"input": [{"type": "function_call_output", "output": 5}]}, "input[0].output"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"reasoning": {"effort": "lots"}}, "reasoning.effort"),
        ({"include": ["everything"]}, "include[0]"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"stop": ["x"]}, "stop"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(serve: Any, fields: dict[str, Any], param: str) -> None:
    front = serve("x")
    response = front.post(PATH, {"input": "a", **fields})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not front.coordinator.requests
