"""The agent's commands, read by a thread so that the agent's end is noticed while MLX computes."""

from __future__ import annotations

import os
import queue
import sys
import threading
from typing import TypeVar

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import EngineCommand
from mlx_mesh.node.engine.failure import EXIT_AGENT_GONE, EXIT_STATUS, EngineError
from mlx_mesh.node.engine.grammar import GrammarReady
from mlx_mesh.node.pipe import BlockingPipe

C = TypeVar("C")


class Commands:
    """Commands in the order in which the agent sent them. End of file ends the process at once."""

    def __init__(self, pipe: BlockingPipe[EngineCommand]) -> None:
        self._pipe = pipe
        self._queue: queue.SimpleQueue[EngineCommand | GrammarReady] = queue.SimpleQueue()
        self._agent_may_leave = False
        self._thread = threading.Thread(target=self._read, name="commands", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def let_agent_leave(self) -> None:
        """From now on end of file is no reason to end: the process does so by itself."""
        self._agent_may_leave = True

    def next(self) -> EngineCommand | GrammarReady:
        """The next command, waiting without limit: the agent sets the pace, and its end ends us."""
        return self._queue.get()

    def poll(self) -> EngineCommand | GrammarReady | None:
        """The next command if there is one."""
        try:
            return self._queue.get_nowait()
        except queue.Empty:
            return None

    def put(self, ready: GrammarReady) -> None:
        """Wake whoever waits in `next`; from any thread."""
        self._queue.put(ready)

    def expect(self, kind: type[C]) -> C:
        """The next command, which must be a `kind`."""
        command = self.next()
        if not isinstance(command, kind):
            raise EngineError(
                "internal", f"The agent sent {type(command).__name__} where {kind.__name__} comes next."
            )
        return command

    def _read(self) -> None:
        try:
            while (command := self._pipe.receive()) is not None:
                self._queue.put(command)
        except OSError:
            pass  # the same as end of file
        except ProtocolError as error:
            print(f"engine: {error}", file=sys.stderr, flush=True)
            os._exit(EXIT_STATUS["internal"])
        if self._agent_may_leave:
            return
        # The main thread may be inside MLX, which no Python exception reaches.
        os._exit(EXIT_AGENT_GONE)
