"""What `mlx-mesh bench --probe` measured, and how it is used: a measurement wins over the tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from mlx_mesh.mesh.chips import find_chip
from mlx_mesh.mesh.links import LINKS, Link
from mlx_mesh.mesh.types import Backend, HostFacts


class HostMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    memory_rate: int  # bytes a second
    matrix_rate: int  # operations a second


class LinkMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """Between two hosts, by TCP as the ring uses it; the worse direction."""

    rtt_ns: int
    bandwidth: int


class Measurements(msgspec.Struct, frozen=True, kw_only=True):
    """Of one or more probes. Keys come from `host_key` and `link_key`."""

    hosts: dict[str, HostMeasurement] = {}
    links: dict[str, LinkMeasurement] = {}

    def merged(self, newer: Measurements) -> Measurements:
        return Measurements(hosts=self.hosts | newer.hosts, links=self.links | newer.links)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Of one host; 0 = unknown. `note` is to be said aloud when not ''."""

    memory_rate: int = 0
    matrix_rate: int = 0
    note: str = ""


def host_key(facts: HostFacts) -> str:
    """The same machine with another chip is another host."""
    return f"{facts.hostname}/{facts.chip}"


def link_key(one: HostFacts, other: HostFacts) -> str:
    return " - ".join(sorted(facts.hostname for facts in (one, other)))


MEASURE = (
    "`mlx-mesh bench --probe` measures hosts that there are, those of a hostfile or, with --model, this one."
)


def rates_of(facts: HostFacts, measurements: Measurements) -> Rates:
    """Measured, else of the chip's table entry, else unknown."""
    measured = measurements.hosts.get(host_key(facts))
    if measured is not None:
        return Rates(memory_rate=measured.memory_rate, matrix_rate=measured.matrix_rate)
    return rates_of_chip(facts.chip)


def rates_of_chip(text: str) -> Rates:
    """What the table has for this chip."""
    chip = find_chip(text)
    if chip is None:
        named = f"The chip {text!r} is not in the table" if text else "The chip is not known"
        return Rates(note=f"{named}, so no speed is predicted. {MEASURE}")
    return Rates(
        memory_rate=chip.memory_rate,
        matrix_rate=chip.matrix_rate,
        note=f"{chip.note}." if chip.note else "",
    )


def slowest_link(hosts: Sequence[HostFacts], measurements: Measurements, backend: Backend) -> Link | None:
    """What to plan with: the slowest measured link of all pairs of hosts; with RDMA the table's. None when
    a pair was never measured."""
    if backend in (Backend.JACCL, Backend.JACCL_RING):
        return LINKS["thunderbolt5-rdma"]
    found = [measurements.links.get(link_key(a, b)) for a, b in _pairs(hosts)]
    known = [link for link in found if link is not None]
    if not known or len(known) < len(found):
        return None
    return Link(
        name="the measured link",
        rtt_ns=max(link.rtt_ns for link in known),
        bandwidth=min(link.bandwidth for link in known),
        is_measured=True,
    )


def _pairs(hosts: Sequence[HostFacts]) -> Iterable[tuple[HostFacts, HostFacts]]:
    return ((a, b) for index, a in enumerate(hosts) for b in hosts[index + 1 :])
