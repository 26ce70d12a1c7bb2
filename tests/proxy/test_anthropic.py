"""Anthropic's API, asked by the official client, unmodified, and by hand where the client would not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anthropic
import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk
from mlx_mesh.proxy.tokenizer import ModelTokenizer

IdsOf = Callable[[str], list[int]]
PATH = "/v1/messages"
USER: dict[str, Any] = {"max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def connect() -> Iterator[Callable[..., anthropic.Anthropic]]:
    clients: list[anthropic.Anthropic] = []

    def make(front: Any, **options: Any) -> anthropic.Anthropic:
        settings = {"api_key": "none", "max_retries": 0, "timeout": 20.0, **options}
        clients.append(anthropic.Anthropic(base_url=front.url, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def serve(start_front: Any, saying: Any, thinker: ModelTokenizer) -> Callable[..., Any]:
    """A front end whose model reasons and calls tools, and says this."""

    def start(text: str, said: dict[str, Any] | None = None, **options: Any) -> Any:
        return start_front(saying(thinker.plain_ids(text), **(said or {})), model=thinker, **options)

    return start


@pytest.fixture
def weather(families: Any) -> dict[str, Any]:
    function = families.WEATHER["function"]
    return {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }


def prompt_of(front: Any, model: ModelTokenizer) -> str:
    return model.decode(front.coordinator.requests[-1].prompt_ids)


def test_a_message_whole_and_streamed_says_the_same(
    serve: Any, connect: Any, thinker: ModelTokenizer
) -> None:
    said = "Hm 🗼.\n</think>\n\nParis — 巴黎."
    front = serve(said, {"cached_tokens": 3})
    client = connect(front)
    whole = client.messages.create(model="local", **USER)
    assert [block.type for block in whole.content] == ["thinking", "text"]
    assert (whole.content[0].thinking, whole.content[1].text) == ("Hm 🗼.", "Paris — 巴黎.")
    assert (whole.role, whole.stop_reason, whole.stop_sequence) == ("assistant", "end_turn", None)
    num_prompt = len(front.coordinator.requests[0].prompt_ids)
    assert (whole.usage.input_tokens, whole.usage.cache_read_input_tokens) == (num_prompt - 3, 3)
    assert whole.usage.output_tokens == len(thinker.plain_ids(said))
    with client.messages.stream(model="local", **USER) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert text == "Paris — 巴黎."
    assert [block.model_dump() for block in last.content] == [block.model_dump() for block in whole.content]
    assert last.stop_reason == whole.stop_reason
    assert last.usage.output_tokens == whole.usage.output_tokens
    assert last.usage.cache_read_input_tokens == 3


def test_the_event_sequence_is_complete_and_comes_token_by_token(
    serve: Any, families: Any, weather: Any, thinker: ModelTokenizer
) -> None:
    front = serve(f"hm</think>so<tool_call>{families.JSON_CALL}</tool_call>")
    with front.http.stream("POST", PATH, json={**USER, "stream": True, "tools": [weather]}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in response.iter_lines() if line]
    names = [line.removeprefix("event: ") for line in lines[::2]]
    assert all(f'"type":"{name}"' in data for name, data in zip(names, lines[1::2], strict=True))
    deltas = names.count("content_block_delta")
    assert deltas >= 4
    shape = [name for name in names if name not in ("content_block_delta", "ping")]
    block = ["content_block_start", "content_block_stop"]
    assert shape == ["message_start", *block, *block, *block, "message_delta", "message_stop"]
    assert names[:2] == ["message_start", "ping"]


def test_tools_are_called_and_their_results_go_back(
    serve: Any, connect: Any, families: Any, weather: Any, thinker: ModelTokenizer
) -> None:
    front = serve(
        f"hm</think>Look.<tool_call>{families.JSON_CALL}</tool_call>", coordinator={"context_length": 2000}
    )
    client = connect(front)
    first = client.messages.create(model="local", **USER, tools=[weather])
    assert first.stop_reason == "tool_use"
    call = first.content[-1]
    assert (call.type, call.name, call.input) == ("tool_use", "get_weather", families.ARGUMENTS)
    with client.messages.stream(model="local", **USER, tools=[weather]) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.content[-1].input) == ("tool_use", families.ARGUMENTS)
    turns = [
        *USER["messages"],
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "21 C"}],
                },
                {"type": "tool_result", "tool_use_id": "x", "content": "broken", "is_error": True},
                {"type": "text", "text": "and now?"},
            ],
        },
    ]
    client.messages.create(model="local", max_tokens=5, messages=turns, tools=[weather])
    assert (
        "assistant\nLook.(hm)[get_weather Praha, ČR]\ntool\n21 C\ntool\nError: broken\nuser\nand now?"
    ) in prompt_of(front, thinker)


def test_a_turn_of_only_a_tool_use_and_its_result_are_taken(
    serve: Any, connect: Any, weather: Any, thinker: ModelTokenizer
) -> None:
    front = serve("</think>Five.")
    turns = [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "t1", "name": "add", "input": {"a": 2}}],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "5"}]},
    ]
    message = connect(front).messages.create(model="local", max_tokens=50, messages=turns, tools=[weather])
    assert (message.stop_reason, message.content[0].text) == ("end_turn", "Five.")
    assert "None" not in prompt_of(front, thinker)


@pytest.mark.parametrize("stream", [False, True])
def test_stop_reasons(serve: Any, connect: Any, stream: bool) -> None:
    def ask(text: str, **fields: Any) -> Any:
        client = connect(serve(text))
        if not stream:
            return client.messages.create(model="local", **{**USER, **fields})
        with client.messages.stream(model="local", **{**USER, **fields}) as events:
            return events.get_final_message()

    message = ask("</think>one STOP two", stop_sequences=["STOP"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "STOP")
    assert message.content[0].text == "one "
    assert ask("</think>one two three", max_tokens=8).stop_reason == "max_tokens"
    empty = ask("</think>STOP", stop_sequences=["STOP"])
    assert [block.text for block in empty.content] == [""]


def test_tokens_are_counted_without_generating(
    serve: Any, connect: Any, weather: Any, thinker: ModelTokenizer
) -> None:
    front = serve("</think>x")
    client = connect(front)
    arguments = {"model": "local", "messages": USER["messages"], "system": "Be brief.", "tools": [weather]}
    counted = client.messages.count_tokens(**arguments).input_tokens
    assert not front.coordinator.requests
    client.messages.create(**arguments, max_tokens=5)
    assert counted == len(front.coordinator.requests[0].prompt_ids)


def test_billing_lines_of_coding_agents_do_not_make_the_prompt_new(
    serve: Any, connect: Any, thinker: ModelTokenizer
) -> None:
    front = serve("</think>x")
    client = connect(front)
    for value in ("cc_version=2.1; cch=aaaa1;", "cc_version=2.1; cch=bbbb2;"):
        billing = f"x-anthropic-billing-header: {value}"
        blocks = [{"type": "text", "text": billing}, {"type": "text", "text": "You are an agent."}]
        client.messages.create(model="local", **USER, system=blocks)
        client.messages.create(model="local", **USER, system=f"{billing}\nYou are an agent.")
    assert len({request.prompt_ids for request in front.coordinator.requests}) == 1
    assert prompt_of(front, thinker).startswith("system\nYou are an agent.\nuser")


@pytest.mark.parametrize(
    ("thinking", "opens", "num_requests"),
    [
        (None, True, 1),
        ({"type": "adaptive"}, True, 1),
        ({"type": "enabled", "budget_tokens": 2}, True, 2),
        ({"type": "disabled"}, False, 1),
    ],
)
def test_thinking_is_switched_and_limited(
    start_front: Any, thinker: ModelTokenizer, thinking: Any, opens: bool, num_requests: int
) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        is_thinking = opens and not request.sent_ids
        for token_id in thinker.plain_ids("one two three</think>yes" if is_thinking else "yes"):
            yield TokenChunk(id="", token_ids=(token_id,))
        yield TokenChunk(id="", finish_reason="stop")

    front = start_front(script, model=thinker)
    content = front.post(PATH, {**USER, "thinking": thinking}).json()["content"]
    assert content[-1] == {"type": "text", "text": "yes"}
    assert [block["type"] for block in content[:-1]] == (["thinking"] if opens else [])
    assert prompt_of(front, thinker).endswith("<think>\n" if opens else "</think>\n\n")
    assert len(front.coordinator.requests) == num_requests


def test_reasoning_that_no_template_can_switch_off_is_ended_at_once(
    start_front: Any, saying: Any, model_with: Any, families: Any
) -> None:
    turns = families.TURNS + "{% if add_generation_prompt %}assistant\n<think>\n{% endif %}{#</think>#}"
    model = model_with(turns)
    front = start_front(saying(model.plain_ids("yes")), model=model)
    answer = front.post(PATH, {**USER, "thinking": {"type": "disabled"}}).json()
    assert answer["content"] == [{"type": "text", "text": "yes"}]
    (request,) = front.coordinator.requests
    assert model.decode(request.sent_ids) == "\n</think>\n\n"


def test_omitted_thinking_stays_away(serve: Any) -> None:
    front = serve("hm</think>yes")
    body = {**USER, "thinking": {"type": "adaptive", "display": "omitted"}}
    assert front.post(PATH, body).json()["content"] == [{"type": "text", "text": "yes"}]


def test_an_answer_goes_on_with_a_last_turn_of_the_assistant(
    serve: Any, connect: Any, thinker: ModelTokenizer
) -> None:
    front = serve("B) Helios")
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "The best answer is ("}]
    message = connect(front).messages.create(model="local", max_tokens=50, messages=turns)
    assert message.content[0].text == "B) Helios"
    assert prompt_of(front, thinker).endswith("assistant\nThe best answer is (")


def test_the_key_may_be_in_anthropics_header(
    start_front: Any, saying: Any, ids_of: IdsOf, connect: Any
) -> None:
    front = start_front(saying(ids_of("a")), api_keys=("key-1",))
    assert connect(front, api_key="key-1").messages.create(model="local", **USER).content[0].text == "a"
    with pytest.raises(anthropic.AuthenticationError) as wrong:
        connect(front, api_key="key-2").messages.create(model="local", **USER)
    assert wrong.value.body == {
        "type": "error",
        "error": {"type": "authentication_error", "message": "The API key is wrong."},
    }


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}]},
            "messages[0].content[1]",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "tool_result", "content": [{"type": "image"}]}]}
                ]
            },
            "messages[0].content[0].content[0]",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            "messages[0].content[0].text",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "two words", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"thinking": {"type": "enabled", "budget_tokens": "many"}}, "thinking.budget_tokens"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"container": "c"}, "container"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"made_up": 1}, "made_up"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name_in_anthropics_shape(
    serve: Any, fields: dict[str, Any], named: str
) -> None:
    front = serve("x")
    response = front.post(PATH, {**USER, **fields})
    body = response.json()
    assert response.status_code == 400, body
    assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
    assert named in body["error"]["message"]
    assert not front.coordinator.requests


def test_errors_have_anthropics_shape_on_its_routes(
    start_front: Any, saying: Any, ids_of: IdsOf, connect: Any
) -> None:
    front = start_front(saying(ids_of("a")), ready=False)
    with pytest.raises(anthropic.InternalServerError) as not_ready:
        connect(front).messages.create(model="local", **USER)
    assert not_ready.value.status_code == 503 and "overloaded_error" in str(not_ready.value.body)
    front.set_ready(True)
    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        connect(front).messages.create(model="claude-3", **USER)
    assert front.http.get(PATH).json()["type"] == "error"


def test_an_error_in_a_stream_is_raised_by_the_client(start_front: Any, ids_of: IdsOf, connect: Any) -> None:
    async def breaks(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=tuple(ids_of("some")))
        yield Failed(id="", code="rank_lost", message="mac1 is gone", retry_after_s=5)

    client = connect(start_front(breaks))
    with (
        pytest.raises(anthropic.APIStatusError, match="mac1 is gone"),
        client.messages.stream(model="local", **USER) as stream,
    ):
        stream.get_final_message()
