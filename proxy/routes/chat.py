"""POST /v1/chat/completions."""

from __future__ import annotations

import dataclasses

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.answers.openai import ChatAnswer
from mlx_mesh.proxy.conversation import CONVERSATION_HEADER, conversation_id
from mlx_mesh.proxy.convert.chat import chat_job
from mlx_mesh.proxy.convert.common import prepare_chat
from mlx_mesh.proxy.routes.common import read_body, respond, services_of
from mlx_mesh.proxy.schemas.chat import CHAT_FIELDS, ChatRequest
from mlx_mesh.proxy.schemas.fields import parse

router = APIRouter()


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    services = services_of(request)
    body = parse(CHAT_FIELDS, ChatRequest, await read_body(request))
    services.require_model(body.model)
    conversation = conversation_id(request, body)
    prepared = await prepare_chat(services, chat_job(services, body))
    more = {}
    if conversation:
        more = {"metadata": {"conversation_id": conversation}}
        prepared = dataclasses.replace(
            prepared, headers={**prepared.headers, CONVERSATION_HEADER: conversation}
        )
    answer = ChatAnswer(
        answer_id=prepared.id,
        model_id=services.config.model_id,
        fingerprint=services.fingerprint,
        tokenizer=services.tokenizer,
        with_logprobs=body.num_logprobs is not None,
        with_usage_chunk=body.wants_usage_chunk,
        more=more,
    )
    return await respond(request, services, prepared, answer, stream=bool(body.stream))
