"""GET /v1/models: the served model under each of its names, and the embedding model."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.mesh.messages import NodeReply
from mlx_mesh.proxy.bodies import read_json_object
from mlx_mesh.proxy.convert.common import Room
from mlx_mesh.proxy.errors import RETRY_AFTER_S, ApiError, invalid, json_response
from mlx_mesh.proxy.routes.common import services_of
from mlx_mesh.proxy.services import Services

router = APIRouter()

MAX_NAME_CHARS = 1024

_STATUS_OF_REFUSAL = {"model_not_allowed": 403, "not_ready": 503}
"""Of other refusals: 409, the model or the mesh as it is now cannot do that."""


@router.get("/v1/models")
async def list_models(request: Request) -> Response:
    services = services_of(request)
    listed = [_describe(services, name) for name in services.listed_models]
    if services.embedding_names:
        listed.append(_describe_embedding(services))
    return json_response({"object": "list", "data": listed})


@router.post("/v1/models/switch")
@router.post("/v1/models/load")
async def switch(request: Request) -> Response:
    """Serve another model on all ranks, or the one that was unloaded, which needs no name. 202: it is
    planned, and loaded now; 200: it is served already."""
    services = services_of(request)
    body = await read_json_object(request, services.config.max_body_bytes, may_be_empty=True)
    model = body.get("model", "")
    if not isinstance(model, str) or set(body) - {"model"}:
        raise invalid(
            "Give the one field 'model', a text; none is the model that was unloaded.", param="model"
        )
    if len(model) > MAX_NAME_CHARS:
        raise invalid(f"Invalid 'model': at most {MAX_NAME_CHARS} characters.", param="model")
    reply = await services.client.switch_model(model)
    return _told(reply, model or services.config.model_id)


def _told(reply: NodeReply, model: str) -> Response:
    """Raises ApiError."""
    if reply.error:
        status = _STATUS_OF_REFUSAL.get(reply.error, 409)
        raise ApiError(
            status,
            reply.message,
            code=reply.error,
            param="model",
            retry_after_s=RETRY_AFTER_S if status == 503 else 0,
        )
    told = {"model": model, "message": reply.message, "changing": reply.is_changing, "epoch": reply.epoch}
    return json_response(told, 202 if reply.is_changing else 200)


@router.post("/v1/models/unload")
async def unload(request: Request) -> Response:
    """End the engines on all hosts when open requests are done; this front end stays. 202: it is under way;
    200: no model is loaded."""
    services = services_of(request)
    body = await read_json_object(request, services.config.max_body_bytes, may_be_empty=True)
    if set(body) - {"model"}:
        raise invalid("Give no field but 'model', the one that is served.", param="model")
    services.require_model(body.get("model"))
    return _told(await services.client.unload_model(), services.config.model_id)


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
        "architecture": {"input_modalities": list(services.media.kinds), "output_modalities": ["text"]},
    }
