"""A mesh as an MCP server over standard input and output: programs that speak the Model Context Protocol can
ask the model, and ask about the mesh. The protocol is the `mcp` package's, which is an extra."""

from __future__ import annotations

import asyncio
import importlib.util
import threading
from collections.abc import Callable
from typing import Any, cast

from mlx_mesh import __version__
from mlx_mesh.launcher.api import Api, ApiError
from mlx_mesh.launcher.chat import PATH
from mlx_mesh.mesh.errors import SettingsError

INSTRUCTIONS = "A language model served by mlx-mesh over one or more machines."


def require_package() -> None:
    """Raises SettingsError that says what to install."""
    if importlib.util.find_spec("mcp") is None:
        raise SettingsError(
            "`mlx-mesh mcp` needs the package mcp, which is not installed. Run: pip install 'mlx-mesh[mcp]'"
        )


def build_server(api: Api) -> Any:
    """The server with its three tools; `run()` serves until the end of its input."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    async def told(work: Callable[..., Any], *arguments: Any) -> Any:
        """Do it in a thread; what the mesh says against it is for the client to read."""
        try:
            return await asyncio.to_thread(work, *arguments)
        except ApiError as error:
            raise ToolError(str(error)) from error

    server = MCPServer("mlx-mesh", instructions=INSTRUCTIONS, version=__version__, log_level="WARNING")

    async def generate(
        prompt: str,
        system: str = "",
        max_tokens: int | None = None,
        temperature: float | None = None,
        seed: int | None = None,
    ) -> dict[str, Any]:
        """Answer a prompt with the served model: the text, why it ended, and what it used."""
        turns = [{"role": "system", "content": system}] if system else []
        body = {
            "messages": [*turns, {"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "seed": seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        stop = threading.Event()
        try:
            return cast("dict[str, Any]", await told(_answer, api, body, stop))
        except asyncio.CancelledError:
            stop.set()  # the connection closes at the next token, and all ranks stop
            raise

    async def status() -> dict[str, Any]:
        """Whether the mesh is ready, its world size, sharding, queue, and a row for each rank."""
        found = await told(api.get, "/v1/cluster/status")
        nodes = await told(api.get, "/v1/cluster/nodes")
        return {"status": found, "ranks": nodes.get("ranks", []), "hosts": nodes.get("hosts", [])}

    async def list_models() -> dict[str, Any]:
        """The served models under each of their names."""
        found = await told(api.get, "/v1/models")
        return {"models": found.get("data", [])}

    for tool in (generate, status, list_models):
        server.tool()(tool)
    return server


def _answer(api: Api, body: dict[str, Any], stop: threading.Event) -> dict[str, Any]:
    """In a thread. Raises ApiError."""
    given = {name: value for name, value in body.items() if value is not None}
    text, reasoning, finish_reason, usage = "", "", None, None
    for event in api.stream(PATH, given):
        if stop.is_set():
            raise ApiError("The request was cancelled.")
        usage = event.get("usage") or usage
        for choice in event.get("choices", []):
            delta = choice.get("delta", {})
            text += delta.get("content") or ""
            reasoning += delta.get("reasoning_content") or ""
            finish_reason = choice.get("finish_reason") or finish_reason
    answer = {"text": text, "finish_reason": finish_reason, "usage": usage}
    return answer | ({"reasoning": reasoning} if reasoning else {})
