"""/v1/cache: what is kept of prompts on each rank. /v1/kv_cache/stats has it in Kamiwaza's shape."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from mlx_mesh.mesh.messages import MeshStatus
from mlx_mesh.proxy.errors import RETRY_AFTER_S, ApiError, json_response
from mlx_mesh.proxy.routes.common import services_of

router = APIRouter()


@router.get("/v1/cache/stats")
async def cache_stats(request: Request) -> Response:
    """Of this epoch, as old as the last heartbeat."""
    services = services_of(request)
    return json_response(stats_body(await services.client.status(), services.config.keeps_prefixes))


@router.post("/v1/cache/reset")
async def reset_cache(request: Request) -> Response:
    """Drop all that is kept, on all ranks at the same step. 202: it is under way; running requests go on."""
    reply = await services_of(request).client.reset_prefixes()
    if reply.error:
        raise ApiError(503, reply.message, code=reply.error, retry_after_s=RETRY_AFTER_S)
    return json_response({"status": "accepted", "message": reply.message, "epoch": reply.epoch}, 202)


@router.get("/v1/kv_cache/stats")
async def kv_cache_stats(request: Request) -> Response:
    """The same for clients of Kamiwaza. No cache is of one conversation, so `conversation` has no id."""
    services = services_of(request)
    stats = stats_body(await services.client.status(), services.config.keeps_prefixes)
    kept = {name: stats[name] for name in ("hits", "misses", "tokens_saved", "stored", "evicted")}
    return json_response(
        {
            "config": {
                "enabled": stats["enabled"],
                "limit_bytes": {rank["rank"]: rank["limit_bytes"] for rank in stats["ranks"]},
            },
            "totals": {"kv_bytes": sum(rank["bytes"] for rank in stats["ranks"])},
            "warmup": None,
            "prompt": kept,
            "conversation": {"id": None, "tokens": None, "cache": kept},
            "ranks": stats["ranks"],
        }
    )


def stats_body(status: MeshStatus, is_enabled: bool) -> dict[str, Any]:
    """The leader of each replica counts for all its ranks; each rank says what it holds."""
    leaders = [row.prefix for row in status.ranks if row.is_leader]
    return {
        "object": "cache.stats",
        "enabled": is_enabled,
        "epoch": status.epoch,
        "hits": sum(one.num_hits for one in leaders),
        "misses": sum(one.num_misses for one in leaders),
        "tokens_saved": sum(one.num_tokens for one in leaders),
        "stored": sum(one.num_stored for one in leaders),
        "evicted": sum(one.num_evicted for one in leaders),
        "ranks": [
            {
                "rank": row.rank,
                "replica": row.replica,
                "host": row.host,
                "entries": row.prefix.num_entries,
                "bytes": row.prefix.num_bytes,
                "limit_bytes": row.prefix.limit_bytes,
            }
            for row in status.ranks
        ],
    }
