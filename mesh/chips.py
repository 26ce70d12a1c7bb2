"""What chips can do, as data: for predictions before anything is measured.

Bandwidths are the makers' peak figures. Matrix rates are half-precision: for chips without a matrix unit in
the GPU the shader peak, for those with one what was measured on the largest (60.8 TFLOP/s on 40 cores),
scaled by cores; MLX uses those units from macOS 26.2 on. Some figures are from third-party tables. A
measurement (`mlx-mesh bench --probe`) always wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

READ_PER_MILLE = 900
"""Of the peak bandwidth, what a GPU reads in practice: 910 measured on M5 Max and M5 Ultra, 780 on M1 Max."""

MATRIX_PER_MILLE = 700
"""Of the shader peak, what a large product reaches: 5.1 of 7.4 TFLOP/s measured on M3 Pro."""


@dataclass(frozen=True, slots=True)
class Bin:
    """One variant of a chip. `gpu_cores` 0: the only one, or the number does not matter."""

    gpu_cores: int
    gb_per_s: int
    gflops: int  # to be expected, not peak


@dataclass(frozen=True, slots=True)
class Chip:
    """What one host's chip can be expected to do. `note` is to be said aloud when not ''."""

    name: str
    memory_rate: int  # bytes a second that weights are read with
    matrix_rate: int  # multiply-adds count as two operations
    note: str = ""


def _shader(teraflops: float) -> int:
    return round(teraflops * MATRIX_PER_MILLE)


_UNITS_GFLOPS_PER_CORE = 1520  # 60.8 TFLOP/s on 40 cores

CHIPS: dict[str, tuple[Bin, ...]] = {
    "M1": (Bin(0, 68, _shader(2.6)),),
    "M1 Pro": (Bin(0, 200, _shader(5.2)),),
    "M1 Max": (Bin(0, 400, _shader(10.4)),),
    "M1 Ultra": (Bin(0, 800, _shader(21.0)),),
    "M2": (Bin(0, 100, _shader(3.6)),),
    "M2 Pro": (Bin(0, 200, _shader(6.8)),),
    "M2 Max": (Bin(0, 400, _shader(13.5)),),
    "M2 Ultra": (Bin(0, 800, _shader(27.2)),),
    "M3": (Bin(0, 100, _shader(4.1)),),
    "M3 Pro": (Bin(0, 150, _shader(7.4)),),
    "M3 Max": (Bin(30, 300, _shader(11.0)), Bin(40, 400, _shader(14.2))),
    "M3 Ultra": (Bin(0, 819, _shader(28.4)),),
    "M4": (Bin(0, 120, _shader(4.3)),),
    "M4 Pro": (Bin(0, 273, _shader(9.2)),),
    "M4 Max": (Bin(32, 410, _shader(14.7)), Bin(40, 546, _shader(18.4))),
    "M5": (Bin(0, 153, 10 * _UNITS_GFLOPS_PER_CORE),),
    "M5 Pro": (Bin(0, 307, 20 * _UNITS_GFLOPS_PER_CORE),),
    "M5 Max": (Bin(32, 460, 32 * _UNITS_GFLOPS_PER_CORE), Bin(40, 614, 40 * _UNITS_GFLOPS_PER_CORE)),
    "M5 Ultra": (Bin(0, 1200, 80 * _UNITS_GFLOPS_PER_CORE),),
    "M6": (Bin(0, 153, 12 * _UNITS_GFLOPS_PER_CORE),),  # 170 GB/s with 24 GB and more
}
_BRAND = re.compile(r"\b(M\d+)(?:\s+(Pro|Max|Ultra))?\b", re.IGNORECASE)
_CORES = re.compile(r"\b(\d+)[- ]?cores?\b", re.IGNORECASE)


def find_chip(text: str) -> Chip | None:
    """The chip of a `machdep.cpu.brand_string`, or of words like "M4 Max 40-core". None: not in the table."""
    match = _BRAND.search(text)
    if match is None:
        return None
    name = " ".join(part for part in (match[1].upper(), (match[2] or "").capitalize()) if part)
    bins = CHIPS.get(name)
    if bins is None:
        return None
    cores = _CORES.search(text)
    chosen, note = bins[0], ""
    if len(bins) > 1:
        fitting = [entry for entry in bins if cores and entry.gpu_cores == int(cores[1])]
        if fitting:
            chosen = fitting[0]
        else:
            kinds = " and ".join(f"{entry.gpu_cores} GPU cores, {entry.gb_per_s} GB/s" for entry in bins)
            note = f"{name} comes with {kinds}; the smaller one is assumed"
    if name.startswith(("M5", "M6")):
        more = "prefill counts on macOS 26.2 or later, which uses the GPU's matrix units"
        note = f"{note}; {more}" if note else more
    return Chip(
        name=name,
        memory_rate=chosen.gb_per_s * READ_PER_MILLE * 1_000_000,
        matrix_rate=chosen.gflops * 1_000_000_000,
        note=note,
    )
