"""GET /v1/models: the served model under each of its names, and the embedding model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.convert.common import Room
from mlx_mesh.proxy.errors import json_response
from mlx_mesh.proxy.routes.common import services_of
from mlx_mesh.proxy.services import Services

router = APIRouter()


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    services = services_of(request)
    listed = [_describe(services, name) for name in services.listed_models]
    if services.embedding_names:
        listed.append(_describe_embedding(services))
    return json_response({"object": "list", "data": listed})


@router.get("/v1/models/{name:path}")
async def one_model(request: Request, name: str) -> Response:
    services = services_of(request)
    if name in services.embedding_names:
        return json_response(_describe_embedding(services))
    services.require_model(name)
    return json_response(_describe(services, name))


def _describe_embedding(services: Services) -> dict[str, Any]:
    model = services.config.embedding_model
    return {
        "id": model,
        "object": "model",
        "created": services.started,
        "owned_by": "mlx-mesh",
        "root": model,
        "aliases": list(services.embedding_names),
        "capabilities": ["embeddings"],
    }


def _describe(services: Services, name: str) -> dict[str, Any]:
    context_length = services.client.readiness.context_length
    return {
        "id": name,
        "object": "model",
        "created": services.started,
        "owned_by": "mlx-mesh",
        "root": services.config.model_id,
        "aliases": [alias for alias in services.accepted_names if alias != services.config.model],
        "context_length": context_length or None,
        "max_model_len": Room.of(services).num_tokens or None,  # the name that vLLM's clients read
    }
