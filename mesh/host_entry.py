"""A host of a mesh, as a hostfile or the command line gives it."""

from __future__ import annotations

from dataclasses import dataclass

from mlx_mesh.mesh.discovery import AgentRoute


@dataclass(frozen=True, slots=True)
class HostEntry:
    """One host, with the file's defaults applied. `ssh` is '' for this machine (`local: true`)."""

    name: str
    ssh: str = ""
    user: str = ""  # '' = what ~/.ssh/config says
    python: str = ""  # '' = the launcher's own interpreter path
    models: str = ""  # folder on that host in which models are looked up first
    addresses: tuple[str, ...] = ()  # IPv4 for the data links; () = found by the launcher
    rdma: tuple[str | None, ...] = ()  # one device per host of the file, None for itself
    interfaces: tuple[str, ...] = ()  # that may carry data, ^ in front of those that may not; () = all
    slots: int = 1  # ranks on this host
    layers: tuple[int, ...] = ()  # pinned number of layers of each slot; () = planned
    memory_limit_bytes: int = 0  # 0 = what the host reports
    line: int = 0  # where it stands in the file
    replica: int = 0  # which one its ranks belong to, see mesh.replicas
    machine: str = ""  # the host that it is a part of, when its ranks belong to several; '' = it is whole
    num_shares: int = 1  # into so many parts
    agent: AgentRoute | None = None  # a waiting `mlx-mesh agent`, by which it is reached instead of SSH

    @property
    def is_local(self) -> bool:
        return not self.ssh and self.agent is None
