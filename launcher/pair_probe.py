"""Do neighbouring hosts really reach each other? Each listens once, and the one before it dials, from the
interpreters that their ranks would use."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec

from mlx_mesh.launcher.config import LaunchConfig
from mlx_mesh.launcher.preflight import open_host
from mlx_mesh.launcher.remote import RemoteHost, run_program, stream_program
from mlx_mesh.mesh.doctor import Finding
from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.mesh.host_entry import HostEntry
from mlx_mesh.mesh.pair_checks import Dialled, PairHost, Ring, chosen_link, dial_finding, neighbours

DIAL_TIMEOUT_S = 40.0


def dial_pairs(ring: Ring, config: LaunchConfig) -> list[Finding]:
    """A line for each neighbour that a link is known to, or an address that the hostfile gives."""
    entries = {entry.name: entry for entry in config.hosts}
    asked: list[tuple[PairHost, PairHost, str]] = []
    for dials, listens in neighbours(ring):
        link = chosen_link(dials, listens)
        address = link.listens.address if link else next(iter(listens.addresses), "")
        if address:
            asked.append((dials, listens, address))
    if not asked:
        return []
    with ThreadPoolExecutor(len(asked)) as pool:
        return list(pool.map(lambda pair: _try(*pair, entries=entries, ssh_config=config.ssh_config), asked))


def _try(
    dials: PairHost, listens: PairHost, address: str, *, entries: Mapping[str, HostEntry], ssh_config: str
) -> Finding:
    opened: list[RemoteHost] = []
    try:
        for host in (dials, listens):
            opened.append(open_host(entries[host.name], ssh_config))
        dialled = dial(opened[0], dials.examined.python, opened[1], listens.examined.python, address)
    except MeshError as error:
        dialled = Dialled(error="EIO", said=str(error).rstrip("."))
    finally:
        for remote in reversed(opened):
            remote.close()
    return dial_finding(dials, listens, address, dialled)


def dial(
    dials: RemoteHost, dials_python: str, listens: RemoteHost, listens_python: str, address: str
) -> Dialled:
    """Raises MeshError when a host does not do as it is told."""
    answers = stream_program(listens, listens_python, "dial_link", {"do": "listen", "address": address})
    try:
        told = next((item for item in answers if item), {})
        if "port" not in told:
            return Dialled(not_listening=str(told.get("not_listening", "it said nothing")))
        request = {"do": "dial", "address": address, "port": told["port"]}
        answer = run_program(dials, dials_python, "dial_link", request, DIAL_TIMEOUT_S)
        return msgspec.convert(answer, Dialled)
    finally:
        cast("Generator[object]", answers).close()
