"""Several copies of the model behind one front end: which ranks make which replica. Pure.

All ranks of the hostfile, in its order, are cut into parts of equal size. A host whose ranks fall into
several parts is several members of the mesh on one machine, each with an agent of its own and its share of
the memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.messages import MeshConfig

MAX_REPLICAS = 64


def divide(hosts: Sequence[HostEntry], num_replicas: int) -> tuple[HostEntry, ...]:
    """The members of the mesh, each with the number of its replica. Raises SettingsError."""
    if not 1 <= num_replicas <= MAX_REPLICAS:
        raise SettingsError(f"--replicas {num_replicas} is out of range; it must be 1 to {MAX_REPLICAS}.")
    if num_replicas == 1:
        return tuple(hosts)
    num_ranks = sum(host.slots for host in hosts)
    if num_ranks % num_replicas:
        valid = [str(n) for n in range(1, min(num_ranks, MAX_REPLICAS) + 1) if num_ranks % n == 0]
        raise SettingsError(
            f"--replicas {num_replicas} needs a number of ranks that can be divided by it, and there are "
            f"{num_ranks}, one for each slot of a host. Possible here: {', '.join(valid)}. Or change the "
            "hosts or their `slots`."
        )
    members = [member for host in _placed(hosts, num_ranks // num_replicas) for member in _members_of(*host)]
    taken = [member.name for member in members]
    if len(set(taken)) < len(taken):
        twice = next(name for name in taken if taken.count(name) > 1)
        raise SettingsError(f"With --replicas a part of a host would be called {twice}; rename that host.")
    return tuple(_with_own_devices(member, members, len(hosts)) for member in members)


def _placed(hosts: Sequence[HostEntry], size: int) -> Iterator[tuple[HostEntry, list[int]]]:
    """Each host with the replica of each of its slots."""
    first = 0
    for host in hosts:
        yield host, [rank // size for rank in range(first, first + host.slots)]
        first += host.slots


def _members_of(host: HostEntry, replicas: Sequence[int]) -> Iterator[HostEntry]:
    """One per replica that has slots of the host; the first keeps its name."""
    own = list(dict.fromkeys(replicas))
    for place, replica in enumerate(own):
        slots = [slot for slot, of in enumerate(replicas) if of == replica]
        yield replace(
            host,
            name=f"{host.name}.{place + 1}" if place else host.name,
            slots=len(slots),
            layers=tuple(host.layers[slot] for slot in slots) if host.layers else (),
            memory_limit_bytes=host.memory_limit_bytes // len(own),
            replica=replica,
            machine=host.name,
            num_shares=len(own),
        )


def _with_own_devices(member: HostEntry, members: Sequence[HostEntry], num_hosts: int) -> HostEntry:
    """RDMA devices have a column for each host of the file; of a replica only its own count."""
    if len(member.rdma) != num_hosts or len(members) != num_hosts:
        return member
    columns = [at for at, other in enumerate(members) if other.replica == member.replica]
    return replace(member, rdma=tuple(member.rdma[at] for at in columns))


def config_of(mesh: MeshConfig, replica: int) -> MeshConfig:
    """What the coordinator of this replica runs: its hosts, and files of prefixes of its own."""
    if mesh.num_replicas == 1:
        return mesh
    prefix = mesh.prefix
    if prefix.folder and replica:  # two engines on one host must not write the same files
        prefix = msgspec.structs.replace(prefix, folder=f"{prefix.folder.rstrip('/')}/replica-{replica + 1}")
    return msgspec.structs.replace(
        mesh,
        hosts=tuple(host for host in mesh.hosts if host.replica == replica),
        prefix=prefix,
        replica=replica,
        first_rank=sum(host.slots for host in mesh.hosts if host.replica < replica),
    )


def share_of(memory_bytes: int, num_shares: int, reserved_bytes: int) -> int:
    """What one of several members on a machine may use of its memory, of which something else takes
    `reserved_bytes`."""
    return max(0, memory_bytes - reserved_bytes) // num_shares
