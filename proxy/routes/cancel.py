"""POST /v1/requests/{id}/cancel: end an open answer on all ranks, by its id or its request's id."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.errors import ApiError, json_response
from mlx_mesh.proxy.routes.common import services_of

router = APIRouter()


@router.post("/v1/requests/{answer_id}/cancel")
async def cancel(request: Request, answer_id: str) -> Response:
    """200 when it was open; its client gets the error `request_cancelled`."""
    if not services_of(request).open_answers.cancel(answer_id):
        raise ApiError(404, f"No answer with the id '{answer_id}' is open.", code="request_not_found")
    return json_response({"id": answer_id, "object": "request", "cancelled": True})
