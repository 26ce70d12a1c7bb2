"""/v1/cluster: the mesh as the coordinator sees it now."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.mesh.messages import MeshStatus
from mlx_mesh.proxy.errors import json_response
from mlx_mesh.proxy.routes.common import services_of

router = APIRouter()


@router.get("/v1/cluster/status")
async def cluster_status(request: Request) -> Response:
    """One object about the whole mesh; also at world size 1."""
    return json_response(status_body(await services_of(request).client.status()))


@router.get("/v1/cluster/nodes")
async def cluster_nodes(request: Request) -> Response:
    """One row per rank."""
    status = await services_of(request).client.status()
    return json_response(
        {
            "world_size": status.world_size,
            "epoch": status.epoch,
            "ranks": [msgspec.to_builtins(row) for row in status.ranks],
        }
    )


def status_body(status: MeshStatus) -> dict[str, Any]:
    """MeshStatus as JSON, without the rows of ranks, which are at /v1/cluster/nodes."""
    fields: dict[str, Any] = msgspec.to_builtins(status)
    ranks = fields.pop("ranks")
    fields["queue"] = {name: fields[f"num_{name}"] for name in ("running", "waiting", "open")}
    fields["plan"] = fields.pop("placement")
    return {
        "enabled": True,
        **fields,
        "num_nodes": len({row["host"] for row in ranks}),
        "coordinator": next((row["host"] for row in ranks if row["is_leader"]), None),
    }
