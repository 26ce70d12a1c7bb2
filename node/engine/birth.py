"""How a child with MLX begins, an engine or an embedder: it ends with its agent and has only its settings."""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import os
import platform
import signal
import socket
import sys

from mlx_mesh.node.engine.backend import drop_foreign_variables
from mlx_mesh.node.engine.failure import EXIT_AGENT_GONE

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def born(program: str, description: str, arguments: list[str] | None) -> socket.socket:
    """The inherited socket to the agent, from `--fd N`. From here on this process ends with its agent, writes
    its stacks on SIGUSR1, and leaves Ctrl-C to the agent."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("--fd", type=int, required=True, help="inherited socket to the agent")
    sock = socket.socket(fileno=parser.parse_args(arguments).fd)
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal; the agent decides
    if hasattr(signal, "SIGUSR1"):
        faulthandler.register(signal.SIGUSR1, file=sys.__stderr__ or sys.stderr, all_threads=True)
    drop_foreign_variables()
    return sock


def die_with_parent() -> None:
    """On Linux have the kernel end this process with the thread that started it, even in a native call."""
    if platform.system() != "Linux":
        return
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended in between
        sys.exit(EXIT_AGENT_GONE)
