"""/v1/cluster: the mesh as the coordinator sees it now."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.mesh.discovery import MAX_SCAN_S, MIN_SCAN_S, SCAN_S
from mlx_mesh.mesh.messages import MeshStatus, ScanReply
from mlx_mesh.proxy.bodies import read_json_object
from mlx_mesh.proxy.errors import RETRY_AFTER_S, ApiError, invalid, json_response
from mlx_mesh.proxy.media.item import NOUNS
from mlx_mesh.proxy.routes.common import services_of

router = APIRouter()

_STATUS_OF_REFUSAL = {"host_not_found": 404, "not_ready": 503}
"""Of other refusals: 409, the mesh as it is now cannot do that."""


@router.get("/v1/cluster/status")
async def cluster_status(request: Request) -> Response:
    """One object about the whole mesh; also at world size 1. `media`: what prompts may hold beside text, once
    it is known, and why not."""
    services = services_of(request)
    body = status_body(await services.client.status())
    readiness = services.client.readiness
    if readiness.media or readiness.media_refusals or readiness.ready:  # before that, it would say text only
        refusals = {kind: services.media.refusal(kind) for kind in NOUNS}
        body["media"] = {kind: {"available": not why, "reason": why} for kind, why in refusals.items()}
    return json_response(body)


@router.get("/v1/cluster/nodes")
async def cluster_nodes(request: Request) -> Response:
    """One row per rank, and one per host of the hostfile, whether it serves or not."""
    status = await services_of(request).client.status()
    return json_response(
        {
            "world_size": status.world_size,
            "epoch": status.epoch,
            "ranks": [msgspec.to_builtins(row) for row in status.ranks],
            "hosts": [msgspec.to_builtins(row) for row in status.hosts],
        }
    )


@router.post("/v1/cluster/nodes/{host}/drain")
async def drain_node(request: Request, host: str) -> Response:
    """Go on without this host. 202: it will leave with the next epoch; open requests go on with the same
    text. 200: it takes no part anyway. 404 and 409 say why not."""
    return await _change(request, "drain", host)


@router.post("/v1/cluster/nodes/{host}/add")
async def add_node(request: Request, host: str) -> Response:
    """Go on with this host again, which must be there. Statuses as for drain."""
    return await _change(request, "add", host)


@router.post("/v1/cluster/scan")
async def scan_network(request: Request) -> Response:
    """Look for hosts on the leader's network for `timeout_s` (3). What `mlx-mesh discover --json` prints; no
    host is added by it."""
    services = services_of(request)
    body = await read_json_object(request, services.config.max_body_bytes)
    for field in body:
        if field != "timeout_s":
            raise invalid(f"'{field}' is not known here; 'timeout_s' is.", param=field)
    timeout_s = body.get("timeout_s", SCAN_S)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float):
        raise invalid("'timeout_s' must be a number of seconds.", param="timeout_s")
    if not MIN_SCAN_S <= timeout_s <= MAX_SCAN_S:
        raise invalid(
            f"'timeout_s' is {timeout_s}; it must be {MIN_SCAN_S:g} to {MAX_SCAN_S:g}.", param="timeout_s"
        )
    return _scan_response(await services.client.scan(float(timeout_s)))


@router.get("/v1/cluster/scan")
async def last_scan(request: Request) -> Response:
    """What the last scan of this mesh has shown; 404 when there was none."""
    return _scan_response(await services_of(request).client.scan(0.0))


def _scan_response(reply: ScanReply) -> Response:
    if reply.error:
        raise ApiError(500, f"The scan failed: {reply.error}", code="scan_failed")
    if reply.report is None:
        raise ApiError(404, "There was no scan yet; POST /v1/cluster/scan makes one.", code="scan_not_found")
    return json_response(msgspec.to_builtins(reply.report))


async def _change(request: Request, action: Literal["drain", "add"], host: str) -> Response:
    reply = await services_of(request).client.change_node(action, host)
    if reply.error:
        status = _STATUS_OF_REFUSAL.get(reply.error, 409)
        raise ApiError(
            status, reply.message, code=reply.error, retry_after_s=RETRY_AFTER_S if status == 503 else 0
        )
    body = {
        "host": host,
        "action": action,
        "message": reply.message,
        "changing": reply.is_changing,
        "epoch": reply.epoch,
    }
    return json_response(body, 202 if reply.is_changing else 200)


def status_body(status: MeshStatus) -> dict[str, Any]:
    """MeshStatus as JSON, without the rows of ranks and hosts, which are at /v1/cluster/nodes."""
    fields: dict[str, Any] = msgspec.to_builtins(status)
    ranks = fields.pop("ranks")
    fields["queue"] = {name: fields[f"num_{name}"] for name in ("running", "waiting", "open")}
    fields["plan"] = fields.pop("placement")
    hosts = fields.pop("hosts")
    return {
        "enabled": True,
        **fields,
        "num_nodes": len({row["host"] for row in ranks}),
        "num_hosts": len(hosts),
        "coordinator": next((row["host"] for row in ranks if row["is_leader"]), None),
    }
