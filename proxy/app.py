"""The ASGI application: routes, error shapes, and what is around all of them."""

from __future__ import annotations

import asyncio
import re
import uuid

from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.proxy.auth import Guard
from mlx_mesh.proxy.errors import ApiError, shutting_down, to_api_error
from mlx_mesh.proxy.routes import (
    cache,
    cancel,
    capabilities,
    chat,
    cluster,
    completions,
    embeddings,
    health,
    messages,
    models,
    ollama,
    openapi,
    responses,
)
from mlx_mesh.proxy.routes.common import CLIENT_GONE_STATUS
from mlx_mesh.proxy.services import Services

WORLD_SIZE_HEADER = "x-mlx-mesh-world-size"
REQUEST_ID_HEADER = "x-request-id"

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}")

_ROUTERS = tuple(
    module.router
    for module in (
        chat,
        completions,
        responses,
        messages,
        embeddings,
        ollama,
        cancel,
        models,
        health,
        cluster,
        cache,
        capabilities,
        openapi,
    )
)


def build_app(services: Services) -> ASGIApp:
    """Everything that HTTP clients see. Raises SettingsError for settings that would be unsafe."""
    app = FastAPI(title="mlx-mesh", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.services = services
    for router in _ROUTERS:
        app.include_router(router)
        _add_without_version(app, router)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(MeshError, _mesh_error)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(Exception, _unexpected)
    config = services.config
    guarded: ASGIApp = Guard(
        app,
        api_keys=config.api_keys,
        serve_host=config.serve_host,
        allowed_origins=config.allowed_origins,
    )
    if config.allowed_origins:  # outside the guard: a browser asks for permission without a key
        guarded = CORSMiddleware(
            guarded,
            allow_origins=config.allowed_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(WORLD_SIZE_HEADER, REQUEST_ID_HEADER, "retry-after"),
        )
    paths = frozenset(str(getattr(route, "path", "")) for router in _ROUTERS for route in router.routes)
    return Marks(guarded, services, paths | {path.removeprefix("/v1") for path in paths})


def _add_without_version(app: FastAPI, router: APIRouter) -> None:
    """Clients whose base URL lacks `/v1` find every route, too."""
    for route in router.routes:
        if isinstance(route, APIRoute) and route.path.startswith("/v1/"):
            app.add_api_route(
                route.path.removeprefix("/v1"),
                route.endpoint,
                methods=sorted(route.methods or ()),
                include_in_schema=False,
            )


class Marks:
    """Outermost: puts the world size and a request id on every answer, and counts it."""

    def __init__(self, app: ASGIApp, services: Services, paths: frozenset[str]) -> None:
        self._app = app
        self._services = services
        self._paths = paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        request_id = _request_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        has_started = False

        async def marked_send(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(raw=message["headers"])
                headers[WORLD_SIZE_HEADER] = str(self._services.client.readiness.world_size)
                headers[REQUEST_ID_HEADER] = request_id
                path = scope["path"] if scope["path"] in self._paths else "other"
                self._services.metrics.http_requests.labels(path, str(message["status"])).inc()
            await send(message)

        try:
            await self._app(scope, receive, marked_send)
        except asyncio.CancelledError:  # the server stops and waits no longer for this answer
            if not has_started:
                await shutting_down().response(scope["path"])(scope, receive, marked_send)


def _request_id(scope: Scope) -> str:
    """The client's own id, so that it can name a request before it is answered; else a new one."""
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if _REQUEST_ID.fullmatch(given) else f"req_{uuid.uuid4().hex}"


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    match error.status_code:
        case 404:
            message, code = f"There is no {where}; /v1/capabilities lists what there is.", "unknown_url"
        case 405:
            message, code = (
                f"{where} is not allowed; the path exists with another method.",
                "method_not_allowed",
            )
        case _:
            message, code = str(error.detail), "http_error"
    response = ApiError(error.status_code, message, code=code).response(request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _mesh_error(request: Request, error: Exception) -> Response:
    return to_api_error(error).response(request.url.path)


async def _client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE_STATUS)


async def _unexpected(request: Request, error: Exception) -> Response:
    # The server logs the traceback itself; prompts are not in it. It closes the connection after that, and a
    # client that is not told would be reset when it sends its next request.
    response = to_api_error(error).response(request.url.path)
    response.headers["connection"] = "close"
    return response
