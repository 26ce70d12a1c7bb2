"""GET /openapi.json: every endpoint and the fields that it reads."""

from __future__ import annotations

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.proxy.errors import json_response
from mlx_mesh.proxy.openapi import document

router = APIRouter()


@router.get("/openapi.json")
async def openapi(request: Request) -> Response:
    return json_response(document(request.app))
