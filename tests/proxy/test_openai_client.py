"""The official client, unmodified."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk

IdsOf = Callable[[str], list[int]]
SAID = "Paris — 巴黎 🗼"


@pytest.fixture
def connect() -> Iterator[Callable[..., openai.OpenAI]]:
    clients: list[openai.OpenAI] = []

    def make(front: Any, path: str = "/v1", **options: Any) -> openai.OpenAI:
        settings = {"api_key": "none", "max_retries": 0, "timeout": 20.0, **options}
        clients.append(openai.OpenAI(base_url=front.url + path, **settings))
        return clients[-1]

    yield make
    for client in clients:
        client.close()


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    messages: Any = [{"role": "user", "content": "What is the capital of France?"}]
    return client.chat.completions.create(model="tiny-model", messages=messages, **fields)


@pytest.mark.parametrize("path", ["/v1", ""])
def test_chat_whole_and_streamed_say_the_same(
    start_front: Any, saying: Any, ids_of: IdsOf, connect: Any, path: str
) -> None:
    client = connect(start_front(saying(ids_of(SAID))), path)
    whole = ask(client)
    assert whole.choices[0].message.content == SAID
    assert whole.usage.completion_tokens == len(ids_of(SAID))
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == SAID
    assert [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason] == [
        "stop"
    ]
    assert chunks[-1].usage == whole.usage.model_copy(
        update={
            "tokens_per_second": chunks[-1].usage.tokens_per_second,
            "timings": chunks[-1].usage.timings,
        }
    )


def test_completions_and_models(start_front: Any, saying: Any, ids_of: IdsOf, connect: Any) -> None:
    client = connect(start_front(saying(ids_of(SAID))))
    whole = client.completions.create(model="tiny-model", prompt="The capital is", max_tokens=100)
    assert whole.choices[0].text == SAID
    streamed = client.completions.create(model="tiny-model", prompt="The capital is", stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == SAID
    assert [model.id for model in client.models.list()] == ["mlx-community/tiny-model", "local"]
    assert client.models.retrieve("mlx-community/tiny-model").owned_by == "mlx-mesh"


def test_errors_become_the_clients_exceptions(
    start_front: Any, saying: Any, ids_of: IdsOf, connect: Any
) -> None:
    front = start_front(saying(ids_of("a")), api_keys=("key-1",))
    with pytest.raises(openai.AuthenticationError):
        ask(connect(front))
    client = connect(front, api_key="key-1")
    with pytest.raises(openai.BadRequestError) as bad:
        ask(client, modalities=["audio"])
    assert (bad.value.param, bad.value.code) == ("modalities", "unsupported_parameter")
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-4o", messages=[{"role": "user", "content": "x"}])
    assert unknown.value.code == "model_not_found"
    assert (
        client.chat.completions.with_raw_response.create(
            model="local", messages=[{"role": "user", "content": "x"}]
        ).headers["x-mlx-mesh-world-size"]
        == "2"
    )


def test_an_error_in_a_stream_is_raised_by_the_client(start_front: Any, ids_of: IdsOf, connect: Any) -> None:
    async def breaks(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        yield TokenChunk(id="", token_ids=tuple(ids_of("some")))
        yield Failed(id="", code="rank_lost", message="mac1 is gone", retry_after_s=5)

    with pytest.raises(openai.APIError, match="mac1 is gone"):
        list(ask(connect(start_front(breaks)), stream=True))


def test_the_client_retries_while_the_mesh_is_not_ready(
    start_front: Any, saying: Any, ids_of: IdsOf, connect: Any
) -> None:
    """A full queue is answered with a status, so the client's own retry finds the free place."""
    times: list[str] = []

    async def full_once(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        times.append(request.id)
        if len(times) == 1:
            yield Failed(id="", code="queue_full", message="full", retry_after_s=1)
        else:
            yield TokenChunk(id="", token_ids=tuple(ids_of("now")), finish_reason="stop")

    client = connect(start_front(full_once), max_retries=2)
    assert "".join(c.choices[0].delta.content or "" for c in ask(client, stream=True)) == "now"
    assert len(times) == 2
