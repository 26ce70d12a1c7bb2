"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.answers.openai import TextAnswer
from mlx_mesh.proxy.convert.completions import prepare_completion
from mlx_mesh.proxy.routes.common import read_body, respond, services_of
from mlx_mesh.proxy.schemas.completions import COMPLETION_FIELDS, CompletionRequest
from mlx_mesh.proxy.schemas.fields import parse

router = APIRouter()


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    services = services_of(request)
    body = parse(COMPLETION_FIELDS, CompletionRequest, await read_body(request))
    services.require_model(body.model)
    text = await prepare_completion(services, body)
    prepared = text.prepared
    answer = TextAnswer(
        answer_id=prepared.id,
        model_id=services.config.model_id,
        fingerprint=services.fingerprint,
        tokenizer=services.tokenizer,
        with_logprobs=body.logprobs is not None,
        with_usage_chunk=body.wants_usage_chunk,
        echo=text.echo,
        prompt_ids=text.prompt_ids,
        num_per_prompt=body.best_of or body.n or 1,
        num_kept=body.n or 1,
    )
    return await respond(request, services, prepared, answer, stream=bool(body.stream))
