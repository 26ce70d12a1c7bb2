"""A mesh of hosts that were found: who is taken, who is left out and why, and what is said of the network."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from mlx_mesh.launcher import discover_command, discovered, waiting
from mlx_mesh.launcher.agent_wire import Hello
from mlx_mesh.launcher.discovered import Look, Wanted, find_mesh, look, split_address
from mlx_mesh.launcher.pairing import OneTimeCode
from mlx_mesh.launcher.pairings import PairedHost, Pairings, fingerprint_of
from mlx_mesh.launcher.waiting import Waiting
from mlx_mesh.mesh.discovery import (
    Announcement,
    HostInterface,
    InterfaceScan,
    Rejected,
    Scan,
    Sighting,
    format_txt,
)
from mlx_mesh.mesh.errors import MeshError, NotRunningError, PreflightError, SettingsError
from mlx_mesh.mesh.interfaces import LinkClass
from mlx_mesh.mesh.types import Versions

VERSIONS = Versions(mlx_mesh="0.1.0", mlx="0.32.4", mlx_lm="0.32.2", python="3.11.7", protocol=1)
PORT = 9  # discard: nobody answers there


def wired(*addresses: str, link_class: LinkClass = LinkClass.ETHERNET) -> HostInterface:
    return HostInterface(name=f"en{addresses[0].split('.')[1]}", link_class=link_class, addresses=addresses)


def said(number: int, **changes: Any) -> Announcement:
    made = Announcement(
        host=f"mac{number}",
        run=f"{number:016x}",
        role="agent",
        ssh="SHA256:" + chr(ord("a") + number) * 43,
        key="SHA256:" + chr(ord("A") + number) * 43,
        port=PORT,
        memory_bytes=number * 10**9,
        versions=VERSIONS,
        interfaces=(wired(f"127.0.0.{number}/8"),),
    )
    return replace(made, **changes)


OWN = said(1, role="node", key="", port=0, run="f" * 16)


class Network:
    """What the next scans see."""

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self.sightings: list[Sighting] = []
        self.interfaces = [
            InterfaceScan(
                name="en0",
                link_class=LinkClass.ETHERNET,
                evidence="Ethernet",
                address="127.0.0.1",
                num_queries=3,
            )
        ]
        self.own = OWN
        self.said: list[str] = []

    @property
    def pairings(self) -> Pairings:
        return Pairings(self.environment)

    def has(self, *announcements: Announcement) -> None:
        self.sightings += [
            Sighting(announcement=each, source="multicast", interface="en0") for each in announcements
        ]

    def pair(self, *announcements: Announcement) -> None:
        for each in announcements:
            self.pairings.keep_host(
                PairedHost(
                    name=each.host, key=each.key, addresses=each.addresses, port=each.port, paired_at=1.0
                )
            )

    def scan(self, at: Look, environment: Any) -> Scan:
        return Scan(
            own=self.own, interfaces=tuple(self.interfaces), sightings=tuple(self.sightings), is_mac=True
        )

    def find(self, num_hosts: int | None = None, **more: Any) -> list[str]:
        """Names and addresses of the mesh's hosts."""
        wanted = Wanted(Look(), num_hosts, **more)
        hostfile = find_mesh(wanted, self.environment, self.said.append)
        assert hostfile.name == "discovered" and hostfile.source == ""
        return [f"{host.name} {host.agent.address if host.agent else 'here'}" for host in hostfile.hosts]

    def refused(self, num_hosts: int | None = None, **more: Any) -> str:
        with pytest.raises(PreflightError) as caught:
            self.find(num_hosts, **more)
        return str(caught.value)


@pytest.fixture
def network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Network:
    made = Network({"XDG_STATE_HOME": str(tmp_path)})
    monkeypatch.setattr(discovered, "_scan", made.scan)
    monkeypatch.setattr(discovered, "GREET_S", 0.5)
    return made


# ---------------------------------------------------------------- who is taken


def test_this_host_leads_the_paired_ones(network: Network) -> None:
    network.has(said(3), said(2), OWN)
    network.pair(said(2), said(3))
    assert network.find() == ["mac1 here", "mac2 127.0.0.2", "mac3 127.0.0.3"]
    assert network.find(with_this_host=False) == ["mac2 127.0.0.2", "mac3 127.0.0.3"]
    assert any("Found mac2 (127.0.0.2), mac3 (127.0.0.3)" in line for line in network.said)


def test_a_lone_host_is_no_mesh(network: Network) -> None:
    message = network.refused()
    assert "1 of 2 hosts can be used (a mesh needs at least 2) after 3 s" in message
    assert "Nothing was started" in message and "mlx-mesh agent" in message and "Local Network" in message


def test_hosts_that_are_not_paired_are_named_with_what_to_do(network: Network) -> None:
    network.has(said(2))
    message = network.refused()
    assert "mac2 (127.0.0.2): not paired with this launcher" in message and "--pair mac2" in message


def test_a_secret_stands_for_all_pairings(network: Network) -> None:
    network.has(said(2))
    network.environment["MLX_MESH_SECRET"] = "a secret of the tests"
    assert network.find() == ["mac1 here", "mac2 127.0.0.2"]
    network.environment["MLX_MESH_SECRET"] = "short"
    with pytest.raises(SettingsError, match="at least 16"):
        network.find()


def test_fewer_hosts_than_asked_for_are_an_error_that_names_who_was_found(network: Network) -> None:
    other = replace(VERSIONS, mlx="0.1")
    network.has(said(2), said(3, versions=other), said(4), said(5, ssh=said(6).ssh), said(6))
    network.pair(said(2), said(3), said(5), said(6))
    message = network.refused(4)
    assert "2 of 4 hosts can be used (--hosts 4) after 3 s of looking (--discover-timeout)" in message
    assert "this one, mac2 (127.0.0.2)." in message
    for part in ("mac3 (127.0.0.3): other versions: mlx 0.1 there", "mac4 (127.0.0.4): not paired"):
        assert part in message
    assert "mac5 (127.0.0.5) and mac6 (127.0.0.6) have the same SSH host key" in message


def test_hosts_that_cannot_be_used_are_told_when_there_are_enough_others(network: Network) -> None:
    network.has(said(2), said(3))
    network.pair(said(2))
    assert network.find() == ["mac1 here", "mac2 127.0.0.2"]
    assert any(line.startswith("left out mac3 (127.0.0.3): not paired") for line in network.said)


def test_of_more_hosts_than_asked_for_those_with_most_memory_are_taken(network: Network) -> None:
    network.has(said(2), said(3), said(4))
    network.pair(said(2), said(3), said(4))
    assert network.find(3) == ["mac1 here", "mac3 127.0.0.3", "mac4 127.0.0.4"]
    assert any(line.startswith("left out mac2 (127.0.0.2): --hosts 3 are enough") for line in network.said)


@pytest.mark.parametrize(("num_hosts", "with_this_host"), [(1, True), (0, True), (-1, False), (0, False)])
def test_a_mesh_of_one_is_not_asked_for_in_this_way(
    network: Network, num_hosts: int, with_this_host: bool
) -> None:
    with pytest.raises(SettingsError, match="mlx-mesh serve"):
        network.find(num_hosts, with_this_host=with_this_host)


def test_two_hosts_of_one_name_have_two_names_in_the_mesh(network: Network) -> None:
    one, two = said(2, host="mac"), said(3, host="mac")
    network.own = replace(OWN, host="mac")
    network.has(one, two)
    network.pair(one, two)
    assert network.find() == ["mac here", "mac-2 127.0.0.2", "mac-3 127.0.0.3"]


def test_all_are_reached_on_the_network_that_all_are_on(network: Network) -> None:
    cable = LinkClass.THUNDERBOLT
    network.own = replace(
        OWN,
        interfaces=(
            wired("10.1.0.1/30", link_class=cable),
            wired("10.2.0.1/30", link_class=cable),
            wired("127.0.0.1/8"),
        ),
    )
    two = said(2, interfaces=(wired("10.1.0.2/30", link_class=cable), wired("127.0.0.2/8")))
    three = said(3, interfaces=(wired("10.2.0.2/30", link_class=cable), wired("127.0.0.3/8")))
    network.has(two)
    network.pair(two)
    assert network.find() == ["mac1 here", "mac2 10.1.0.2"]
    network.has(three)
    network.pair(three)
    assert network.find() == ["mac1 here", "mac2 127.0.0.2", "mac3 127.0.0.3"]


def test_where_a_host_was_reached_is_kept_for_a_network_without_multicast(network: Network) -> None:
    network.has(said(2, interfaces=(wired("127.0.0.7/8"),)))
    network.pair(said(2))
    network.find()
    assert network.pairings.hosts()[0].addresses == ("127.0.0.7",)


# ---------------------------------------------------------------- without multicast


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Starts waiting agents on loopback that say what they are given, with their own port and key."""
    monkeypatch.setattr(waiting, "ACCEPT_S", 0.02)
    started: list[Waiting] = []

    def start(announcement: Announcement, code: OneTimeCode | None = None) -> Announcement:
        pairings = Pairings({"XDG_STATE_HOME": str(tmp_path / f"agent{len(started)}")})
        told: dict[str, str] = {}
        made = Waiting(
            key=pairings.key_of("agent"),
            pairings=pairings,
            code=code,
            secret="",
            hello=lambda: Hello(strings=told),
            say=lambda line: None,
        )
        port = made.listen("127.0.0.1", 0)
        shown = fingerprint_of(made.key) if announcement.key == said(2).key else announcement.key
        announcement = replace(announcement, port=port, key=shown, interfaces=(wired("127.0.0.1/8"),))
        told.update(format_txt(announcement))
        made.start()
        started.append(made)
        return announcement

    yield start
    for each in started:
        each.stop()


def test_an_address_is_asked_without_multicast(network: Network, agent: Any) -> None:
    network.own = replace(OWN, interfaces=(wired("10.0.0.1/24"),))
    there = agent(said(2))
    made = look(Look(addresses=(f"127.0.0.1:{there.port}", f"localhost:{PORT}")), network.environment)
    assert [(host.name, host.source, host.verdict.what) for host in made.hosts] == [
        ("mac2", "address", "usable")
    ]
    first, second = made.addresses
    assert (first.host, first.error) == ("mac2", "")
    assert second.address == f"localhost:{PORT}" and "Connection refused" in second.error
    assert made.advice == ()


def test_paired_hosts_are_asked_where_they_were_last(network: Network, agent: Any) -> None:
    network.own = replace(OWN, interfaces=(wired("10.0.0.1/24"),))
    there = agent(said(2))
    network.pair(there)
    assert network.find() == ["mac1 here", "mac2 127.0.0.1"]


def test_an_agent_that_announces_the_key_of_another_is_not_used(network: Network, agent: Any) -> None:
    there = agent(said(3))
    made = look(Look(addresses=(f"127.0.0.1:{there.port}",)), network.environment)
    assert made.others == [] and "another key than the one it shows" in made.addresses[0].error


@pytest.mark.parametrize(
    ("text", "place"),
    [("mac2", ("mac2", 17864)), ("10.0.0.2:99", ("10.0.0.2", 99)), ("a.local:1", ("a.local", 1))],
)
def test_an_address_may_have_a_port(text: str, place: tuple[str, int]) -> None:
    assert split_address(text) == place


@pytest.mark.parametrize("text", ["", ":1", "mac2:", "mac2:x", "mac2:0", "mac2:70000", "fe80::1", "x" * 300])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(SettingsError, match="HOST or HOST:PORT"):
        split_address(text)


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 61.0, float("nan")])
def test_looking_takes_a_time_that_makes_sense(network: Network, timeout_s: float) -> None:
    with pytest.raises(SettingsError, match="out of range"):
        look(Look(timeout_s=timeout_s), network.environment)


# ---------------------------------------------------------------- what `discover` says


def test_everything_about_an_interface_is_told(network: Network) -> None:
    network.interfaces = [
        replace(
            network.interfaces[0],
            num_answers=2,
            hosts=("mac2",),
            rejected=(
                Rejected(sender="10.0.0.9", reason="no host", count=2),
                Rejected(sender="", reason="x"),
            ),
        ),
        InterfaceScan(
            name="utun3", link_class=LinkClass.FOREIGN, evidence="VPN", is_used=False, why_not="VPN"
        ),
        InterfaceScan(
            name="en1", link_class=LinkClass.WIFI, evidence="Wi-Fi", num_queries=1, error="No route to host"
        ),
    ]
    network.has(said(2), said(3, versions=replace(VERSIONS, mlx="0.1")), OWN)
    network.pair(said(2))
    told = discover_command.lines(
        look(Look(), network.environment), discovered.paired_keys(network.environment)
    )
    text = "\n".join(told)
    assert "en0 (ethernet, Ethernet) 127.0.0.1: asked 3 times, 2 answers, seen: mac2" in told
    assert (
        "  rejected from 10.0.0.9: no host (2 times)" in told and "  rejected from anybody: x (once)" in told
    )
    assert "utun3 (foreign, VPN): not used: VPN" in told
    assert "en1 (wifi, Wi-Fi): asked once, then failed: No route to host" in told
    rows = {line.split()[0]: line for line in told if line.startswith("mac")}
    assert "this host" in rows["mac1"] and " paired" in rows["mac2"] and "en0 127.0.0.2/8" in rows["mac2"]
    assert "mac3: other versions: mlx 0.1 there, 0.32.4 here." in text


def test_nobody_is_told_with_advice(network: Network) -> None:
    told = discover_command.lines(look(Look(), network.environment), [])
    assert "No host was seen." in told and "Local Network" in "\n".join(told)


def test_changes_are_told_as_they_come(network: Network, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discover_command, "WATCH_S", 0.0)
    changes = discover_command.watch(Look(timeout_s=0.2), network.environment)
    network.has(said(2))
    assert next(changes) == "+ mac2 (127.0.0.2): not paired"
    network.pair(said(2))
    assert next(changes) == "+ mac2 (127.0.0.2): paired"
    network.sightings.clear()
    assert next(changes) == "- mac2 (127.0.0.2): does not answer any more"


# ---------------------------------------------------------------- pairing


def pair(network: Network, name: str, typed: str) -> PairedHost:
    return discover_command.pair(name, Look(), network.environment, io.StringIO(typed), io.StringIO())


def test_a_host_is_paired_by_the_code_that_it_shows(network: Network, agent: Any) -> None:
    network.own = replace(OWN, interfaces=(wired("10.0.0.1/24"),))
    code = OneTimeCode()
    there = agent(said(2), code)
    network.has(there)
    kept = pair(network, "mac2", f"{code.shown}\n")
    assert kept == network.pairings.hosts()[0]
    assert (kept.name, kept.key, kept.addresses, kept.port) == ("mac2", there.key, ("127.0.0.1",), there.port)
    assert "Forgot mac2" in discover_command.forget("mac2", network.environment)
    assert network.pairings.hosts() == []


@pytest.mark.parametrize("typed", ["", "1234\n", "abcdefgh\n"])
def test_nothing_is_sent_for_what_is_no_code(network: Network, typed: str) -> None:
    network.has(said(2))
    with pytest.raises(SettingsError, match="8 digits"):
        pair(network, "mac2", typed)


def test_a_host_that_cannot_be_paired_with_is_told(network: Network) -> None:
    with pytest.raises(NotRunningError, match="No host mac2 was seen; seen: nobody"):
        pair(network, "mac2", "12345678\n")
    network.has(said(2, host="mac"), said(3, host="mac"), said(4, versions=replace(VERSIONS, mlx="0.1")))
    with pytest.raises(SettingsError, match="Give the address instead"):
        pair(network, "mac", "12345678\n")
    with pytest.raises(MeshError, match="cannot be paired with: other versions"):
        pair(network, "mac4", "12345678\n")
    with pytest.raises(MeshError, match="connect: "):
        pair(network, "127.0.0.2", "12345678\n")
    with pytest.raises(SettingsError, match="No host mac9 is paired; paired: none"):
        discover_command.forget("mac9", network.environment)
