"""What is said when a host's links change, or when it slept."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from mlx_mesh.mesh.host_events import link_events, sleep_event


def test_changes_of_a_macs_links_are_told_and_others_are_not(macs: ModuleType) -> None:
    one, _ = macs.on_cable(macs.Mac())

    def events(before: Any, after: Any) -> list[str]:
        return link_events(macs.interfaces_of(before), macs.interfaces_of(after))

    unplugged = replace(one, cables=())
    assert events(one, one) == []
    assert events(one, unplugged) == ["en2 (Thunderbolt 1) lost its link"]
    assert events(unplugged, one) == ["en2 (Thunderbolt 1) has its link back"]
    moved = replace(one, thunderbolt={"en2": ("169.254.7.7/16",)})
    assert events(one, moved) == ["en2 (Thunderbolt 1) has 169.254.7.7/16, before 10.0.0.1/30"]
    slow = replace(one, cable_gbits=40)
    assert events(one, slow) == ["en2 (Thunderbolt 1) runs at 40 Gb/s, before 80 Gb/s"]
    assert events(one, replace(one, vpn=("100.64.0.2/32",))) == []  # a tunnel is no link
    fewer = replace(one, num_ports=2)
    assert events(one, fewer) == ["en4 (Thunderbolt 3) is gone"]
    more = replace(one, num_ports=4)
    assert events(one, more) == []  # an idle port
    unaddressed = replace(one, thunderbolt={})
    assert events(one, unaddressed) == ["en2 (Thunderbolt 1) has no address, before 10.0.0.1/30"]


@pytest.mark.parametrize(
    ("awake_s", "total_s", "event"),
    [(1.0, 1.0, ""), (1.0, 1.8, ""), (1.0, 301.0, "the machine slept for 300 s"), (60.0, 60.0, "")],
)
def test_sleep_is_time_that_only_one_clock_saw(awake_s: float, total_s: float, event: str) -> None:
    """An agent that was stopped for a minute sees it on both clocks."""
    assert sleep_event(awake_s, total_s) == event
