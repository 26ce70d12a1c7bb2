"""Everything around the answers: health, models, cluster, errors, limits, keys, headers, metrics."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.messages import Failed, GenerateRequest, NodeReply, TokenChunk
from mlx_mesh.node import client as client_module
from mlx_mesh.proxy import bodies
from mlx_mesh.proxy.auth import Guard
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.schemas.chat import CHAT_FIELDS
from mlx_mesh.proxy.schemas.completions import COMPLETION_FIELDS
from mlx_mesh.proxy.schemas.messages import COUNT_FIELDS, MESSAGES_FIELDS
from mlx_mesh.proxy.schemas.ollama import OLLAMA_CHAT_FIELDS, OLLAMA_GENERATE_FIELDS, OPTION_FIELDS
from mlx_mesh.proxy.schemas.responses import RESPONSES_FIELDS

IdsOf = Callable[[str], list[int]]
CHAT = "/v1/chat/completions"
USER = {"messages": [{"role": "user", "content": "hi"}]}
API_DOC = Path(__file__).parents[2] / "docs" / "api.md"


@pytest.fixture
def front(start_front: Any, saying: Any, ids_of: IdsOf) -> Any:
    return start_front(saying(ids_of("fine")))


def test_health_is_alive_and_ready_tells_the_truth(start_front: Any, saying: Any) -> None:
    front = start_front(saying([]), ready=False)
    assert front.http.get("/health").json()["status"] == "ok"
    response = front.http.get("/ready")
    assert response.status_code == 503 and int(response.headers["retry-after"]) > 0
    assert response.json()["reason"] == "rank 1 on mac1 is loading"
    assert response.json()["error"]["code"] == "not_ready"
    front.set_ready(True)
    response = front.http.get("/ready")
    assert (response.status_code, response.json()["world_size"]) == (200, 2)
    front.drain()
    assert front.http.get("/ready").status_code == 503


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_routes_answer_with_and_without_the_version(plain_front: Any, prefix: str) -> None:
    assert plain_front.post(f"{prefix}/chat/completions", USER).status_code == 200
    assert plain_front.post(f"{prefix}/completions", {"prompt": "a"}).status_code == 200
    listed = plain_front.http.get(f"{prefix}/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["mlx-community/tiny-model", "local"]
    assert {model["owned_by"] for model in listed["data"]} == {"mlx-mesh"}
    one = plain_front.http.get(f"{prefix}/models/mlx-community/tiny-model").json()
    assert (one["id"], one["context_length"]) == ("mlx-community/tiny-model", 512)


def test_the_model_is_found_by_each_of_its_names_and_no_other(plain_front: Any, model_folder: Path) -> None:
    for name in ("mlx-community/tiny-model", "tiny-model", "local", str(model_folder)):
        assert plain_front.chat(model=name).status_code == 200
    for response in (plain_front.chat(model="gpt-4o"), plain_front.http.get("/v1/models/gpt-4o")):
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["param"]) == (404, "model_not_found", "model")


def test_cluster_nodes_list_every_rank(plain_front: Any) -> None:
    body = plain_front.http.get("/v1/cluster/nodes").json()
    assert [row["rank"] for row in body["ranks"]] == [0, 1]
    expected = "rank host agent_pid engine_pid epoch phase step layers weights_bytes memory_bytes address"
    for row in body["ranks"]:
        assert {*expected.split(), "last_heartbeat_s"} <= row.keys()
    assert body["ranks"][1]["host"] == "mac1" and body["ranks"][1]["phase"] == "ready"


def test_cluster_status_describes_the_mesh(plain_front: Any) -> None:
    body = plain_front.http.get("/v1/cluster/status").json()
    assert body["world_size"] == 2 and body["sharding"] == "pipeline" and body["backend"] == "ring"
    assert body["queue"] == {"running": 1, "waiting": 2, "open": 3}
    assert (body["enabled"], body["num_nodes"], body["coordinator"]) == (True, 2, "mac0")
    assert {"epoch", "epoch_cause", "model", "plan", "ready", "reason", "restarts"} <= body.keys()
    assert body["media"]["image"] == {"available": False, "reason": "this model takes text only"}


@pytest.mark.parametrize(
    ("reply", "status"),
    [
        ({"is_changing": True}, 202),
        ({}, 200),
        ({"error": "host_not_found"}, 404),
        ({"error": "does_not_fit"}, 409),
        ({"error": "not_ready"}, 503),
    ],
)
def test_a_host_is_drained_or_added_by_a_post_that_says_whether_it_will(
    plain_front: Any, reply: dict[str, Any], status: int
) -> None:
    coordinator = plain_front.coordinator
    coordinator.node_reply = NodeReply(id="", message="The words.", epoch=3, **reply)
    coordinator.changes.clear()
    for action in ("drain", "add"):
        response = plain_front.http.post(f"/v1/cluster/nodes/mac2/{action}")
        assert response.status_code == status and ("retry-after" in response.headers) == (status == 503)
        body = response.json()
        if status < 300:
            assert (body["message"], body["changing"], body["epoch"]) == ("The words.", status == 202, 3)
        else:
            assert body["error"]["message"] == "The words." and body["error"]["code"] == reply["error"]
    assert coordinator.changes == [("drain", "mac2"), ("add", "mac2")]


@pytest.mark.parametrize("path", ["/v1/models/load", "/v1/models/switch", "/models/switch"])
def test_another_model_is_asked_for_by_a_post_that_says_whether_it_comes(
    start_front: Any, saying: Any, path: str
) -> None:
    front = start_front(saying([]))
    reply = NodeReply(id="", message="it is loaded", epoch=4, is_changing=True)
    front.coordinator.node_reply = reply
    response = front.post(path, {"model": "org/other"})
    assert (response.status_code, response.json()["changing"], response.json()["epoch"]) == (202, True, 4)
    front.coordinator.node_reply = NodeReply(id="", message="it is served", epoch=4)
    assert front.post(path, {"model": "org/other"}).status_code == 200
    for code, status in (
        ("model_not_allowed", 403),
        ("model_does_not_fit", 409),
        ("model_unusable", 409),
        ("not_ready", 503),
    ):
        front.coordinator.node_reply = NodeReply(id="", message="no", epoch=4, error=code)
        response = front.post(path, {"model": "org/other"})
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)
        assert ("retry-after" in response.headers) == (status == 503)
    assert set(front.coordinator.changes) == {("switch", "org/other")}
    for body in ({"model": 1}, {"model": "x", "force": True}, {"model": "x" * 1025}):
        assert front.post(path, body).json()["error"]["param"] == "model"
    front.coordinator.node_reply = reply
    served = front.http.get("/v1/models").json()["data"][0]["id"]
    for nothing in (b"{}", b""):
        loaded = front.http.post(path, content=nothing)
        assert (loaded.status_code, loaded.json()["model"]) == (202, served)
    assert front.coordinator.changes[-1] == ("switch", "")


def test_the_model_is_unloaded_and_requests_are_told_what_brings_it_back(plain_front: Any) -> None:
    front = plain_front
    front.coordinator.node_reply = NodeReply(id="", message="it is unloaded", epoch=4, is_changing=True)
    for body in (b"{}", b"", b'{"model": "local"}'):
        response = front.http.post("/v1/models/unload", content=body)
        assert (response.status_code, response.json()["changing"]) == (202, True)
    assert front.coordinator.changes[-1] == ("unload", "")
    assert front.post("/v1/models/unload", {"model": "another"}).status_code == 404
    assert front.post("/v1/models/unload", {"keep": 1}).status_code == 400
    front.set_ready(
        False, "tiny was unloaded by a request. POST /v1/models/load brings it back.", "model_unloaded"
    )
    for answer in (front.chat(), front.http.get("/ready")):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (503, "model_unloaded")
        assert "/v1/models/load" in error["message"] and "retry-after" not in answer.headers
    assert front.http.get("/health").status_code == 200
    assert front.http.get("/api/ps").json() == {"models": []}
    front.set_ready(True)


def test_a_coordinator_that_is_stuck_is_a_503_with_a_name(
    front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "STATUS_DEADLINE_S", 0.05)
    front.coordinator.answers_status = False
    response = front.http.get("/v1/cluster/status")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "status_unavailable")


def test_capabilities_say_what_is_honoured_refused_and_ignored(plain_front: Any) -> None:
    body = plain_front.http.get("/v1/capabilities").json()
    assert body["world_size"] == 2
    chat = body["endpoints"]["/v1/chat/completions"]
    assert chat["available"] and "temperature" in chat["fields"]["honoured"]
    assert "modalities" in chat["fields"]["refused"] and "user" in chat["fields"]["ignored"]


def test_capabilities_say_what_the_model_cannot_do_and_why(
    start_front: Any, saying: Any, ids_of: Any
) -> None:
    reasons = {"alone_reason": "its caches cannot be joined", "whole_reason": "a token sees later ones"}
    for given in ({}, reasons):
        front = start_front(saying(ids_of("ok")), coordinator=given)
        body = front.http.get("/v1/capabilities").json()
        for feature in ("continuous_batching", "chunked_prefill"):
            assert body["features"][feature] is not bool(given)
        assert body["reasons"] == {
            "continuous_batching": given.get("alone_reason", ""),
            "chunked_prefill": given.get("whole_reason", ""),
        }


def test_the_documentation_names_every_field_and_header() -> None:
    text = API_DOC.read_text()
    named = set(re.findall(r"`([a-z0-9_]+)`", text))
    policies = (
        CHAT_FIELDS,
        COMPLETION_FIELDS,
        RESPONSES_FIELDS,
        MESSAGES_FIELDS,
        COUNT_FIELDS,
        OLLAMA_CHAT_FIELDS,
        OLLAMA_GENERATE_FIELDS,
        OPTION_FIELDS,
    )
    for policy in policies:
        assert {*policy.honoured, *policy.refused, *policy.ignored} <= named
    for header in ("x-mlx-mesh-world-size", "x-mlx-mesh-max-tokens-clamped", "x-request-id", "x-conv-id"):
        assert f"`{header}`" in text


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("GET", CHAT, 405, "method_not_allowed"),
        ("OPTIONS", CHAT, 405, "method_not_allowed"),
        ("GET", "/docs", 404, "unknown_url"),
    ],
)
def test_unknown_paths_and_methods_have_the_envelope(
    plain_front: Any, method: str, path: str, status: int, code: str
) -> None:
    response = plain_front.http.request(method, path)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert "access-control-allow-origin" not in response.headers
    assert response.headers["x-mlx-mesh-world-size"] == "2"
    assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"\xff\xfe",
        b'{"messages": NaN}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
)
def test_a_body_that_is_no_json_object_is_a_400(plain_front: Any, body: bytes) -> None:
    response = plain_front.http.post(CHAT, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_a_413_that_arrives(
    start_front: Any, saying: Any, ids_of: IdsOf, chunked: bool
) -> None:
    front = start_front(saying(ids_of("a")), max_body_bytes=100_000)
    content = b"x" * 500_000
    response = front.http.post(CHAT, content=iter([content]) if chunked else content)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")
    assert front.chat().status_code == 200


def test_a_body_that_is_far_too_large_is_refused_before_it_is_sent(
    start_front: Any, saying: Any, ids_of: IdsOf
) -> None:
    front = start_front(saying(ids_of("a")), max_body_bytes=1000)
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.settimeout(10)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999999\r\n\r\n"
        client.sendall(head.encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 413")


def test_a_body_that_does_not_arrive_is_given_up(front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_DEADLINE_S", 0.05)
    with socket.create_connection(("127.0.0.1", front.port)) as client:
        client.settimeout(10)
        client.sendall(f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 50\r\n\r\n{{".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 408")


def test_a_client_that_leaves_inside_its_body_is_no_fault_of_ours() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    request = Request({"type": "http", "headers": [(b"content-length", b"50")]}, receive)
    with pytest.raises(ApiError, match="ended before the request body was complete"):
        asyncio.run(bodies.read_json_object(request, 1000))


@pytest.mark.parametrize("path", ["/health", "/ready"])
def test_load_balancers_may_ask_with_head(plain_front: Any, path: str) -> None:
    response = plain_front.http.head(path)
    assert (response.status_code, response.content) == (200, b"")


def test_a_mistake_of_our_own_is_a_500_with_the_envelope_and_without_details(
    front: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> Any:
        raise ValueError("secret prompt text")

    monkeypatch.setattr("mlx_mesh.proxy.answers.openai.ChatAnswer.whole", broken)
    response = front.chat()
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")
    assert response.headers["connection"] == "close"  # else the next request may be reset
    assert "secret" not in response.text
    monkeypatch.setattr("mlx_mesh.proxy.answers.openai.ChatAnswer.closing", broken)
    with front.http.stream(
        "POST", CHAT, json={**USER, "stream": True, "stream_options": {"include_usage": True}}
    ) as stream:
        text = stream.read().decode()
    assert "internal_error" in text and "secret" not in text and "[DONE]" not in text


# ---------------------------------------------------------------- who may ask


def test_a_key_is_required_once_configured(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("a")), api_keys=("key-1", "clé-2"))
    for authorization in (None, "Bearer nope", "Basic key-1", "Bearer", "key-1"):
        headers = {"authorization": authorization} if authorization else {}
        response = front.http.post(CHAT, json=USER, headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
    for path in ("/v1/models", "/v1/cluster/nodes", "/metrics", "/nothing"):
        assert front.http.get(path).status_code == 401
    assert front.http.post("/v1/cluster/nodes/mac1/drain").status_code == 401
    for path in ("/health", "/ready"):
        assert front.http.get(path).status_code == 200
    assert front.http.post(CHAT, json=USER, headers={"authorization": "Bearer key-1"}).status_code == 200


def test_on_loopback_no_key_is_needed_and_other_addresses_refuse_to_run_without() -> None:
    async def app(*args: Any) -> None: ...

    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        Guard(app, api_keys=(), serve_host=host)
    for host in ("0.0.0.0", "192.168.1.2", "::", "", "mac1.local"):
        with pytest.raises(SettingsError, match="needs an API key"):
            Guard(app, api_keys=(), serve_host=host)
        Guard(app, api_keys=("k",), serve_host=host)


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:18000", 200),
        ("127.0.0.1", 200),
        ("[::1]:18000", 200),
        ("api.localhost", 200),
        ("host.docker.internal:18000", 200),
        ("evil.example", 403),
        ("evil.example:18000", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost.evil.example", 403),
    ],
)
def test_on_loopback_a_name_of_others_is_refused(plain_front: Any, host: str, status: int) -> None:
    assert plain_front.http.get("/health", headers={"host": host}).status_code == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://127.0.0.1:8080", 200),
        ("vscode-webview://abc", 200),
        ("app://obsidian.md", 200),
        ("https://evil.example", 403),
        ("http://localhost.evil.example", 403),
        ("null", 403),
    ],
)
def test_web_pages_of_others_may_not_ask(plain_front: Any, origin: str, status: int) -> None:
    response = plain_front.http.post(CHAT, json=USER, headers={"origin": origin})
    assert response.status_code == status
    assert "access-control-allow-origin" not in response.headers


def test_with_a_key_the_key_decides_and_not_the_name(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("a")), api_keys=("key-1",), serve_host="0.0.0.0")
    headers = {"host": "mac1.local", "origin": "https://my.page", "authorization": "Bearer key-1"}
    assert front.http.post(CHAT, json=USER, headers=headers).status_code == 200


# ---------------------------------------------------------------- counters


def test_metrics_count_answers_tokens_and_disconnects(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    front = start_front(saying(ids_of("fine"), cached_tokens=2))
    front.chat()
    front.http.get("/v1/nothing")
    text = front.http.get("/metrics").text
    assert 'mlx_mesh_http_requests_total{route="/v1/chat/completions",status="200"} 1.0' in text
    assert 'mlx_mesh_http_requests_total{route="other",status="404"} 1.0' in text
    assert f"mlx_mesh_completion_tokens_total {float(len(ids_of('fine')))}" in text
    assert "mlx_mesh_cached_prompt_tokens_total 2.0" in text
    assert "mlx_mesh_ready 1.0" in text and "mlx_mesh_world_size 2.0" in text


def test_a_client_that_went_away_is_counted_and_nothing_stays_open(start_front: Any) -> None:
    submitted = threading.Event()

    async def endless(request: GenerateRequest) -> AsyncIterator[TokenChunk | Failed]:
        submitted.set()
        await asyncio.Event().wait()
        yield TokenChunk(id="")

    front = start_front(endless)
    body = {**USER, "stream": True}
    with httpx.Client(base_url=front.url, trust_env=False) as http, http.stream("POST", CHAT, json=body):
        assert submitted.wait(10)
    front.coordinator.cancelled.get(timeout=5)
    text = front.http.get("/metrics").text
    assert "mlx_mesh_client_disconnects_total 1.0" in text
    assert "mlx_mesh_open_requests 0.0" in text


@pytest.mark.parametrize(
    ("path", "key"),
    [(CHAT, "error"), ("/v1/responses", "error"), ("/v1/messages", "type"), ("/api/chat", "error")],
)
def test_each_dialect_reads_bodies_within_limits_and_names_what_is_wrong(
    plain_front: Any, path: str, key: str
) -> None:
    for body in (b"{", b"[]", b"{}"):
        response = plain_front.http.post(path, content=body)
        assert response.status_code == 400 and key in response.json()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, USER),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**USER, "max_tokens": 3}),
        ("/api/chat", {**USER, "model": "local", "stream": False}),
        ("/api/generate", {"prompt": "a", "model": "local", "stream": False}),
    ],
)
def test_each_dialect_takes_a_deadline_of_the_request(plain_front: Any, path: str, body: Any) -> None:
    assert plain_front.post(path, {**body, "max_time_s": 2.5}).status_code == 200
    assert plain_front.coordinator.requests[-1].max_time_s == 2.5
    assert plain_front.post(path, body).status_code == 200
    assert plain_front.coordinator.requests[-1].max_time_s == 0.0


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GARBAGE\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 60,  # TLS
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
        f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode(),
    ],
)
def test_what_is_no_http_gets_the_envelope_and_ends_the_connection(plain_front: Any, nonsense: bytes) -> None:
    with socket.create_connection(("127.0.0.1", plain_front.port)) as client:
        client.settimeout(10)
        client.sendall(nonsense)
        answer = b"".join(iter(lambda: client.recv(10_000), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"connection: close" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    assert plain_front.chat().status_code == 200


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "word " * 300}]}, "messages"),
        ("/v1/completions", {"prompt": "word " * 300}, "prompt"),
        ("/v1/completions", {"prompt": [5] * 256}, "prompt"),
        ("/api/generate", {"prompt": "word " * 300, "raw": True, "model": "local"}, None),
    ],
)
def test_what_never_fits_the_tightest_rank_is_refused_with_its_numbers(
    start_front: Any, saying: Any, ids_of: IdsOf, path: str, body: Any, param: str | None
) -> None:
    """256 tokens fit rank 1, though the context has 4096."""
    kv = KvBudget(
        ranks=tuple(
            RankKv(rank=r, host=f"mac{r}", budget_bytes=size, fixed_bytes=0, per_token=((0, 10_000),))
            for r, size in enumerate((90_000_000, 3_000_000))
        )
    )
    front = start_front(saying(ids_of("a")), coordinator={"context_length": 4096, "kv": kv})
    response = front.post(path, body)
    error = response.json()["error"]
    assert response.status_code == 400
    message = error if isinstance(error, str) else error["message"]
    assert "rank 1 (mac1), which has 3 MB" in message and "up to 256 tokens" in message
    if param is not None:
        assert (error["code"], error["param"]) == ("kv_memory_exceeded", param)
    assert front.coordinator.requests == []
    assert 'mlx_mesh_requests_too_long_total{limit="kv_memory"} 1.0' in front.http.get("/metrics").text
    limits = front.http.get("/v1/capabilities").json()["limits"]
    assert (limits["context_length"], limits["max_sequence_tokens"]) == (4096, 256)
    response = front.post("/v1/completions", {"prompt": [5] * 250, "max_tokens": 100})
    assert response.headers["x-mlx-mesh-max-tokens-clamped"] == "6"
    assert front.coordinator.requests[0].max_tokens == 6


def test_listed_origins_may_ask_and_read_and_no_others(start_front: Any, saying: Any, ids_of: IdsOf) -> None:
    page = "https://chat.example:8443"
    for keys, status in (((), 200), (("key-1",), 401)):
        front = start_front(saying(ids_of("a")), allowed_origins=(page,), api_keys=keys)
        asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        allowed = front.http.options(CHAT, headers={"origin": page, **asked})
        assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, page)
        answer = front.http.post(CHAT, json=USER, headers={"origin": page})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, page)
        for other in ("https://evil.example", "https://chat.example", "null"):
            refused = front.http.options(CHAT, headers={"origin": other, **asked})
            assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
            answer = front.http.post(CHAT, json=USER, headers={"origin": other})
            assert answer.status_code == (401 if keys else 403)
            assert "access-control-allow-origin" not in answer.headers
