"""What links between hosts cost, as data: for predictions before anything is measured.

Times are whole nanoseconds, bandwidths bytes a second. Published figures for Macs are few and differ; a
measurement (`mlx-mesh bench --probe`) always wins.
"""

from __future__ import annotations

import msgspec

MICROSECOND = 1_000


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of link, the slowest that the mesh has."""

    name: str
    rtt_ns: int  # of a small message through the program, there and back
    bandwidth: int
    sum_ns: int = 0  # of one small all_sum whatever the number of ranks; 0 = a ring's: (ranks - 1) x rtt
    is_measured: bool = False
    caveat: str = ""

    def small_sum_ns(self, num_ranks: int) -> int:
        """One all_sum of a few kilobytes over so many ranks."""
        return self.sum_ns or (num_ranks - 1) * self.rtt_ns

    def hop_ns(self, num_bytes: int) -> int:
        """One message to a neighbour."""
        return self.rtt_ns // 2 + num_bytes * 1_000_000_000 // self.bandwidth


LOOPBACK = Link(name="loopback", rtt_ns=60 * MICROSECOND, bandwidth=4_000_000_000)

LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        LOOPBACK,
        Link(
            name="thunderbolt5-rdma",
            rtt_ns=60 * MICROSECOND,
            bandwidth=7_600_000_000,
            sum_ns=60 * MICROSECOND,
            caveat="one all_sum of 8 KB was measured at 36 to 120 us between two Macs",
        ),
        Link(
            name="thunderbolt5",
            rtt_ns=400 * MICROSECOND,
            bandwidth=4_000_000_000,
            caveat="TCP over Thunderbolt: round trips of 0.4 to 1.7 ms were reported, bandwidth is assumed",
        ),
        Link(
            name="thunderbolt4",
            rtt_ns=400 * MICROSECOND,
            bandwidth=2_000_000_000,
            caveat="16.4 Gb/s one way and far less the other were reported",
        ),
        Link(
            name="ethernet10g",
            rtt_ns=300 * MICROSECOND,
            bandwidth=1_150_000_000,
            caveat="the round trip is assumed",
        ),
        Link(
            name="ethernet2.5g",
            rtt_ns=400 * MICROSECOND,
            bandwidth=290_000_000,
            caveat="the round trip is assumed",
        ),
        Link(
            name="ethernet1g",
            rtt_ns=500 * MICROSECOND,
            bandwidth=115_000_000,
            caveat="the round trip is assumed",
        ),
        Link(
            name="wifi",
            rtt_ns=8_000 * MICROSECOND,
            bandwidth=50_000_000,
            caveat="round trips of 5 to 54 ms were reported",
        ),
    )
}
