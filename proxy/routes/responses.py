"""POST /v1/responses, and what may be done with a stored one."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.answers.responses import ResponsesAnswer
from mlx_mesh.proxy.convert.common import encode_job, prepare_chat
from mlx_mesh.proxy.convert.responses import ResponsesJob, item_turns, responses_job
from mlx_mesh.proxy.errors import ApiError, json_response
from mlx_mesh.proxy.media.item import items_of
from mlx_mesh.proxy.response_store import StoredResponse
from mlx_mesh.proxy.routes.common import read_body, respond, services_of, while_there
from mlx_mesh.proxy.schemas.fields import parse
from mlx_mesh.proxy.schemas.responses import RESPONSES_FIELDS, ResponsesRequest
from mlx_mesh.proxy.services import Services

router = APIRouter()


@router.post("/v1/responses")
async def responses(request: Request) -> Response:
    services = services_of(request)
    body = parse(RESPONSES_FIELDS, ResponsesRequest, await read_body(request))
    services.require_model(body.model)
    asked = responses_job(services, body)
    prepared = await while_there(request, prepare_chat(services, asked.job))

    def store(finished: dict[str, Any]) -> None:
        if body.store is not False:
            _store(services, asked, finished)

    answer = ResponsesAnswer(
        answer_id=prepared.id,
        model_id=services.config.model_id,
        body=body,
        tokenizer=services.tokenizer,
        on_complete=store,
    )
    return await respond(request, services, prepared, answer, stream=bool(body.stream))


@router.post("/v1/responses/input_tokens")
async def input_tokens(request: Request) -> Response:
    """How many tokens the prompt of such a request has; nothing is generated."""
    services = services_of(request)
    body = parse(RESPONSES_FIELDS, ResponsesRequest, await read_body(request))
    services.require_model(body.model)
    encoded, _ = await while_there(request, encode_job(services, responses_job(services, body).job))
    return json_response({"object": "response.input_tokens", "input_tokens": len(encoded.ids)})


@router.get("/v1/responses/{response_id}")
async def stored_response(request: Request, response_id: str) -> Response:
    return json_response(_stored(request, response_id).body)


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(request: Request, response_id: str) -> Response:
    """The items that the request itself had, the newest first, as OpenAI lists them."""
    items = [
        {"type": "message", **item, "id": item.get("id", f"{response_id}-{at}")}
        for at, item in enumerate(_stored(request, response_id).items)
    ][::-1]
    ids = [item["id"] for item in items]
    return json_response(
        {
            "object": "list",
            "data": items,
            "first_id": ids[0] if ids else None,
            "last_id": ids[-1] if ids else None,
            "has_more": False,
        }
    )


@router.delete("/v1/responses/{response_id}")
async def delete_response(request: Request, response_id: str) -> Response:
    _stored(request, response_id)
    services_of(request).responses.remove(response_id)
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.post("/v1/responses/{response_id}/cancel")
async def cancel_response(request: Request, response_id: str) -> Response:
    if not services_of(request).open_answers.cancel(response_id):
        raise _not_found(response_id)
    return json_response({"id": response_id, "object": "response", "status": "cancelled"})


def _store(services: Services, asked: ResponsesJob, finished: dict[str, Any]) -> None:
    answer = item_turns(services.tokenizer, finished["output"], services.media.parts)
    turns = [*asked.turns, *answer]
    for item in items_of(turns):
        item.param = "previous_response_id"  # what brings it along from now on
    services.responses.put(finished["id"], StoredResponse(finished, turns, asked.items))


def _stored(request: Request, response_id: str) -> StoredResponse:
    found = services_of(request).responses.get(response_id)
    if found is None:
        raise _not_found(response_id)
    return found


def _not_found(response_id: str) -> ApiError:
    return ApiError(404, f"There is no response '{response_id[:80]}' here.", code="response_not_found")
