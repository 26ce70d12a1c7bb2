"""The address plan of the data links."""

from __future__ import annotations

import pytest

from mlx_mesh.mesh.errors import BringUpError
from mlx_mesh.mesh.interfaces import Interface, LinkClass, check_rules
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


# ---------------------------------------------------------------- rules about interfaces


def wired(name: str, address: str, mbits: int = 0) -> Interface:
    return Interface(
        name=name,
        link_class=LinkClass.ETHERNET,
        evidence="Ethernet",
        addresses=(address,),
        mbits=mbits,
    )


def two_links(host: str, number: int, *rules: str, pinned: str = "") -> HostLink:
    """A host with a slow and a fast network; it is reached over the slow one."""
    slow, fast = f"10.0.0.{number}", f"10.9.0.{number}"
    return HostLink(
        host=host,
        planned=pinned or slow,
        joined=slow,
        addresses=("127.0.0.1", slow, fast),
        is_pinned=bool(pinned),
        interfaces=(wired("en0", f"{slow}/24", 1000), wired("en5", f"{fast}/24", 10000)),
        rules=rules,
    )


@pytest.mark.parametrize(
    ("rules", "chosen"),
    [
        ((), "en5"),
        (("en0",), "en0"),
        (("^en5",), "en0"),
        (("en*", "^en5"), "en0"),
        (("en0", "en5"), "en5"),
        (("^utun*",), "en5"),
    ],
)
def test_only_interfaces_that_the_rules_allow_carry_data(rules: tuple[str, ...], chosen: str) -> None:
    plan = plan_addresses([two_links("a", 1, *rules), two_links("b", 2, *rules)])
    assert {link.listens.interface for link in plan.links.values()} == {chosen}
    network = {"en0": "10.0.0", "en5": "10.9.0"}[chosen]
    assert plan.data == {"a": f"{network}.1", "b": f"{network}.2"}
    assert plan.control == "10.0.0.1"  # where the leader is reached anyway


def test_a_rule_of_one_host_counts_for_its_neighbours_links() -> None:
    plan = plan_addresses([two_links("a", 1), two_links("b", 2, "^en5"), two_links("c", 3)])
    chosen = {host: link.listens.interface for host, link in plan.links.items()}
    assert chosen == {"a": "en5", "b": "en0", "c": "en0"}  # a is dialled by c, b by a, c by b


def test_a_name_that_a_host_does_not_have_is_told_with_those_it_has() -> None:
    with pytest.raises(BringUpError, match=r"host b: it has no interface en7; it has en0, en5"):
        plan_addresses([two_links("a", 1), two_links("b", 2, "en7", "^en9")])


def test_no_data_goes_over_what_is_left_out_even_where_nothing_else_is() -> None:
    with pytest.raises(BringUpError, match=r"host a: b could reach it at 10\.0\.0\.1 only, on en0"):
        plan_addresses([two_links("a", 1, "^en0", "^en5"), two_links("b", 2)])
    with pytest.raises(BringUpError, match=r"10\.9\.0\.2 only, on en5 .* `interfaces` \(\^en5\)"):
        plan_addresses([two_links("a", 1), two_links("b", 2, "^en5", pinned="10.9.0.2")])


@pytest.mark.parametrize("rule", ["", "^", "en 5", "^^en5", "en5;x"])
def test_what_is_no_rule_is_told(rule: str) -> None:
    assert check_rules([rule]) and not check_rules(["en5", "^en0", "en*", "bridge?"])
