"""The OpenAPI document of this server, made from the lists by which bodies are read, so that they agree."""

from __future__ import annotations

import copy
from typing import Any

from fastapi import FastAPI

from mlx_mesh.proxy.schemas.chat import CHAT_FIELDS
from mlx_mesh.proxy.schemas.completions import COMPLETION_FIELDS
from mlx_mesh.proxy.schemas.embeddings import (
    EMBEDDING_FIELDS,
    OLLAMA_EMBED_FIELDS,
    OLLAMA_EMBEDDINGS_FIELDS,
)
from mlx_mesh.proxy.schemas.fields import FieldPolicy
from mlx_mesh.proxy.schemas.messages import COUNT_FIELDS, MESSAGES_FIELDS
from mlx_mesh.proxy.schemas.ollama import OLLAMA_CHAT_FIELDS, OLLAMA_GENERATE_FIELDS
from mlx_mesh.proxy.schemas.responses import RESPONSES_FIELDS

BODIES: dict[str, FieldPolicy] = {
    "/v1/chat/completions": CHAT_FIELDS,
    "/v1/completions": COMPLETION_FIELDS,
    "/v1/responses": RESPONSES_FIELDS,
    "/v1/responses/input_tokens": RESPONSES_FIELDS,
    "/v1/messages": MESSAGES_FIELDS,
    "/v1/messages/count_tokens": COUNT_FIELDS,
    "/v1/embeddings": EMBEDDING_FIELDS,
    "/api/embed": OLLAMA_EMBED_FIELDS,
    "/api/embeddings": OLLAMA_EMBEDDINGS_FIELDS,
    "/api/chat": OLLAMA_CHAT_FIELDS,
    "/api/generate": OLLAMA_GENERATE_FIELDS,
}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1},
    ]
}
_ERRORS = {
    "4XX": {"description": "Refused: an error object in the shape of the endpoint's API."},
    "503": {"description": "Not now; `Retry-After` says when to ask again."},
}


def document(app: FastAPI) -> dict[str, Any]:
    """Every path under its full name (`/v1/...`); those without it mean the same and are left out."""
    described = copy.deepcopy(app.openapi())
    for methods in described["paths"].values():
        for operation in methods.values():
            operation["responses"] = {"200": {"description": "The answer."}, **_ERRORS}
    for path, policy in BODIES.items():
        described["paths"][path]["post"]["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": _schema(policy)}},
        }
    described["paths"]["/api/show"]["post"]["requestBody"] = {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "properties": {"model": {"type": "string"}, "verbose": {"type": "boolean"}},
                    "required": ["model"],
                }
            }
        },
    }
    return described


def _schema(policy: FieldPolicy) -> dict[str, Any]:
    """Honoured fields as they are checked, ignored ones with the reason."""
    schema = _inlined(policy.body.model_json_schema())
    properties = schema["properties"]
    if policy is COMPLETION_FIELDS:
        properties["prompt"] = _PROMPT
    if policy is EMBEDDING_FIELDS or policy is OLLAMA_EMBED_FIELDS:
        properties["input"] = _PROMPT
    for name, reason in policy.ignored.items():
        properties.setdefault(name, {"description": f"Ignored: {reason}."})
    return schema


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """Without references: definitions stand where they are used, once each."""
    definitions = schema.pop("$defs", {})

    def resolve(part: Any) -> Any:
        if isinstance(part, list):
            return [resolve(one) for one in part]
        if not isinstance(part, dict):
            return part
        if "$ref" in part:
            return resolve(definitions[part["$ref"].rpartition("/")[2]])
        return {key: resolve(value) for key, value in part.items()}

    resolved = resolve(schema)
    assert isinstance(resolved, dict)
    return resolved
