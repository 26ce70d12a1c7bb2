"""`python -m mlx_mesh.node.rates`: runs the engine's rate measurement as an engine would run, and passes on
what it prints. Imports no MLX itself."""

from __future__ import annotations

import subprocess
import sys

from mlx_mesh.node.blas import engine_environment, find_openblas
from mlx_mesh.node.children import child_environment

RATES_TIMEOUT_S = 90.0


def main() -> int:
    words = [sys.executable, "-I", "-u", "-m", "mlx_mesh.node.engine.rates"]
    extra = engine_environment(find_openblas()) if sys.platform == "linux" else {}
    try:
        done = subprocess.run(
            words, env=child_environment(extra), cwd="/", timeout=RATES_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"the measurement did not end within {RATES_TIMEOUT_S:g} s", file=sys.stderr)
        return 1
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
