"""`python -m mlx_mesh.node.engine.rates`: how fast this host reads memory and multiplies. A few seconds.

Prints one JSON object: memory_rate (bytes a second that matrix-vector products read, as decode does) and
matrix_rate (half-precision operations a second of a large product, as prefill does).
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

_TRY_S = 0.7  # of each measurement, after one run that warms up
_MAX_RUNS = 200


def best_seconds(run: Callable[[], Any]) -> float:
    """Of several runs the fastest: what else the host does should not count."""
    mx.eval(run())
    best, until = float("inf"), time.perf_counter() + _TRY_S
    for _ in range(_MAX_RUNS):
        began = time.perf_counter()
        mx.eval(run())
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > until:
            break
    return best


def memory_rate(num_bytes: int) -> int:
    """Several matrices in turn, so that no cache holds them."""
    side = 2048
    dtype = _working_type()
    count = max(2, num_bytes // (side * side * dtype.size))
    matrices = [mx.random.normal((side, side)).astype(dtype) for _ in range(count)]
    vector = mx.ones((side, 1), dtype=dtype)
    mx.eval(matrices, vector)
    seconds = best_seconds(lambda: [matrix @ vector for matrix in matrices])
    return int(count * side * side * dtype.size / seconds)


def matrix_rate(side: int) -> int:
    dtype = _working_type()
    a = mx.random.normal((side, side)).astype(dtype)
    b = mx.random.normal((side, side)).astype(dtype)
    mx.eval(a, b)
    return int(2 * side**3 / best_seconds(lambda: a @ b))


def _working_type() -> Any:
    """What models are computed in: half precision on a GPU; a CPU has no fast half."""
    return mx.float16 if mx.default_device() == mx.Device(mx.gpu) else mx.float32


def main() -> int:
    on_gpu = mx.default_device() == mx.Device(mx.gpu)
    measured = {
        "memory_rate": memory_rate(2 * 1024**3 if on_gpu else 256 * 1024**2),
        "matrix_rate": matrix_rate(8192 if on_gpu else 1024),
        "device": str(mx.default_device()),
    }
    sys.stdout.write(json.dumps(measured) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
