"""/v1/cluster/scan: what is on the leader's network, as `mlx-mesh discover --json` has it."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from mlx_mesh.mesh.discovery import Announcement, ScanReport, Sighting, report
from mlx_mesh.mesh.messages import ScanReply
from mlx_mesh.mesh.types import Versions

VERSIONS = Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3", protocol=1)


def seen() -> ScanReport:
    own = Announcement(host="mac1", run="0" * 16, role="node", versions=VERSIONS)
    other = Announcement(host="mac2", run="1" * 16, role="agent", port=1, versions=VERSIONS)
    sighting = Sighting(announcement=other, source="multicast", interface="en0")
    return report(own, [], [sighting], at=5.0, timeout_s=1.5, is_mac=False)


def test_a_scan_answers_with_what_was_seen(start_front: Any, saying: Any) -> None:
    front = start_front(saying([]))
    front.coordinator.scan_reply = ScanReply(id="", report=seen())
    for answer in (front.post("/v1/cluster/scan", {"timeout_s": 1.5}), front.http.get("/v1/cluster/scan")):
        assert answer.status_code == 200
        assert msgspec.convert(answer.json(), ScanReport) == seen()
    assert front.post("/v1/cluster/scan", {}).status_code == 200
    assert front.coordinator.scans == [1.5, 0.0, 3.0], "0 asks for the last one"
    assert front.coordinator.changes == [], "a scan adds no host"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"timeout_s": 0}, "it must be 0.2 to 60"),
        ({"timeout_s": 61}, "it must be 0.2 to 60"),
        ({"timeout_s": -1}, "it must be 0.2 to 60"),
        ({"timeout_s": "3"}, "a number of seconds"),
        ({"timeout_s": True}, "a number of seconds"),
        ({"timeout_s": None}, "a number of seconds"),
        ({"address": "10.0.0.1"}, "'address' is not known here"),
    ],
)
def test_what_cannot_be_scanned_for_is_refused(plain_front: Any, body: dict[str, Any], words: str) -> None:
    before = list(plain_front.coordinator.scans)
    answer = plain_front.post("/v1/cluster/scan", body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == next(iter(body))
    assert plain_front.coordinator.scans == before


def test_there_is_a_time_before_the_first_scan(start_front: Any, saying: Any) -> None:
    front = start_front(saying([]))
    answer = front.http.get("/v1/cluster/scan")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "scan_not_found")
    front.coordinator.scan_reply = ScanReply(id="", report=None, error="no interface")
    answer = front.post("/v1/cluster/scan", {})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "scan_failed")


def test_a_scan_needs_the_key(start_front: Any, saying: Any) -> None:
    front = start_front(saying([]), api_keys=("key-1",))
    for method in ("GET", "POST"):
        bare = httpx.request(method, f"{front.url}/v1/cluster/scan", json={} if method == "POST" else None)
        assert bare.status_code == 401
    assert front.coordinator.scans == []
