"""Bodies that nobody would send, and those that our own OpenAPI document allows: always an answer."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable
from schemathesis.core.result import Ok

from mlx_mesh.mesh.messages import Embed, Embedded
from mlx_mesh.proxy.openapi import BODIES
from mlx_mesh.proxy.schemas.fields import FieldPolicy

ENDPOINTS = list(BODIES)
USER = [{"role": "user", "content": "hi"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3, "temperature": 0.5, "stop": ["x"]},
    "/v1/completions": {"prompt": ["a", "b"], "max_tokens": 3, "logprobs": 1, "n": 2},
    "/v1/responses": {"input": "a", "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"input": USER},
    "/v1/messages": {"messages": USER, "max_tokens": 3, "system": "be kind"},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64", "dimensions": 1},
    "/api/embed": {"model": "bert", "input": "a"},
    "/api/embeddings": {"model": "bert", "prompt": "a"},
    "/api/chat": {"model": "local", "messages": USER, "options": {"num_predict": 3}, "stream": False},
    "/api/generate": {"model": "local", "prompt": "a", "options": {"num_predict": 3}, "stream": False},
}


@pytest.fixture
def whole_front(start_front: Any, saying: Any, ids_of: Any) -> Any:
    """One with an embedding model, too."""

    def embed(request: Embed) -> Embedded:
        return Embedded(id="", num_dimensions=1, vectors=b"\0\0\x80?" * len(request.inputs), num_tokens=1)

    return start_front(saying(ids_of("fine")), coordinator={"embed": embed}, embedding_model="bert")


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-3, 70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=30)
    | st.sampled_from(["", "user", "assistant", "tool", "auto", "none", "text", "\x00", "<|im_end|>", "𝔘🙂"])
)
NAMES = st.sampled_from(
    [
        "role",
        "content",
        "type",
        "text",
        "id",
        "name",
        "function",
        "arguments",
        "tool_calls",
        "image_url",
        "index",
    ]
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(NAMES | st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=15,
)
NOT_JSON = st.binary(max_size=200) | st.text(max_size=100).map(str.encode)


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    """An endpoint, and a good body of it with some fields replaced, or anything else."""
    path = draw(st.sampled_from(ENDPOINTS))
    if draw(st.integers(0, 9)) == 0:
        return path, draw(NOT_JSON | JSON.map(lambda value: json.dumps(value).encode()))
    body = dict(GOOD[path])
    for _ in range(draw(st.integers(1, 3))):
        body[draw(st.sampled_from(names(BODIES[path])) | st.sampled_from(list(body)))] = draw(JSON)
    data = bytearray(json.dumps(body).encode())
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 3))] = draw(st.binary(max_size=3))
    return path, bytes(data)


def names(policy: FieldPolicy) -> list[str]:
    return [*policy.honoured, *policy.refused, *policy.ignored]


def check(response: Any, sent: Any) -> None:
    """An answer in shape, and no fault of the server's."""
    where = f"{response.status_code} {response.text[:300]} to {sent!r}"
    assert response.status_code < 500 or (
        response.status_code == 503 and int(response.headers.get("retry-after", 0)) > 0
    ), where
    if response.status_code >= 400:
        body = response.json()
        assert "error" in body or body.get("type") == "error", where


def fuzz(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=max_examples < 1000,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


def client_of(front: Any) -> httpx.Client:
    """A connection for each request: making the next one may take longer than the server keeps one open."""
    limits = httpx.Limits(max_keepalive_connections=0)
    return httpx.Client(base_url=front.url, timeout=30, trust_env=False, limits=limits)


def try_bodies(front: Any, max_examples: int) -> None:
    statuses: dict[int, int] = {}

    @fuzz(max_examples)
    @given(made=bodies())
    def one(made: tuple[str, bytes]) -> None:
        path, body = made
        response = http.post(path, content=body, headers={"content-type": "application/json"})
        check(response, made)
        statuses[response.status_code] = statuses.get(response.status_code, 0) + 1

    with client_of(front) as http:
        one()
    print(f"{sum(statuses.values())} bodies: {statuses}")
    assert statuses[200] and statuses[400]
    assert front.chat().status_code == 200
    assert "mlx_mesh_open_requests 0.0" in front.http.get("/metrics").text


def try_schema(front: Any, max_examples: int) -> None:
    """What the document says may be sent, and what it says may not."""
    schema = schemathesis.openapi.from_dict(front.http.get("/openapi.json").json())
    num_tried = 0
    with client_of(front) as http:
        for found in schema.get_all_operations():
            assert isinstance(found, Ok)
            operation = found.ok()
            for mode in schemathesis.GenerationMode:

                @fuzz(max_examples)
                @given(case=operation.as_strategy(generation_mode=mode))
                def one(case: Any) -> None:
                    nonlocal num_tried
                    request = case.as_transport_kwargs(base_url=front.url)
                    known = ("method", "url", "params", "json", "data", "headers")
                    body = {name: request[name] for name in known if request.get(name) is not None}
                    if isinstance(body.get("data"), str | bytes):
                        body["content"] = body.pop("data")
                    try:
                        response = http.request(**body)
                    except (httpx.InvalidURL, httpx.LocalProtocolError, UnicodeEncodeError, TypeError):
                        return  # no client can send this
                    check(response, body)
                    num_tried += 1

                with contextlib.suppress(Unsatisfiable):  # nothing about it can be wrong
                    one()
    print(f"{num_tried} requests over {sum(1 for _ in schema.get_all_operations())} operations")
    assert num_tried > max_examples
    assert front.chat().status_code == 200


def test_odd_bodies_get_an_answer_and_never_a_fault_of_ours(whole_front: Any) -> None:
    try_bodies(whole_front, 200)


def test_what_our_own_document_allows_and_forbids_gets_an_answer(whole_front: Any) -> None:
    try_schema(whole_front, 4)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_ten_thousand_odd_bodies(whole_front: Any) -> None:
    try_bodies(whole_front, 10_000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_hundreds_of_requests_to_each_operation_of_our_own_document(whole_front: Any) -> None:
    try_schema(whole_front, 300)
