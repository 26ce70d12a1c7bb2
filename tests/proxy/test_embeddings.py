"""Embeddings over HTTP, by the official clients: forms of input and answer, limits, errors, and no model."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import openai
import pytest

from mlx_mesh.mesh.messages import Embed, Embedded, Failed

MODEL = "org/tiny-bert"
VECTORS = [[0.6, 0.8, 0.0], [0.0, 1.0, 0.0]]


def embed(request: Embed) -> Embedded:
    rows = [VECTORS[at % 2] for at in range(len(request.inputs))]
    vectors = b"".join(struct.pack("<3f", *row) for row in rows)
    return Embedded(id="", num_dimensions=3, vectors=vectors, num_tokens=7)


@pytest.fixture
def front(start_front: Any, saying: Any) -> Any:
    return start_front(saying([]), coordinator={"embed": embed}, embedding_model=MODEL, ready=False)


@pytest.fixture
def client(front: Any) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{front.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_openai_client_reads_both_encodings(front: Any, client: openai.OpenAI) -> None:
    """Also while the mesh itself is not ready: the two models have nothing to do with each other."""
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = client.embeddings.create(model="tiny-bert", input=["a", "b"], **options)  # type: ignore[arg-type]
        if options.get("encoding_format") == "base64":
            continue  # the client hands such texts on as they are
        assert [item.embedding for item in answer.data] == [pytest.approx(row) for row in VECTORS]
        assert [item.index for item in answer.data] == [0, 1]
        assert (answer.model, answer.usage.prompt_tokens, answer.usage.total_tokens) == (MODEL, 7, 7)
    raw = front.post("/embeddings", {"input": "a", "encoding_format": "base64"}).json()
    assert raw["data"][0]["embedding"] == "mpkZP83MTD8AAAAA"


@pytest.mark.parametrize(
    ("given", "inputs"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_every_form_of_input_reaches_the_model(
    front: Any, client: openai.OpenAI, given: Any, inputs: Any
) -> None:
    client.embeddings.create(model=MODEL, input=given, dimensions=2, user="me")
    assert front.coordinator.embeds[0].inputs == inputs
    assert (front.coordinator.embeds[0].dimensions, front.coordinator.embeds[0].truncate) == (2, False)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", [1]]}, "input[1]"),
        ({"input": [1, "a"]}, "input[0]"),
        ({"input": [[1], []]}, "input[1]"),
        ({"input": [{"type": "image_url"}]}, "input[0]"),
        ({"input": ["a"] * 2049}, "input"),
        ({"input": "a" * 1_000_001}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "temperature": 1}, "temperature"),
    ],
)
def test_what_cannot_be_an_input_is_refused_by_name(front: Any, body: Any, param: str) -> None:
    response = front.post("/v1/embeddings", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert not front.coordinator.embeds


def test_the_ollama_client_gets_both_forms(front: Any) -> None:
    client = ollama.Client(host=front.url)
    try:
        check_ollama(front, client)
    finally:
        client._client.close()


def check_ollama(front: Any, client: ollama.Client) -> None:
    answer = client.embed(model=f"{MODEL}:latest", input=["a", "b"], dimensions=3)
    assert [list(row) for row in answer.embeddings] == [pytest.approx(row) for row in VECTORS]
    assert answer.prompt_eval_count == 7 and front.coordinator.embeds[0].truncate
    client.embed(model=MODEL, input="a", truncate=False)
    assert not front.coordinator.embeds[1].truncate
    assert list(client.embeddings(model=MODEL, prompt="a").embedding) == pytest.approx(VECTORS[0])
    assert MODEL in [model.model for model in client.list().models]
    assert client.show(MODEL).capabilities == ["embedding"]
    with pytest.raises(ollama.ResponseError, match="makes no embeddings"):
        client.embed(model="other", input="a")


def test_the_model_is_listed_and_makes_nothing_else(front: Any, client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["mlx-community/tiny-model", "local", MODEL]
    assert client.models.retrieve("tiny-bert").id == MODEL
    front.set_ready(True)
    assert front.post("/v1/embeddings", {"input": "a", "model": "local"}).status_code == 404
    assert "/v1/embeddings" in front.chat(model="tiny-bert").json()["error"]["message"]
    features = front.http.get("/v1/capabilities").json()
    assert features["features"]["embeddings"] and features["endpoints"]["/v1/embeddings"]["available"]


def test_without_a_model_the_answer_says_how_to_get_one(plain_front: Any) -> None:
    for path, body in (
        ("/v1/embeddings", {"input": "a"}),
        ("/api/embed", {"model": "x", "input": "a"}),
        ("/api/embeddings", {"model": "x", "prompt": "a"}),
    ):
        response = plain_front.post(path, body)
        assert response.status_code == 404 and "--embedding-model" in response.text
    assert not plain_front.http.get("/v1/capabilities").json()["features"]["embeddings"]


@pytest.mark.parametrize(
    ("failed", "status"),
    [
        (Failed(id="", code="not_ready", message="it is started again", retry_after_s=3), 503),
        (Failed(id="", code="queue_full", message="too many", retry_after_s=3), 429),
        (Failed(id="", code="context_length_exceeded", message="too long", param="input"), 400),
        (Failed(id="", code="timeout", message="too late"), 504),
    ],
)
def test_a_failure_of_the_embedder_is_told_in_every_dialect(
    start_front: Any, saying: Any, failed: Failed, status: int
) -> None:
    front = start_front(saying([]), coordinator={"embed": lambda _: failed}, embedding_model=MODEL)
    response = front.post("/v1/embeddings", {"input": "a"})
    assert response.status_code == status
    assert response.headers.get("retry-after") == (str(failed.retry_after_s) if status != 400 else None) or (
        status == 504
    )
    error = response.json()["error"]
    assert (error["code"], error["param"]) == (failed.code, failed.param or None)
    other = front.post("/api/embed", {"model": MODEL, "input": "a"})
    assert (other.status_code, other.json()["error"]) == (status, failed.message)


def test_a_client_that_leaves_cancels(start_front: Any, saying: Any) -> None:
    front = start_front(saying([]), embedding_model=MODEL)  # its embedder never answers
    with pytest.raises(httpx.ReadTimeout):
        front.post("/v1/embeddings", {"input": "a"}, timeout=0.3)
    assert front.coordinator.cancelled.get(timeout=20) == front.coordinator.embeds[0].id
