"""The coordinator's numbers reach the front end, whatever they were made of."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from mlx_mesh.mesh.messages import HostPlan, MeshConfig, Metric, encode
from mlx_mesh.node.counters import _of_hosts
from mlx_mesh.node.roster import Roster


def test_a_number_that_is_true_or_false_is_written_as_one(seat_all: Callable[[Roster], None]) -> None:
    roster = Roster(MeshConfig(name="m", hosts=(HostPlan(name="mac1"), HostPlan(name="mac2"))))
    seat_all(roster)
    read = [msgspec.msgpack.decode(encode(metric), type=Metric) for metric in _of_hosts(roster, {})]
    pressure = {m.labels["host"]: m.value for m in read if m.name == "mlx_mesh_host_memory_pressure"}
    assert pressure == {"mac1": 0.0, "mac2": 0.0}
