"""`mlx-mesh`, also as `python -m mlx_mesh.launcher`: ready for Ctrl-C before the imports, which take long."""

import os
import signal
import sys
from types import FrameType

INTERRUPTED = 130  # ExitCode.INTERRUPTED, before it can be imported


def main() -> int:
    """The entry point. Returns the exit status."""
    before = signal.signal(signal.SIGINT, _leave)
    from mlx_mesh.launcher import cli

    signal.signal(signal.SIGINT, before)
    try:
        return cli.main()
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing is started yet. An exception could be lost in the import of a library."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
