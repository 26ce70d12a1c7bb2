"""The official clients' schemas, walked: each field has one fate, it is the documented one, and every route
is where clients with either base URL look for it."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from openai.types import completion_create_params as text_params
from openai.types import embedding_create_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import input_token_count_params, response_create_params

from mlx_mesh.proxy.openapi import BODIES
from mlx_mesh.proxy.schemas.fields import FieldPolicy

API_DOC = Path(__file__).parents[2] / "docs" / "api.md"
PNG = "data:image/png;base64,iVBORw0KGgo="

OFFICIAL: Mapping[str, tuple[Any, tuple[str, ...]]] = {
    "/v1/chat/completions": (chat_params.CompletionCreateParamsBase, ("stream",)),
    "/v1/completions": (text_params.CompletionCreateParamsBase, ("stream",)),
    "/v1/responses": (response_create_params.ResponseCreateParamsBase, ("stream",)),
    "/v1/responses/input_tokens": (input_token_count_params.InputTokenCountParams, ()),
    "/v1/embeddings": (embedding_create_params.EmbeddingCreateParams, ()),
    "/v1/messages": (message_create_params.MessageCreateParamsBase, ("stream",)),
    "/v1/messages/count_tokens": (message_count_tokens_params.MessageCountTokensParams, ()),
}
"""Endpoint: the client's TypedDict, and fields that stand in its streamed and whole variants only."""


def fields_of(path: str) -> set[str]:
    schema, more = OFFICIAL[path]
    return set(typing.get_type_hints(schema)) | set(more)


def fate(policy: FieldPolicy, name: str) -> str:
    if name in policy.honoured:
        return "yes"
    return "refused" if name in policy.refused else "ignored"


def table() -> str:
    """The documented table as it should be."""
    paths = list(OFFICIAL)
    names = sorted(set().union(*map(fields_of, paths)))
    rows = [
        "| Field | " + " | ".join(f"`{path.removeprefix('/v1/')}`" for path in paths) + " |",
        "|---" * (len(paths) + 1) + "|",
    ]
    for name in names:
        cells = [fate(BODIES[path], name) if name in fields_of(path) else "" for path in paths]
        rows.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(rows)


@pytest.mark.parametrize("path", OFFICIAL)
def test_every_field_of_an_official_schema_has_exactly_one_fate(path: str) -> None:
    policy = BODIES[path]
    fates = [set(policy.honoured), set(policy.refused), set(policy.ignored)]
    assert sum(map(len, fates)) == len(set.union(*fates)), "a field is in two lists"
    assert not fields_of(path) - {*policy.honoured, *policy.refused, *policy.ignored}


def test_the_table_of_fields_in_the_documentation_is_this_one() -> None:
    assert table() in API_DOC.read_text(), "docs/api.md needs this table:\n" + table()


def test_a_refused_field_is_a_400_that_names_it(plain_front: Any) -> None:
    """By each endpoint, for each field that the documentation calls refused."""
    for path in OFFICIAL:
        for name in BODIES[path].refused:
            response = plain_front.post(path, {name: {"anything": 1}})
            text = response.text
            assert response.status_code == 400 and f"'{name}'" in text, (path, name, text)


def test_every_route_answers_without_the_version_too(plain_front: Any) -> None:
    described = plain_front.http.get("/openapi.json").json()["paths"]
    versioned = [path for path in described if path.startswith("/v1/")]
    assert len(versioned) > 10
    for path in versioned:
        for method in described[path]:
            bare = re.sub(r"\{\w+(:\w+)?\}", "none", path.removeprefix("/v1"))
            response = plain_front.http.request(method, bare)
            assert "unknown_url" not in response.text and response.status_code != 405, (method, bare)


IMAGE_URL = {"type": "image_url", "image_url": {"url": PNG}}
INPUT_IMAGE = {"type": "input_image", "image_url": PNG}
BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
DOCUMENT = {"type": "document", "source": {"type": "url", "url": "http://127.0.0.1:1/x.pdf"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}


def _result(block: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "t", "content": [block]}


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [IMAGE_URL]}]},
            "messages[0].content[0]",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
            "messages[0].content[0]",
        ),
        ("/v1/responses", {"input": [{"role": "user", "content": [INPUT_IMAGE]}]}, "input[0].content[0]"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": "f"}]}]},
            "input[0].content[0]",
        ),
        (
            "/v1/responses",
            {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [INPUT_IMAGE]}]},
            "input[1].output[0]",
        ),
        (
            "/v1/messages",
            {"max_tokens": 4, "messages": [{"role": "user", "content": [BLOCK]}]},
            "messages[0].content[0]",
        ),
        (
            "/v1/messages",
            {"max_tokens": 4, "messages": [{"role": "user", "content": [DOCUMENT]}]},
            "messages[0].content[0]",
        ),
        (
            "/v1/messages/count_tokens",
            {"messages": [USE, {"role": "user", "content": [_result(BLOCK)]}]},
            "messages[1].content[0].content[0]",
        ),
        (
            "/api/chat",
            {"model": "local", "messages": [{"role": "user", "content": "?", "images": ["iVBORw0KGgo="]}]},
            "messages[0].images",
        ),
        ("/api/generate", {"model": "local", "prompt": "?", "images": ["iVBORw0KGgo="]}, "images"),
    ],
)
def test_media_is_refused_by_every_api_naming_the_part(
    plain_front: Any, path: str, body: Any, part: str
) -> None:
    """Nothing is fetched, and the text beside it is not answered alone."""
    num_before = len(plain_front.coordinator.requests)
    response = plain_front.post(path, body)
    assert response.status_code == 400 and f"'{part}'" in response.text, response.text
    if path.startswith(("/v1/chat", "/v1/responses")):
        error = response.json()["error"]
        assert (error["code"], error["param"]) == ("unsupported_media", part)
    assert len(plain_front.coordinator.requests) == num_before
