"""The leader's HTTP as the launcher's commands use it: directly, or through SSH when it serves on the
leader's own loopback. Standard library only."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from mlx_mesh.launcher.remote import RemoteHost
from mlx_mesh.mesh.errors import ExitCode, MeshError

CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 120.0  # the server sends keepalives every few seconds while it streams


_NOBODYS_FAULT = (408, 429, 499)
"""Statuses of requests that may be sent again as they are."""


class ApiError(MeshError):
    """The server did not answer (`status` 0), or answered with an error."""

    def __init__(self, message: str, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        if 400 <= status < 500 and status not in _NOBODYS_FAULT:
            self.exit_code = ExitCode.USAGE


class BadQuestion(ApiError):
    """What cannot even be asked."""

    exit_code = ExitCode.USAGE


class _Through(http.client.HTTPConnection):
    """A connection whose stream another host opens."""

    def __init__(self, host: str, port: int, via: RemoteHost) -> None:
        super().__init__(host, port, timeout=CONNECT_TIMEOUT_S)
        self._via = via

    def connect(self) -> None:
        self.sock = self._via.connect_to(self.host, self.port, CONNECT_TIMEOUT_S)


class Api:
    """One server. `via`: the host that can reach `url`; None = this machine can."""

    def __init__(self, url: str, api_key: str = "", via: RemoteHost | None = None) -> None:
        try:
            parts = urlsplit(url)
            scheme, host, port = parts.scheme, parts.hostname, parts.port
        except ValueError:  # a port or an IPv6 address that is none
            scheme, host, port = "", None, None
        if scheme != "http" or not host:
            raise BadQuestion(f"{url} is no http:// address. Give one like http://127.0.0.1:18000.")
        self.url = f"{scheme}://{parts.netloc}"
        self.host, self.port = host, port or 80
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._via = via

    def get(self, path: str) -> Any:
        """The JSON at `path`. Raises ApiError."""
        return self._ask("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The JSON that a POST, without a body if there is none, is answered with. Raises ApiError."""
        return self._ask("POST", path, body)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = self._open()
        try:
            response = self._send(connection, method, path, body)
            return json.loads(response.read())
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"{self.url}{path} cannot be read ({error}).") from error
        finally:
            connection.close()

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The JSON of each server-sent event up to [DONE]. Raises ApiError, also for an error event."""
        connection = self._open()
        try:
            response = self._send(connection, "POST", path, body)
            for line in response:
                data = line.strip().removeprefix(b"data:").strip()
                if not line.startswith(b"data:"):
                    continue
                if data == b"[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise ApiError(f"The server ended the answer: {_message(event)}")
                yield event
            raise ApiError("The stream ended in the middle: the server is gone or the connection broke.")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise ApiError(f"{self.url}{path} cannot be read ({error}).") from error
        finally:
            connection.close()

    def _open(self) -> http.client.HTTPConnection:
        if self._via is not None:
            return _Through(self.host, self.port, self._via)
        return http.client.HTTPConnection(self.host, self.port, timeout=CONNECT_TIMEOUT_S)

    def _send(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: dict[str, Any] | None
    ) -> http.client.HTTPResponse:
        headers = dict(self._headers)
        if body is not None:
            headers["Content-Type"] = "application/json"
        try:
            connection.connect()
        except OSError as error:
            raise ApiError(f"Nothing answers at {self.url} ({error}). Is the mesh still starting?") from error
        connection.sock.settimeout(READ_TIMEOUT_S)
        connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = connection.getresponse()
        if response.status >= 400:
            text, code = response.read().decode("utf-8", "replace"), ""
            try:
                told = json.loads(text)
                text, code = _message(told), _code(told)
            except ValueError:
                text = " ".join(text.split())[:300]
            hint = " Give the key with --api-key-file or MLX_MESH_API_KEY." if response.status == 401 else ""
            message = f"{self.url}{path} answered {response.status}: {text}{hint}"
            raise ApiError(message, response.status, code)
        return response


def _message(body: Any) -> str:
    """The words of OpenAI's error envelope."""
    error = body.get("error", body) if isinstance(body, dict) else body
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _code(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("code") or "") if isinstance(error, dict) else ""
