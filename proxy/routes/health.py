"""/health: this process lives. /ready: requests are taken. /metrics: counters."""

from __future__ import annotations

import contextlib

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.node.client import StatusUnavailable
from mlx_mesh.proxy.errors import RETRY_AFTER_S, json_response, not_ready
from mlx_mesh.proxy.mesh_metrics import text_of
from mlx_mesh.proxy.routes.common import services_of

router = APIRouter()


@router.get("/health")
@router.head("/health", include_in_schema=False)
async def health(request: Request) -> Response:
    """Always 200 while the process answers; says also whether the mesh is ready."""
    services = services_of(request)
    reason = services.not_ready_reason
    return json_response(
        {
            "status": "ok",
            "ready": not reason,
            "reason": reason,
            "lineup": services.client.readiness.lineup,
            "version": services.config.version,
        }
    )


@router.get("/ready")
@router.head("/ready", include_in_schema=False)
async def ready(request: Request) -> Response:
    """200, or 503 with the reason: what a load balancer should ask."""
    services = services_of(request)
    reason = services.not_ready_reason
    readiness = services.client.readiness
    body = {
        "ready": not reason,
        "reason": reason,
        "world_size": readiness.world_size,
        "lineup": readiness.lineup,
        "epoch": readiness.epoch,
        "replicas": readiness.num_replicas,
        "replicas_ready": readiness.num_ready,
    }
    if not reason:
        return json_response(body)
    if readiness.code and not services.client.draining:  # time alone does not help
        return json_response({**body, **not_ready(reason, readiness.code).envelope()}, 503)
    return json_response({**body, **not_ready(reason).envelope()}, 503, {"retry-after": str(RETRY_AFTER_S)})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """This process' numbers, and the coordinator's when it answers."""
    services = services_of(request)
    text = services.metrics.text()
    with contextlib.suppress(StatusUnavailable):
        text += text_of((await services.client.status(with_metrics=True)).metrics)
    return Response(text, media_type=CONTENT_TYPE_LATEST)
