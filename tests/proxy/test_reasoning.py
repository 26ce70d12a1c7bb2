"""Reasoning: split off, left out, limited, switched."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from mlx_mesh.mesh.messages import Failed, GenerateRequest, TokenChunk
from mlx_mesh.proxy.tokenizer import ModelTokenizer

CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "?"}]}
SAID = "I think 🗼 so\n</think>\n\nYes."


def deltas(events: list[Any], key: str) -> str:
    return "".join(
        choice["delta"].get(key, "") for e in events if isinstance(e, dict) for choice in e["choices"]
    )


@pytest.mark.parametrize("per_chunk", [1, 2, 3, 100])
def test_reasoning_that_the_template_opened_is_split_off_at_any_chunking(
    start_front: Any, saying: Any, thinker: ModelTokenizer, per_chunk: int
) -> None:
    ids = thinker.plain_ids(SAID)
    front = start_front(saying(ids, per_chunk=per_chunk), model=thinker)
    body = front.post(CHAT, USER).json()
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == message["reasoning"] == "I think 🗼 so"
    assert message["content"] == "Yes."
    used = body["usage"]
    assert used["completion_tokens"] == len(ids)
    assert 0 < used["completion_tokens_details"]["reasoning_tokens"] < len(ids)
    events = front.events(CHAT, USER)
    assert deltas(events, "content") == "Yes."
    assert deltas(events, "reasoning") == deltas(events, "reasoning_content") == "I think 🗼 so"
    assert all("think>" not in str(event) for event in events)


@pytest.mark.parametrize(("by_config", "by_request"), [(True, None), (False, True), (True, True)])
def test_stripped_reasoning_reaches_nobody(
    start_front: Any, saying: Any, thinker: ModelTokenizer, by_config: bool, by_request: bool | None
) -> None:
    front = start_front(saying(thinker.plain_ids(SAID)), model=thinker, strip_thinking=by_config)
    body = {**USER, "strip_thinking": by_request}
    assert front.post(CHAT, body).json()["choices"][0]["message"] == {
        "role": "assistant",
        "content": "Yes.",
        "refusal": None,
    }
    events = front.events(CHAT, body)
    assert deltas(events, "content") == "Yes." and "reasoning" not in str(events[:-1])


def test_a_request_can_ask_for_the_reasoning_that_the_server_leaves_out(
    start_front: Any, saying: Any, thinker: ModelTokenizer
) -> None:
    front = start_front(saying(thinker.plain_ids(SAID)), model=thinker, strip_thinking=True)
    message = front.post(CHAT, {**USER, "strip_thinking": False}).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "I think 🗼 so"


def test_a_limit_inside_the_reasoning_is_an_empty_answer_of_length(
    start_front: Any, saying: Any, thinker: ModelTokenizer
) -> None:
    front = start_front(saying(thinker.plain_ids(SAID)), model=thinker)
    choice = front.post(CHAT, {**USER, "max_tokens": 4}).json()["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    assert choice["message"]["reasoning_content"].startswith("I")


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [
        ({}, True),
        ({"enable_thinking": True}, True),
        ({"enable_thinking": False}, False),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, False),
        ({"reasoning_effort": "high"}, True),
    ],
)
def test_reasoning_is_switched_by_the_template(
    start_front: Any, saying: Any, thinker: ModelTokenizer, fields: dict[str, Any], thinks: bool
) -> None:
    front = start_front(saying(thinker.plain_ids("Yes.")), model=thinker)
    message = front.post(CHAT, {**USER, **fields}).json()["choices"][0]["message"]
    prompt = thinker.decode(front.coordinator.requests[0].prompt_ids)
    assert prompt.endswith("<think>\n" if thinks else "</think>\n\n")
    assert message["content"] == ("" if thinks else "Yes.")


def test_the_templates_own_efforts_and_options_reach_it(
    start_front: Any, saying: Any, model_with: Any
) -> None:
    model = model_with("effort={{ reasoning_effort }} mood={{ mood }}")
    front = start_front(saying(model.plain_ids("a")), model=model)
    fields = {"reasoning_effort": "low", "chat_template_kwargs": {"mood": "good"}}
    assert front.post(CHAT, {**USER, **fields}).status_code == 200
    assert model.decode(front.coordinator.requests[0].prompt_ids) == "effort=low mood=good"
    error = front.post(CHAT, {**USER, "reasoning_effort": "lots"}).json()["error"]
    assert error["param"] == "reasoning_effort"


@pytest.mark.parametrize("budget", [0, 3, 6, 1000])
def test_a_spent_budget_ends_the_reasoning_and_the_answer_follows(
    start_front: Any, thinker: ModelTokenizer, budget: int
) -> None:
    """The request is ended, and goes on behind the closing tag with the tokens that there are."""
    thoughts, answer = thinker.plain_ids("one two three four five six"), thinker.plain_ids("done")
    closing = thinker.plain_ids("\n</think>\n\n")

    async def think(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        if request.sent_ids:
            assert request.sent_ids[-len(closing) :] == closing
            yield TokenChunk(id="", token_ids=answer, finish_reason="stop")
            return
        for token_id in thoughts:
            yield TokenChunk(id="", token_ids=(token_id,))
        if budget < 1000:
            await asyncio.Event().wait()
        for token_id in (*closing, *answer):
            yield TokenChunk(id="", token_ids=(token_id,))
        yield TokenChunk(id="", finish_reason="stop")

    front = start_front(think, model=thinker)
    body = {**USER, "thinking_budget": budget, "seed": 1, "max_time_s": 50}
    message = front.post(CHAT, body).json()["choices"][0]["message"]
    assert message["content"] == "done"
    reasoning = message.get("reasoning_content", "")
    assert reasoning == thinker.decode(thoughts[:budget]).strip()
    events = front.events(CHAT, body)
    assert (deltas(events, "content"), deltas(events, "reasoning")) == ("done", reasoning)
    requests = front.coordinator.requests
    assert len(requests) == {0: 2, 1000: 2}.get(budget, 4)
    if budget in (3, 6):
        assert 40 < requests[1].max_time_s < requests[0].max_time_s == 50
        assert requests[1].sent_ids == (*thoughts[:budget], *closing)
        assert (requests[1].prompt_ids, requests[1].sampling) == (
            requests[0].prompt_ids,
            requests[0].sampling,
        )
        assert front.coordinator.cancelled.get(timeout=5) == requests[0].id


def test_a_model_without_reasoning_keeps_within_any_budget(plain_front: Any) -> None:
    assert plain_front.chat(thinking_budget=5).json()["choices"][0]["message"]["content"] == "fine"
