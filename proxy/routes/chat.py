"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.answers import ChatAnswer
from mlx_mesh.proxy.convert import prepare_chat
from mlx_mesh.proxy.routes.common import read_body, respond, services_of
from mlx_mesh.proxy.schemas.chat import CHAT_FIELDS, ChatRequest
from mlx_mesh.proxy.schemas.fields import parse

router = APIRouter()


@router.post("/v1/chat/completions")
@router.post("/chat/completions")
async def chat_completions(request: Request) -> Response:
    services = services_of(request)
    body = parse(CHAT_FIELDS, ChatRequest, await read_body(request))
    services.require_model(body.model)
    prepared = await prepare_chat(services, body)
    answer = ChatAnswer(
        answer_id=prepared.id,
        model_id=services.config.model_id,
        fingerprint=services.fingerprint,
        tokenizer=services.tokenizer,
        with_logprobs=body.num_logprobs is not None,
        with_usage_chunk=body.wants_usage_chunk,
    )
    return await respond(request, services, body, prepared, answer)
