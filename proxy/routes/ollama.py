"""Ollama's API: /api/chat, /api/generate, and what its clients ask about models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.answers.ollama import OllamaAnswer, timestamp
from mlx_mesh.proxy.bodies import read_json_object
from mlx_mesh.proxy.convert.ollama import prepare_ollama_chat, prepare_ollama_generate
from mlx_mesh.proxy.errors import json_response
from mlx_mesh.proxy.model_card import ModelCard
from mlx_mesh.proxy.routes.common import read_body, respond, services_of, while_there
from mlx_mesh.proxy.schemas.fields import parse
from mlx_mesh.proxy.schemas.ollama import (
    OLLAMA_CHAT_FIELDS,
    OLLAMA_GENERATE_FIELDS,
    OllamaChatRequest,
    OllamaGenerateRequest,
)
from mlx_mesh.proxy.services import Services

API_VERSION = "0.12.0"
"""The version of Ollama whose API this is; clients compare it."""

_NEVER = "9999-12-31T23:59:59Z"
_NO_CARD = ModelCard(family="", quantization="", size_bytes=0, digest="", modified_at="")

router = APIRouter()

_MEDIA_WORDS = (("image", "vision"), ("audio", "audio"))
"""Ollama has no word for video."""


@router.post("/api/chat")
async def chat(request: Request) -> Response:
    services = services_of(request)
    body = parse(OLLAMA_CHAT_FIELDS, OllamaChatRequest, await read_body(request))
    require_model(services, body.model)
    if not body.messages:
        return _loaded(body.model, {"message": {"role": "assistant", "content": ""}})
    prepared = await while_there(request, prepare_ollama_chat(services, body))
    answer = OllamaAnswer(
        model=body.model, tokenizer=services.tokenizer, is_chat=True, with_logprobs=body.logprobs
    )
    return await respond(request, services, prepared, answer, stream=body.stream)


@router.post("/api/generate")
async def generate(request: Request) -> Response:
    services = services_of(request)
    body = parse(OLLAMA_GENERATE_FIELDS, OllamaGenerateRequest, await read_body(request))
    require_model(services, body.model)
    if not body.prompt and not body.images:
        return _loaded(body.model, {"response": ""})
    prepared = await while_there(request, prepare_ollama_generate(services, body))
    answer = OllamaAnswer(
        model=body.model, tokenizer=services.tokenizer, is_chat=False, with_logprobs=body.logprobs
    )
    return await respond(request, services, prepared, answer, stream=body.stream)


@router.get("/api/version")
async def version(request: Request) -> Response:
    return json_response({"version": API_VERSION, "mlx_mesh": services_of(request).config.version})


@router.get("/api/tags")
async def tags(request: Request) -> Response:
    services = services_of(request)
    entries = [_entry(services, name) for name in services.listed_models]
    if services.embedding_names:
        entries.append(_embedding_entry(services))
    return json_response({"models": entries})


@router.get("/api/ps")
async def running(request: Request) -> Response:
    """The served model: it is loaded as long as the mesh is ready."""
    services = services_of(request)
    if services.not_ready_reason:
        return json_response({"models": []})
    entry = _entry(services, services.config.model_id)
    more = {
        "expires_at": _NEVER,
        "size_vram": entry["size"],
        "context_length": services.client.readiness.context_length,
    }
    return json_response({"models": [{**entry, **more}]})


@router.post("/api/show")
async def show(request: Request) -> Response:
    services = services_of(request)
    body = await read_json_object(request, services.config.max_body_bytes)
    name = body.get("model") or body.get("name")
    if isinstance(name, str) and name.removesuffix(":latest") in services.embedding_names:
        return json_response(
            {"modelfile": "", "details": _details(_NO_CARD), "model_info": {}, "capabilities": ["embedding"]}
        )
    require_model(services, name if isinstance(name, str) else "")
    card = _card(services)
    tokenizer = services.tokenizer
    capabilities = ["completion"]
    capabilities += ["tools"] if tokenizer.takes_tools else []
    capabilities += ["thinking"] if tokenizer.markup.has_reasoning else []
    capabilities += [word for kind, word in _MEDIA_WORDS if kind in services.media.kinds]
    architecture = card.family or "unknown"
    return json_response(
        {
            "modelfile": "",
            "parameters": "",
            "license": "",
            "template": tokenizer.chat_template or "",
            "details": _details(card),
            "model_info": {
                "general.architecture": architecture,
                f"{architecture}.context_length": services.client.readiness.context_length,
            },
            "capabilities": capabilities,
            "modified_at": card.modified_at,
        }
    )


def require_model(services: Services, name: str) -> None:
    """Ollama's clients put a tag behind names. Raises ApiError 404."""
    services.require_model(name if name in services.accepted_names else name.removesuffix(":latest"))


def _loaded(model: str, said: dict[str, Any]) -> Response:
    """An empty request asks for the model to be loaded, which it is."""
    return json_response(
        {"model": model, "created_at": timestamp(), **said, "done": True, "done_reason": "load"}
    )


def _card(services: Services) -> ModelCard:
    return ModelCard.read(Path(services.config.model))


def _entry(services: Services, name: str) -> dict[str, Any]:
    card = _card(services)
    return {
        "name": name,
        "model": name,
        "modified_at": card.modified_at,
        "size": card.size_bytes,
        "digest": card.digest,
        "details": _details(card),
    }


def _embedding_entry(services: Services) -> dict[str, Any]:
    """Its folder is not this process' to read."""
    model = services.config.embedding_model
    return {
        "name": model,
        "model": model,
        "modified_at": timestamp(),
        "size": 0,
        "digest": "",
        "details": _details(_NO_CARD),
    }


def _details(card: ModelCard) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": card.family,
        "families": [card.family] if card.family else [],
        "parameter_size": "",
        "quantization_level": card.quantization,
    }
