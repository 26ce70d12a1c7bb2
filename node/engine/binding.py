"""Whether an address and port can be listened on, in words."""

from __future__ import annotations

import errno
import os
import socket

from mlx_mesh.node.engine.failure import EngineError


def check_bindable(address: str) -> None:
    """Bind "ip:port" for a moment without sharing it, since MLX's ring would share it silently.

    Raises EngineError(bind) in words."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            raise EngineError("bind", bind_message(host, port, error)) from error


def bind_message(host: str, port: str, error: OSError) -> str:
    """A failed bind in words."""
    if error.errno == errno.EADDRNOTAVAIL:
        return (
            f"This host does not have the address {host}. Correct `addresses` in the hostfile, "
            "or bring up the interface that should have it."
        )
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is taken by another process, maybe a rank of an older run: "
            f"`lsof -i :{port}` shows it."
        )
    return f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}."
