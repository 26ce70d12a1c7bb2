"""Who may ask: API keys, and for a loopback server no web page of somebody else.

A page in a browser can reach a loopback server in two ways: by a name of its own that resolves to
127.0.0.1 (the Host header shows it), or by a plain cross-site POST (the Origin header shows it). CORS
headers are sent to listed origins only, so other pages cannot read an answer either.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.tenants import digest_of

OPEN_PATHS = frozenset({"/health", "/ready"})
"""Answered without a key: load balancers and supervisors have none."""

_CONTAINER_NAMES = frozenset({"host.docker.internal", "host.containers.internal", "gateway.docker.internal"})
"""How a container calls its host; `.internal` cannot be registered by anybody."""


def is_loopback(host: str) -> bool:
    """Whether a name or address always means this machine."""
    host = host.strip("[]").rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware that refuses with OpenAI's error envelope. `serve_host` is the bound address.

    Raises SettingsError when other machines could reach it without a key.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        api_keys: tuple[str, ...],
        serve_host: str,
        allowed_origins: tuple[str, ...] = (),
    ) -> None:
        if not api_keys and not is_loopback(serve_host):
            raise SettingsError(
                f"serving on {serve_host} needs an API key: other machines can reach it. "
                "Set MLX_MESH_API_KEY or --api-key-file, or serve on 127.0.0.1"
            )
        self._app = app
        self._keys = tuple(key.encode() for key in api_keys)
        self._serve_host = serve_host.strip("[]").lower()
        self._is_loopback = is_loopback(serve_host)
        self._allowed_origins = frozenset(allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(Headers(scope=scope), scope)):
            await refusal.response(scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, headers: Headers, scope: Scope) -> ApiError | None:
        host = _host_name(headers.get("host", ""))
        if self._is_loopback and host and not self._is_own_name(host):
            return ApiError(
                403,
                f"This server answers on loopback only, and the Host header says '{host}'. "
                "Use http://127.0.0.1 or http://localhost, or serve on another address with an API key.",
                code="host_not_allowed",
            )
        origin = headers.get("origin", "")
        if not self._keys and origin and not self._is_own_origin(origin, host):
            return ApiError(
                403,
                f"Web pages of {origin} may not use this server; `up --allow-origin` lets them.",
                code="origin_not_allowed",
            )
        if self._keys and scope["path"] not in OPEN_PATHS:
            given = _key_of(headers.get("authorization", ""), headers.get("x-api-key", ""))
            if refusal := self._key_refusal(given):
                return refusal
            scope.setdefault("state", {})["api_key_digest"] = digest_of(given)
        return None

    def _is_own_name(self, host: str) -> bool:
        return is_loopback(host) or host == self._serve_host or host in _CONTAINER_NAMES

    def _is_own_origin(self, origin: str, host: str) -> bool:
        """Desktop programs show origins such as app:// and vscode-webview://; only the web is refused."""
        if origin in self._allowed_origins:
            return True
        if origin == "null":  # a page from a file, or in a sandbox
            return False
        try:
            parts = urlsplit(origin)
        except ValueError:
            return False
        if parts.scheme not in ("http", "https"):
            return True
        return is_loopback(parts.hostname or "") or parts.hostname == host

    def _key_refusal(self, given: str) -> ApiError | None:
        if not given:
            message = "This server needs an API key: send 'Authorization: Bearer KEY'."
        else:
            # Every key is compared, each in constant time: the answer's timing tells nothing.
            matches = [hmac.compare_digest(given.encode(), key) for key in self._keys]
            if any(matches):
                return None
            message = "The API key is wrong."
        return ApiError(401, message, code="invalid_api_key")


def _key_of(authorization: str, x_api_key: str) -> str:
    """The key that a request shows; '' = none."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() != "bearer" or not given.strip():
        given = x_api_key  # Anthropic's header
    return given.strip()


def _host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    if host.startswith("["):
        return host[1 : host.find("]")].lower()
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()
