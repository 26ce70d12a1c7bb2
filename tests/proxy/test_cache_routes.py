"""What is kept of prompts, rank by rank, and its end."""

from __future__ import annotations

from typing import Any

import msgspec

RANKS = [
    {
        "rank": rank,
        "replica": 1,
        "host": f"mac{rank}",
        "entries": 2,
        "bytes": 100 + rank,
        "limit_bytes": 1000,
    }
    for rank in range(2)
]


def test_the_leader_counts_for_all_and_each_rank_says_what_it_holds(plain_front: Any) -> None:
    stats = plain_front.http.get("/v1/cache/stats").json()
    assert stats["ranks"] == RANKS
    assert (stats["enabled"], stats["hits"], stats["misses"], stats["tokens_saved"]) == (True, 5, 0, 70)


def test_clients_of_kamiwaza_find_their_shape(plain_front: Any) -> None:
    stats = plain_front.http.get("/v1/kv_cache/stats?verbose=true").json()
    assert stats["totals"] == {"kv_bytes": 201}
    assert stats["config"]["enabled"] is True
    assert stats["conversation"]["id"] is None and stats["conversation"]["cache"]["hits"] == 5
    assert stats["ranks"] == RANKS
    assert plain_front.http.get("/v1/conv_kv/stats").status_code == 404


def test_a_reset_goes_to_all_ranks_and_waits_for_a_mesh_that_is_not_ready(
    start_front: Any, saying: Any
) -> None:
    front = start_front(saying([]))
    answer = front.post("/v1/cache/reset", None)
    assert (answer.status_code, answer.json()["status"]) == (202, "accepted")
    assert front.coordinator.changes == [("reset", "")]
    front.coordinator.node_reply = msgspec.structs.replace(
        front.coordinator.node_reply, error="not_ready", message="not yet"
    )
    refused = front.post("/v1/cache/reset", None)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
    assert "retry-after" in refused.headers
