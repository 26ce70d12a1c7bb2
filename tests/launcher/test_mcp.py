"""The MCP server, asked by the protocol's own client: in memory, and once as a process."""

from __future__ import annotations

import asyncio
import http.server
import importlib.util
import json
import sys
import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest
from mcp import Client, StdioServerParameters

from mlx_mesh.launcher import mcp_server
from mlx_mesh.launcher.api import Api, ApiError
from mlx_mesh.mesh.errors import SettingsError

WITHIN_S = 60.0


class ScriptedApi:
    """Thinks, and says "fine"; `bodies` are the questions. `gate` holds back its second token."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.began, self.gate, self.ended = threading.Event(), threading.Event(), threading.Event()
        self.gate.set()
        self.error: ApiError | None = None

    def get(self, path: str) -> Any:
        if path == "/v1/cluster/nodes":
            return {"ranks": [{"rank": 0}], "hosts": []}
        return {"data": [{"id": "tiny"}], "ready": True, "path": path}

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self.bodies.append({"path": path, **body})
        if self.error is not None:
            raise self.error
        try:
            yield {"choices": [{"delta": {"reasoning_content": "hm"}}]}
            self.began.set()
            assert self.gate.wait(WITHIN_S)
            yield {"choices": [{"delta": {"content": "fi"}}]}
            yield {"choices": [{"delta": {"content": "ne"}, "finish_reason": "stop"}]}
            yield {"choices": [], "usage": {"completion_tokens": 2}}
        finally:
            self.ended.set()


@pytest.fixture
def api() -> ScriptedApi:
    return ScriptedApi()


def call(api: ScriptedApi, name: str, **arguments: Any) -> Any:
    async def ask() -> Any:
        async with asyncio.timeout(WITHIN_S), Client(mcp_server.build_server(cast(Api, api))) as client:
            return await client.call_tool(name, arguments)

    return asyncio.run(ask())


def test_generate_says_the_text_and_what_it_used(api: ScriptedApi) -> None:
    result = call(api, "generate", prompt="how?", system="be brief", max_tokens=3, seed=5)
    assert result.structured_content == {
        "text": "fine",
        "reasoning": "hm",
        "finish_reason": "stop",
        "usage": {"completion_tokens": 2},
    }
    body = api.bodies[0]
    assert body["path"] == "/v1/chat/completions" and "temperature" not in body
    assert [turn["role"] for turn in body["messages"]] == ["system", "user"]
    assert (body["max_tokens"], body["seed"]) == (3, 5)


def test_status_and_models_are_the_meshs_own_words(api: ScriptedApi) -> None:
    status = call(api, "status").structured_content
    assert status["status"]["path"] == "/v1/cluster/status" and status["ranks"] == [{"rank": 0}]
    assert call(api, "list_models").structured_content["models"] == [{"id": "tiny"}]


def test_a_refusal_of_the_mesh_is_the_tools_error(api: ScriptedApi) -> None:
    api.error = ApiError("it answered 503: The mesh is not ready.", 503)
    result = call(api, "generate", prompt="how?")
    assert result.is_error and "The mesh is not ready." in result.content[0].text


def test_a_call_that_is_cancelled_ends_its_stream(api: ScriptedApi) -> None:
    api.gate.clear()

    async def ask() -> None:
        async with Client(mcp_server.build_server(cast(Api, api))) as client:
            asked = asyncio.create_task(client.call_tool("generate", {"prompt": "how?"}))
            assert await asyncio.to_thread(api.began.wait, WITHIN_S)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await client.list_tools()  # what was sent before is heard by now
            api.gate.set()
            assert await asyncio.to_thread(api.ended.wait, WITHIN_S)

    asyncio.run(ask())


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"mlx-mesh\[mcp\]"):
        mcp_server.require_package()


class _Models(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = json.dumps({"data": [{"id": "tiny"}]}).encode()
        self.send_response(200 if self.path == "/v1/models" else 404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


def test_the_command_serves_over_standard_input_and_output() -> None:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Models) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        words = ["-I", "-m", "mlx_mesh.launcher", "mcp", "--url", url]

        async def ask() -> Any:
            async with (
                asyncio.timeout(WITHIN_S),
                Client(StdioServerParameters(command=sys.executable, args=words)) as client,
            ):
                tools = await client.list_tools()
                return sorted(tool.name for tool in tools.tools), await client.call_tool("list_models", {})

        try:
            names, result = asyncio.run(ask())
        finally:
            server.shutdown()
            thread.join()
    assert names == ["generate", "list_models", "status"]
    assert result.structured_content["models"] == [{"id": "tiny"}]
