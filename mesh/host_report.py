"""What a host says of itself when it is examined: more than its facts, and slower to gather. Values only."""

from __future__ import annotations

import msgspec

from mlx_mesh.mesh.macos import NetworkService, Route
from mlx_mesh.mesh.types import HostFacts


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    """One host, as its own interpreter sees it. '' and None: the host does not tell."""

    facts: HostFacts
    now_s: float  # its clock, seconds since 1970
    is_translated: bool = False  # its interpreter runs under Rosetta
    os_version: str = ""
    os_build: str = ""
    hardware_model: str = ""
    hardware_uuid: str = ""  # a Mac's; Linux has only an id of its disk, which copies share
    swap_used_bytes: int = 0
    disk_free_bytes: int = 0  # where models are looked up
    max_open_files: int = 0
    has_openblas: bool | None = None  # None: not needed, as with a GPU
    sleep_minutes: int | None = None  # 0 = never
    is_on_battery: bool = False
    is_lid_closed: bool = False
    firewall: str = ""  # off, on, all = blocks everything that comes in
    rdma_status: str = ""  # of rdma_ctl: enabled, disabled
    dhcp: tuple[str, ...] = ()  # interfaces that hold a lease
    routes: tuple[Route, ...] = ()
    services: tuple[NetworkService, ...] = ()  # of macOS, in their order
    helpers: tuple[str, ...] = ()  # other programs' daemons that change Thunderbolt networks
    fast_synch: str = ""  # MLX_METAL_FAST_SYNCH of a process started as ours are
    port_holder: str = ""  # who listens on the HTTP port; '' = nobody
    has_data_ports: bool = True
    leftovers: tuple[str, ...] = ()  # engines of ours whose agent is gone, in words
