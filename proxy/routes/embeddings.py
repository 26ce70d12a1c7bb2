"""POST /v1/embeddings, and Ollama's /api/embed and /api/embeddings: vectors of a second model."""

from __future__ import annotations

import array
import asyncio
import base64
import sys
import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_mesh.mesh.messages import Embed, Embedded
from mlx_mesh.proxy.bodies import read_json_object
from mlx_mesh.proxy.errors import json_response, shutting_down
from mlx_mesh.proxy.routes.common import CLIENT_GONE_STATUS, services_of
from mlx_mesh.proxy.schemas.embeddings import (
    EMBEDDING_FIELDS,
    OLLAMA_EMBED_FIELDS,
    OLLAMA_EMBEDDINGS_FIELDS,
    EmbeddingsRequest,
    Input,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    inputs_of,
)
from mlx_mesh.proxy.schemas.fields import parse
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.streaming import while_connected

router = APIRouter()


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    services = services_of(request)
    body = parse(EMBEDDING_FIELDS, EmbeddingsRequest, await _read(request))
    services.require_embedding_model(body.model)
    try:
        found = await _embed(request, services, inputs_of(body.input), body.dimensions)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_STATUS)
    is_text = body.encoding_format == "base64"
    answer = {
        "object": "list",
        "data": [
            {
                "object": "embedding",
                "index": index,
                "embedding": base64.b64encode(row).decode() if is_text else _numbers(row),
            }
            for index, row in enumerate(_rows(found))
        ],
        "model": services.config.embedding_model,
        "usage": {"prompt_tokens": found.num_tokens, "total_tokens": found.num_tokens},
    }
    return await asyncio.to_thread(json_response, answer)


@router.post("/api/embed")
async def ollama_embed(request: Request) -> Response:
    services = services_of(request)
    body = parse(OLLAMA_EMBED_FIELDS, OllamaEmbedRequest, await _read(request))
    services.require_embedding_model(body.model.removesuffix(":latest"))
    began = time.monotonic_ns()
    if body.input in ("", []):  # Ollama's way to ask for the model to be loaded
        return json_response({"model": body.model, "embeddings": []})
    try:
        found = await _embed(request, services, inputs_of(body.input), body.dimensions, body.truncate)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_STATUS)
    answer = {
        "model": body.model,
        "embeddings": [_numbers(row) for row in _rows(found)],
        "total_duration": time.monotonic_ns() - began,
        "load_duration": 0,
        "prompt_eval_count": found.num_tokens,
    }
    return await asyncio.to_thread(json_response, answer)


@router.post("/api/embeddings")
async def ollama_embeddings(request: Request) -> Response:
    services = services_of(request)
    body = parse(OLLAMA_EMBEDDINGS_FIELDS, OllamaEmbeddingsRequest, await _read(request))
    services.require_embedding_model(body.model.removesuffix(":latest"))
    if not body.prompt:
        return json_response({"embedding": []})
    try:
        found = await _embed(request, services, (body.prompt,), None, True)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_STATUS)
    return json_response({"embedding": _numbers(next(iter(_rows(found))))})


async def _read(request: Request) -> dict[str, Any]:
    """The body; the mesh itself need not be ready for embeddings."""
    services = services_of(request)
    raw = await read_json_object(request, services.config.max_body_bytes)
    if services.client.draining:
        raise shutting_down()
    return raw


async def _embed(
    request: Request,
    services: Services,
    inputs: tuple[Input, ...],
    dimensions: int | None,
    truncate: bool = False,
) -> Embedded:
    asked = Embed(id=f"emb-{uuid.uuid4().hex}", inputs=inputs, truncate=truncate, dimensions=dimensions or 0)
    found = await while_connected(request.receive, services.client.embed(asked))
    services.metrics.embedding_tokens.inc(found.num_tokens)
    return found


def _rows(found: Embedded) -> list[bytes]:
    """Each vector as little-endian float32, which is what base64 answers carry."""
    size = found.num_dimensions * 4
    return [found.vectors[at : at + size] for at in range(0, len(found.vectors), size)]


def _numbers(row: bytes) -> list[float]:
    numbers = array.array("f", row)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
