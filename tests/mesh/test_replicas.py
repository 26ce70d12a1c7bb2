"""Which ranks make which replica, and what each may use."""

from __future__ import annotations

import pytest

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.messages import HostPlan, MeshConfig
from mlx_mesh.mesh.prefix_settings import PrefixSettings
from mlx_mesh.mesh.replicas import config_of, divide, share_of


def names(hosts: tuple[HostEntry, ...]) -> list[tuple[str, int, int]]:
    return [(host.name, host.slots, host.replica) for host in hosts]


def test_one_replica_is_the_hosts_as_they_are() -> None:
    hosts = (HostEntry(name="a", slots=3), HostEntry(name="b"))
    assert divide(hosts, 1) == hosts


def test_hosts_are_divided_in_their_order() -> None:
    hosts = [HostEntry(name=name) for name in "abcd"]
    assert names(divide(hosts, 2)) == [("a", 1, 0), ("b", 1, 0), ("c", 1, 1), ("d", 1, 1)]


def test_a_host_with_ranks_in_several_replicas_is_several_members_that_share_its_memory() -> None:
    members = divide([HostEntry(name="a", slots=4, layers=(1, 2, 3, 4), memory_limit_bytes=100)], 2)
    assert names(members) == [("a", 2, 0), ("a.2", 2, 1)]
    assert [member.layers for member in members] == [(1, 2), (3, 4)]
    assert [(m.machine, m.num_shares, m.memory_limit_bytes) for m in members] == [("a", 2, 50)] * 2
    mixed = divide([HostEntry(name="a", slots=3), HostEntry(name="b")], 2)
    assert names(mixed) == [("a", 2, 0), ("a.2", 1, 1), ("b", 1, 1)]
    assert mixed[2].num_shares == 1


def test_devices_keep_the_columns_of_their_own_replica() -> None:
    hosts = [
        HostEntry(name=name, rdma=tuple(None if at == own else f"{name}{at}" for at in range(4)))
        for own, name in enumerate("abcd")
    ]
    assert [host.rdma for host in divide(hosts, 2)] == [
        (None, "a1"),
        ("b0", None),
        (None, "c3"),
        ("d2", None),
    ]


@pytest.mark.parametrize(
    ("slots", "num_replicas", "words"),
    [(3, 2, "Possible here: 1, 3"), (2, 0, "out of range"), (2, 100, "out of range")],
)
def test_what_cannot_be_divided_is_refused_with_what_can(slots: int, num_replicas: int, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        divide([HostEntry(name="a", slots=slots)], num_replicas)


def test_a_part_that_would_have_another_hosts_name_is_refused() -> None:
    hosts = [HostEntry(name="a", slots=2), HostEntry(name="a.2", slots=2)]
    with pytest.raises(SettingsError, match=r"would be called a\.2"):
        divide(hosts, 4)


def test_a_coordinator_has_its_own_hosts_ranks_and_files() -> None:
    mesh = MeshConfig(
        name="m",
        hosts=(HostPlan(name="a", slots=2), HostPlan(name="b", slots=2, replica=1)),
        num_replicas=2,
        prefix=PrefixSettings(folder="/kept/"),
    )
    first, second = config_of(mesh, 0), config_of(mesh, 1)
    assert [host.name for host in (*first.hosts, *second.hosts)] == ["a", "b"]
    assert (first.first_rank, second.first_rank) == (0, 2)
    assert (first.prefix.folder, second.prefix.folder) == ("/kept/", "/kept/replica-2")


def test_members_of_one_machine_share_what_the_embedding_model_leaves() -> None:
    total, embedding = 1000, 100
    first, second = share_of(total - embedding, 2, 0), share_of(total, 2, embedding)
    assert first == second == 450
