"""OpenBLAS for engines on Linux: the mlx[cpu] wheel carries a reference BLAS that is many times slower."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

_KNOWN_PLACES = (
    "usr/lib/*/openblas-pthread/libopenblas.so.0",
    "usr/lib/*/openblas-openmp/libopenblas.so.0",
    "usr/lib/*/libopenblas.so.0",
    "usr/lib64/libopenblas.so.0",
    "usr/lib/libopenblas.so.0",
)
_LDCONFIG_S = 5.0

ADVICE = (
    "OpenBLAS is not installed: everything works, but on the CPU much slower. "
    "On Debian and Ubuntu: apt install libopenblas0-pthread"
)


def find_openblas(root: Path = Path("/")) -> str:
    """Path of the library, '' when it is not installed."""
    for pattern in _KNOWN_PLACES:
        for path in sorted(root.glob(pattern)):
            return str(path)
    return parse_ldconfig(_ldconfig()) if root == Path("/") else ""


def parse_ldconfig(output: str) -> str:
    """The path of libopenblas in the output of `ldconfig -p`; '' when there is none."""
    match = re.search(r"^\s*libopenblas\.so\.0 .* => (\S+)$", output, re.MULTILINE)
    return match[1] if match else ""


def _ldconfig() -> str:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(
            ["/sbin/ldconfig", "-p"], capture_output=True, text=True, timeout=_LDCONFIG_S, check=False
        )
        return done.stdout
    return ""


def engine_environment(library: str, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables that preload `library` into an engine; one thread, because ranks share the cores and MLX
    has its own. What the user preloads or sets stays."""
    if not library:
        return {}
    preload = ":".join(filter(None, (library, environment.get("LD_PRELOAD", ""))))
    return {
        "LD_PRELOAD": preload,
        "OPENBLAS_NUM_THREADS": environment.get("OPENBLAS_NUM_THREADS", "1"),
    }


def is_wanted() -> bool:
    """macOS has Accelerate."""
    return sys.platform == "linux"
