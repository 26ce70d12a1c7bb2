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
    from mlx_mesh.mesh.errors import MeshError

    try:
        arguments = cli.parse()  # imports what the command needs
    except MeshError as error:
        return cli.tell(error)
    signal.signal(signal.SIGINT, before)
    try:
        return cli.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def _leave(number: int, frame: FrameType | None) -> None:
    """Nothing is started yet. An exception could be lost in the import of a library."""
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main())
