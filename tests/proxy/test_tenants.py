"""Which conversation a request is of, and whose prefixes it may use."""

from __future__ import annotations

from typing import Any

import pytest

from mlx_mesh.mesh.messages import GenerateRequest
from mlx_mesh.proxy.tenants import digest_of

CHAT = "/v1/chat/completions"
USER: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
KEYS = ("key-1", "key-2")


@pytest.fixture
def ask(start_front: Any, saying: Any, ids_of: Any) -> Any:
    """Start a front end; then ask it, and get what reached the coordinator."""

    def start(**config: Any) -> Any:
        front = start_front(saying(ids_of("a")), **config)

        def post(path: str, body: dict[str, Any], **headers: str) -> GenerateRequest:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            response = front.http.post(path, json=body, headers=named)
            assert response.status_code == 200, response.text
            request = front.coordinator.requests[-1]
            assert isinstance(request, GenerateRequest)
            return request

        return post

    return start


def test_a_conversation_is_named_by_its_fields_then_the_cache_key_then_the_user(ask: Any) -> None:
    post = ask()
    header = {"x_conversation_id": "h"}
    assert post(CHAT, USER).conversation == ""
    for body, headers, name in (
        ({"conversation_id": "c", "user": "u"}, header, "c"),
        ({"metadata": {"conversation_id": "m"}, "user": "u"}, {}, "m"),
        ({"user": "u", "prompt_cache_key": "k"}, header, "h"),
        ({"user": "u", "prompt_cache_key": "k"}, {}, "k"),
        ({"user": "u"}, {}, "u"),
        ({"conversation_id": "default"}, {}, ""),
    ):
        assert post(CHAT, USER | body, **headers).conversation == (digest_of(name) if name else "")
    assert post("/v1/completions", {"prompt": "a", "max_tokens": 2}, **header).conversation == digest_of("h")


def test_with_prefixes_per_key_each_key_has_a_salt_of_its_own(ask: Any) -> None:
    post = ask(api_keys=KEYS, has_prefixes_per_key=True)
    salts = [post(CHAT, USER, authorization=f"Bearer {key}").cache_salt for key in (*KEYS, KEYS[0])]
    assert salts[0] == salts[2] != salts[1] and all(salts)
    assert not any(key in salt for key in KEYS for salt in salts)
    salted = post(CHAT, USER | {"cache_salt": "mine"}, authorization=f"Bearer {KEYS[0]}").cache_salt
    assert salted == f"{salts[0]}mine"


def test_by_default_keys_share_prefixes(ask: Any) -> None:
    post = ask(api_keys=KEYS)
    assert [post(CHAT, USER, authorization=f"Bearer {key}").cache_salt for key in KEYS] == ["", ""]
    assert post(CHAT, USER | {"cache_salt": "s"}, authorization=f"Bearer {KEYS[0]}").cache_salt == "s"
