"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.answers.openai import ChatAnswer
from mlx_mesh.proxy.conversation import conversation_id
from mlx_mesh.proxy.convert.chat import chat_job
from mlx_mesh.proxy.convert.common import prepare_chat
from mlx_mesh.proxy.routes.common import read_body, respond, services_of, while_there
from mlx_mesh.proxy.schemas.chat import CHAT_FIELDS, ChatRequest
from mlx_mesh.proxy.schemas.fields import parse

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    services = services_of(request)
    body = parse(CHAT_FIELDS, ChatRequest, await read_body(request))
    services.require_model(body.model)
    given_id = conversation_id(request, body)
    prepared = await while_there(request, prepare_chat(services, chat_job(services, body)))
    conversation = services.conversations.begin(given_id, body, is_enabled=services.config.keeps_prefixes)
    answer = ChatAnswer(
        answer_id=prepared.id,
        model_id=services.config.model_id,
        fingerprint=services.fingerprint,
        tokenizer=services.tokenizer,
        with_logprobs=body.num_logprobs is not None,
        with_usage_chunk=body.wants_usage_chunk,
        more={"metadata": {"conversation_id": conversation.id}},
    )
    return await respond(
        request, services, prepared, answer, stream=bool(body.stream), conversation=conversation
    )
