"""Several replicas as one mesh, by numbers."""

from __future__ import annotations

from mlx_mesh.mesh.kv_budget import KvBudget, RankKv
from mlx_mesh.mesh.messages import Readiness
from mlx_mesh.node.replica_status import merge_readiness


def readiness(context_length: int, budget_bytes: int, *, ready: bool = True, code: str = "") -> Readiness:
    rank = RankKv(rank=0, host="mac", budget_bytes=budget_bytes, fixed_bytes=0, per_token=((0, 1024),))
    return Readiness(
        ready=ready,
        reason="" if ready else "recovering",
        world_size=1,
        context_length=context_length,
        epoch=1,
        kv=KvBudget(ranks=(rank,)),
        code=code,
        media=("image",),
    )


def test_a_request_must_fit_whichever_replica_gets_it() -> None:
    large, small = readiness(8192, 1 << 30), readiness(4096, 1 << 24)
    for replicas in ([large, small], [small, large]):
        merged = merge_readiness(replicas, is_complete=True)
        assert (merged.context_length, merged.kv, merged.media) == (4096, small.kv, ("image",))
    unknown = readiness(0, 1 << 30, ready=False)  # one that was never ready knows no context
    assert merge_readiness([unknown, large], is_complete=False).context_length == 8192


def test_one_that_serves_is_enough_once_all_have_been_there() -> None:
    up, down = readiness(8192, 1), readiness(8192, 1, ready=False, code="model_unloaded")
    merged = merge_readiness([down, up], is_complete=True)
    assert merged.ready and not merged.code and (merged.num_ready, merged.num_replicas) == (1, 2)
    assert "serving with 1 of 2 replicas: replica 1: recovering" in merged.lineup
    assert not merge_readiness([down, up], is_complete=False).ready
    assert merge_readiness([down, down], is_complete=True).code == "model_unloaded"
    other = readiness(8192, 1, ready=False)
    assert merge_readiness([down, other], is_complete=True).code == ""
