"""Ollama's API, asked by the official client, unmodified."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import ollama
import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk
from mlx_mesh.proxy.schemas.fields import FieldPolicy
from mlx_mesh.proxy.schemas.ollama import OLLAMA_CHAT_FIELDS, OLLAMA_GENERATE_FIELDS, OPTION_FIELDS
from mlx_mesh.proxy.tokenizer import ModelTokenizer

IdsOf = Callable[[str], list[int]]
CHAT = "/api/chat"
USER: dict[str, Any] = {"model": "local", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
def serve(start_front: Any, saying: Any, thinker: ModelTokenizer) -> Callable[..., Any]:
    """A front end whose model reasons and calls tools, and says this."""

    def start(text: str, **said: Any) -> Any:
        ids = thinker.plain_ids(text)
        return start_front(saying(ids, **said), model=thinker, coordinator={"context_length": 3000})

    return start


_clients: list[ollama.Client] = []


@pytest.fixture(autouse=True)
def close_clients() -> Iterator[None]:
    yield
    while _clients:
        _clients.pop()._client.close()


def client_of(front: Any) -> ollama.Client:
    _clients.append(ollama.Client(host=front.url, timeout=20, trust_env=False))
    return _clients[-1]


def prompt_of(front: Any, model: ModelTokenizer) -> str:
    return model.decode(front.coordinator.requests[-1].prompt_ids)


def test_a_chat_whole_and_streamed_says_the_same(serve: Any, thinker: ModelTokenizer) -> None:
    said = "Hm 🗼.\n</think>\n\nParis — 巴黎."
    front = serve(said, prefill_s=0.25)
    client = client_of(front)
    whole = client.chat(**USER)
    assert (whole.message.content, whole.message.thinking) == ("Paris — 巴黎.", "Hm 🗼.")
    assert (whole.done, whole.done_reason, whole.model) == (True, "stop", "local")
    assert whole.prompt_eval_count == len(front.coordinator.requests[0].prompt_ids)
    assert whole.eval_count == len(thinker.plain_ids(said))
    assert whole.prompt_eval_duration == 250_000_000 and whole.total_duration > 0
    parts = list(client.chat(**USER, stream=True))
    assert "".join(part.message.content or "" for part in parts) == "Paris — 巴黎."
    assert "".join(part.message.thinking or "" for part in parts) == "Hm 🗼."
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == whole.eval_count and len(parts) > 5


def test_tools_may_be_functions_and_results_find_their_calls(
    serve: Any, families: Any, thinker: ModelTokenizer
) -> None:
    def get_weather(city: str, days: int) -> str:
        """Weather of a city.

        Args:
          city: its name
          days: how many
        """
        return f"{city} {days}"

    front = serve(f"hm</think>Look.<tool_call>{families.JSON_CALL}</tool_call>")
    client = client_of(front)
    whole = client.chat(**USER, tools=[get_weather])
    (call,) = list(whole.message.tool_calls or [])
    assert (call.function.name, dict(call.function.arguments)) == ("get_weather", families.ARGUMENTS)
    streamed = [
        one
        for part in client.chat(**USER, tools=[get_weather], stream=True)
        for one in part.message.tool_calls or ()
    ]
    assert [one.function for one in streamed] == [call.function]
    turns = [
        *USER["messages"],
        whole.message,
        {"role": "tool", "content": "21 C", "tool_name": "get_weather"},
    ]
    client.chat(model="local", messages=turns, tools=[get_weather])
    assert "assistant\nLook.(hm)[get_weather Praha, ČR]\ntool\n21 C\nassistant" in prompt_of(front, thinker)


def test_generate_takes_a_system_text_or_a_raw_prompt(serve: Any, thinker: ModelTokenizer) -> None:
    front = serve("</think>fine")
    client = client_of(front)
    assert client.generate("local", "hi", system="Be brief.").response == "fine"
    assert prompt_of(front, thinker).startswith("system\nBe brief.\nuser\nhi\nassistant")
    raw = client.generate("local", "once upon", raw=True)
    assert (raw.response, prompt_of(front, thinker)) == ("</think>fine", "once upon")
    parts = list(client.generate("local", "hi", stream=True))
    assert "".join(part.response or "" for part in parts) == "fine" and parts[-1].done
    assert client.generate("local", "").done_reason == "load"
    assert client.chat("local").done_reason == "load"


def test_options_have_ollamas_names_and_defaults(serve: Any) -> None:
    front = serve("</think>one STOP two")
    client = client_of(front)
    client.chat(**USER)
    sampling = front.coordinator.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.9)
    assert (sampling.repetition_penalty, sampling.repetition_context_size) == (1.1, 64)
    options = {
        "temperature": 0,
        "seed": 7,
        "top_k": 5,
        "min_p": 0.1,
        "repeat_last_n": 0,
        "num_predict": 50,
        "num_ctx": 8192,
        "stop": ["STOP"],
        "mirostat": 0,
        "use_mmap": True,
    }
    answer = client.chat(**USER, options=options)
    request = front.coordinator.requests[-1]
    assert (request.max_tokens, request.sampling.seed, request.sampling.top_k) == (50, 7, 5)
    assert request.sampling.repetition_penalty == 1.0
    assert (answer.message.content, answer.done_reason) == ("one ", "stop")
    assert client.chat(**USER, options={"num_predict": 3}).done_reason == "length"


@pytest.mark.parametrize(("think", "opens"), [(None, True), (True, True), (False, False), ("high", True)])
def test_thinking_is_switched(serve: Any, thinker: ModelTokenizer, think: Any, opens: bool) -> None:
    front = serve("yes")
    client_of(front).chat(**USER, think=think)
    assert prompt_of(front, thinker).endswith("<think>\n" if opens else "</think>\n\n")


def test_log_probabilities(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("ab")))
    answer = client_of(front).chat(**USER, logprobs=True, top_logprobs=2)
    assert front.coordinator.requests[0].logprobs == 2
    assert "".join(one.token for one in answer.logprobs or ()) == "ab"


def test_models_are_listed_and_described(serve: Any, thinker: ModelTokenizer) -> None:
    front = serve("x")
    client = client_of(front)
    listed = client.list().models
    assert [model.model for model in listed] == ["mlx-community/tiny-model", "local"]
    assert listed[0].details and listed[0].details.family == "llama"
    for name in ("local", "local:latest", "tiny-model", "mlx-community/tiny-model:latest"):
        shown = client.show(name)
        assert shown.capabilities == ["completion", "tools", "thinking"]
        assert shown.modelinfo and shown.modelinfo["llama.context_length"] == 3000
        assert shown.template == thinker.chat_template
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("mlx-community/tiny-model", 3000)
    front.set_ready(False, "rank 1 died")
    assert client.ps().models == []
    assert front.http.get("/api/version").json()["version"]


def test_the_stream_lives_while_nothing_is_generated(start_front: Any, ids_of: IdsOf) -> None:
    go_on = threading.Event()

    async def slow(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        await asyncio.to_thread(go_on.wait, 10)
        yield TokenChunk(id="", token_ids=tuple(ids_of("late")), finish_reason="stop")

    front = start_front(slow, keepalive_s=0.05)
    text = ""
    for at, part in enumerate(client_of(front).chat(**USER, stream=True)):
        text += part.message.content or ""
        if at == 3:
            go_on.set()
    assert text == "late"


def test_errors_have_ollamas_shape(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("a")), ready=False)
    with pytest.raises(ollama.ResponseError, match="is loading") as not_ready:
        client_of(front).chat(**USER)
    assert not_ready.value.status_code == 503
    front.set_ready(True)
    with pytest.raises(ollama.ResponseError, match="not served here") as unknown:
        client_of(front).chat(model="llama3", messages=USER["messages"])
    assert unknown.value.status_code == 404
    with pytest.raises(ollama.ResponseError, match="There is no POST /api/pull"):
        client_of(front).pull("llama3")

    async def breaks(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=tuple(ids_of("some")))
        yield Failed(id="", code="rank_lost", message="mac1 is gone", retry_after_s=5)

    with pytest.raises(ollama.ResponseError, match="mac1 is gone"):
        list(client_of(start_front(breaks)).chat(**USER, stream=True))


@pytest.mark.parametrize(
    ("path", "fields", "named"),
    [
        (CHAT, {"model": None}, "model"),
        (CHAT, {"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "messages[0].images"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]},
            "messages[0].tool_calls[0]",
        ),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"format": {"type": "object", "not": {}}}, "format"),
        (CHAT, {"think": "lots"}, "think"),
        (CHAT, {"options": {"mirostat": 2}}, "mirostat"),
        (CHAT, {"options": {"typical_p": 0.5}}, "typical_p"),
        (CHAT, {"options": {"num_predict": 0}}, "num_predict"),
        (CHAT, {"options": {"made_up": 1}}, "made_up"),
        (CHAT, {"made_up": 1}, "made_up"),
        ("/api/generate", {"prompt": "a", "suffix": "b"}, "suffix"),
        ("/api/generate", {"prompt": "a", "images": ["aGk="]}, "images"),
        ("/api/generate", {"prompt": "a", "template": "b"}, "template"),
        ("/api/generate", {"prompt": "a", "context": [1]}, "context"),
        ("/api/generate", {"prompt": "a", "system": "b", "raw": True}, "system"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    serve: Any, path: str, fields: dict[str, Any], named: str
) -> None:
    front = serve("x")
    response = front.post(path, {**(USER if path == CHAT else {"model": "local"}), **fields})
    assert response.status_code == 400, response.text
    assert named in response.json()["error"]
    assert not front.coordinator.requests


@pytest.mark.parametrize(
    ("policy", "schema"),
    [
        (OLLAMA_CHAT_FIELDS, ollama._types.ChatRequest),
        (OLLAMA_GENERATE_FIELDS, ollama._types.GenerateRequest),
        (OPTION_FIELDS, ollama.Options),
    ],
)
def test_every_field_of_ollamas_schema_has_exactly_one_fate(policy: FieldPolicy, schema: Any) -> None:
    fates = [set(policy.honoured), set(policy.refused), set(policy.ignored)]
    assert sum(map(len, fates)) == len(set.union(*fates)), "a field is in two lists"
    assert set(schema.model_fields) <= set.union(*fates)


def test_lines_are_json_objects(serve: Any) -> None:
    front = serve("</think>x")
    with front.http.stream("POST", CHAT, json=USER) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = [json.loads(line) for line in response.iter_lines()]
    assert all({"model", "created_at", "message", "done"} <= set(line) for line in lines)
