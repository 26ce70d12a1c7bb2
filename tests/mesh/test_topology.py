"""The address plan of the data links."""

from __future__ import annotations

import pytest

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.topology import HostLink, plan_addresses

OWN = ("127.0.0.1", "10.0.0.1", "192.168.1.5")


def link(host: str, planned: str = "", joined: str = "", addresses: tuple[str, ...] = OWN) -> HostLink:
    return HostLink(host=host, planned=planned, joined=joined, addresses=addresses)


def test_one_host_uses_loopback() -> None:
    assert plan_addresses([link("mac1", joined="192.168.1.5")]).data == {"mac1": "127.0.0.1"}


def test_the_hostfile_wins_over_the_address_of_the_join() -> None:
    plan = plan_addresses([link("a", "10.0.0.1", "192.168.1.5"), link("b", "", "192.168.1.5")])
    assert plan.data == {"a": "10.0.0.1", "b": "192.168.1.5"} and plan.control == "10.0.0.1"


def test_two_agents_on_one_machine_may_meet_on_loopback() -> None:
    plan = plan_addresses([link("a", joined="127.0.0.1"), link("b", joined="127.0.0.1")])
    assert plan.data == {"a": "127.0.0.1", "b": "127.0.0.1"}


@pytest.mark.parametrize(
    ("planned", "why"),
    [
        ("10.0.0.9", "not an address of this host"),
        ("fd00::2", "IPv6"),
        ("mac2.local", "not an IP address"),
        ("0.0.0.0", "all interfaces"),
    ],
)
def test_an_unusable_address_is_refused_with_the_host_its_addresses_and_the_fix(
    planned: str, why: str
) -> None:
    with pytest.raises(BringUpError) as error:
        plan_addresses([link("mac1", joined="10.0.0.1"), link("mac2", planned)])
    text = str(error.value)
    assert "host mac2" in text and why in text and "addresses:" in text and "192.168.1.5" in text
    assert "host mac1" not in text


def test_all_wrong_hosts_are_named_at_once() -> None:
    with pytest.raises(BringUpError) as error:
        plan_addresses([link("a", "1.1.1.1"), link("b", "2.2.2.2"), link("c", "10.0.0.1")])
    assert "host a" in str(error.value) and "host b" in str(error.value)


def test_loopback_among_other_hosts_is_refused() -> None:
    with pytest.raises(BringUpError, match=r"host a: .* is loopback"):
        plan_addresses([link("a", joined="127.0.0.1"), link("b", joined="10.0.0.1")])
