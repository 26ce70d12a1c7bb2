"""Notice that another engine is gone, from a thread of its own.

MLX alone does not tell: when a peer dies, one of the queued collectives raises and the next may wait for
ever, with the main thread in it. The plan channel ends with its processes too, and zmq says so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

WATCHED_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class ConnectionWatch:
    """Calls `on_event(event, fd)` for each of WATCHED_EVENTS on a socket, one after another.

    Made and closed by the socket's own thread. `fd` is the connection's descriptor; a later one may get
    the same, so the order matters. HANDSHAKE_SUCCEEDED comes without one.
    """

    def __init__(self, watched: zmq.Socket[bytes], on_event: Callable[[int, int], None]) -> None:
        self._watched = watched
        self._monitor: zmq.Socket[bytes] = watched.get_monitor_socket(
            WATCHED_EVENTS | zmq.EVENT_MONITOR_STOPPED
        )
        self._on_event = on_event
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def handle_pending(self) -> None:
        """Before `start`: handle what has happened so far in the calling thread."""
        while self._monitor.poll(0):
            self._handle_next()

    def start(self) -> None:
        """Handle events in a thread from now on."""
        self._thread.start()

    def close(self) -> None:
        self._watched.disable_monitor()
        if self._thread.is_alive():
            self._thread.join()
        self._monitor.close(linger=0)

    def _run(self) -> None:
        while self._handle_next():
            pass

    def _handle_next(self) -> bool:
        message: dict[str, Any] = dict(recv_monitor_message(self._monitor))
        if message["event"] == zmq.EVENT_MONITOR_STOPPED:
            return False
        self._on_event(int(message["event"]), int(message["value"]))
        return True
