"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's API."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.answers.anthropic import MessagesAnswer
from mlx_mesh.proxy.convert.anthropic import messages_job
from mlx_mesh.proxy.convert.common import encode_job, prepare_chat
from mlx_mesh.proxy.errors import json_response
from mlx_mesh.proxy.routes.common import read_body, respond, services_of, while_there
from mlx_mesh.proxy.schemas.fields import parse
from mlx_mesh.proxy.schemas.messages import (
    COUNT_FIELDS,
    MESSAGES_FIELDS,
    CountTokensRequest,
    MessagesRequest,
)

router = APIRouter()


@router.post("/v1/messages")
async def messages(request: Request) -> Response:
    services = services_of(request)
    body = parse(MESSAGES_FIELDS, MessagesRequest, await read_body(request))
    services.require_model(body.model)
    prepared = await while_there(request, prepare_chat(services, messages_job(services, body)))
    answer = MessagesAnswer(
        answer_id=prepared.id,
        model_id=services.config.model_id,
        num_prompt=len(prepared.sequences[0].request.prompt_ids),
    )
    return await respond(request, services, prepared, answer, stream=bool(body.stream))


@router.post("/v1/messages/count_tokens")
async def count_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has; nothing is generated."""
    services = services_of(request)
    body = parse(COUNT_FIELDS, CountTokensRequest, await read_body(request))
    services.require_model(body.model)
    encoded, _ = await while_there(request, encode_job(services, messages_job(services, body)))
    return json_response({"input_tokens": len(encoded.ids)})
