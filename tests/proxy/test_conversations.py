"""What the headers of an answer say of its conversation, before the first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from mlx_mesh.mesh.messages import GenerateRequest, TokenChunk
from mlx_mesh.proxy.conversation import MAX_KNOWN, Conversation, Conversations
from mlx_mesh.proxy.schemas.chat import ChatRequest

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def told(response: Any) -> tuple[str | None, ...]:
    names = ("x-conv-id", "x-conv-kv", "x-conv-cached-tokens", "x-conv-processing-tokens")
    return tuple(response.headers.get(name) for name in names)


class Script:
    """Each request is admitted with the next of these numbers of kept tokens, None = it waits."""

    def __init__(self, *kept: int | None) -> None:
        self._kept = iter(kept)

    async def __call__(self, request: GenerateRequest) -> AsyncIterator[TokenChunk]:
        kept = next(self._kept)
        if kept is None:
            await asyncio.Event().wait()
        yield TokenChunk(id="", cached_tokens=kept or 0)
        yield TokenChunk(id="", token_ids=(100,), finish_reason="length")


@pytest.fixture
def ask(start_front: Any) -> Iterator[Any]:
    def start(*kept: int | None, **config: Any) -> Any:
        front = start_front(Script(*kept), **config)

        def one(stream: bool = False, **fields: Any) -> Any:
            with front.http.stream("POST", CHAT, json={**USER, **fields, "stream": stream}) as response:
                return told(response)

        one.front = front  # type: ignore[attr-defined]
        return one

    yield start


def test_the_first_turn_is_fresh_and_the_next_ones_hit_whole_or_streamed(ask: Any) -> None:
    one = ask(0, 7, 9, 0)
    num_prompt = int(one(conversation_id="a")[3] or 0)
    assert num_prompt > 9
    assert one(conversation_id="a") == ("a", "hit", "7", str(num_prompt - 7))
    assert one(stream=True, conversation_id="a") == ("a", "hit", "9", str(num_prompt - 9))
    assert one(stream=True, conversation_id="b") == ("b", "fresh", "0", str(num_prompt))


def test_a_known_conversation_that_begins_anew_was_reset(ask: Any) -> None:
    one = ask(0, 0, 0, 0)
    assert one(conversation_id="a")[1] == "fresh"
    assert one(conversation_id="a")[1] == "reset"
    assert one(conversation_id="a", reset_conversation=True)[1] == "reset"
    assert one(conversation_id="c", skip_prefix_cache=True)[1] == "skipped"
    requests = one.front.coordinator.requests
    assert [request.reset_prefix for request in requests] == [False, False, True, False]
    assert [request.skip_prefix_cache for request in requests] == [False, False, False, True]


def test_requests_without_a_name_are_all_called_default_and_are_never_the_same_conversation(
    ask: Any,
) -> None:
    one = ask(0, 0)
    assert one()[:2] == ("default", "fresh")
    assert one()[:2] == ("default", "fresh")


def test_without_kept_prefixes_the_headers_say_so(ask: Any) -> None:
    one = ask(0, keeps_prefixes=False)
    assert one(conversation_id="a")[:3] == ("a", "disabled", "0")


def test_the_headers_wait_for_a_place_and_not_for_ever(ask: Any) -> None:
    one = ask(None, keepalive_s=0.2)
    assert one(stream=True, conversation_id="a") == ("a", "unknown", None, None)


def test_another_open_request_of_the_conversation_is_busy() -> None:
    conversations = Conversations()
    body = ChatRequest(messages=[{"role": "user", "content": "hi"}])  # type: ignore[list-item]
    first = conversations.begin("a", body, is_enabled=True)
    second = conversations.begin("a", body, is_enabled=True)
    conversations.end(first)
    conversations.end(second)
    third = conversations.begin("a", body, is_enabled=True)
    assert [one.was_busy for one in (first, second, third)] == [False, True, False]
    assert isinstance(third, Conversation) and third.was_known


def test_only_so_many_conversations_are_remembered() -> None:
    conversations = Conversations()
    body = ChatRequest(messages=[{"role": "user", "content": "hi"}])  # type: ignore[list-item]
    for number in range(MAX_KNOWN + 1):
        conversations.end(conversations.begin(f"{number}", body, is_enabled=True))
    assert not conversations.begin("0", body, is_enabled=True).was_known
    assert conversations.begin("10000", body, is_enabled=True).was_known
