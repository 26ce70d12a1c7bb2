"""`python -I -u -m mlx_mesh.node.engine --fd N`: one rank's engine, a child of the host's agent.

N is an inherited socket to the agent: EngineConfig comes first, then commands; reports go back. Its end of
file ends this process at once. Exit status: 0 after the stop plan, else see failure.EXIT_STATUS.
SIGUSR1 prints every thread's stack to stderr.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from typing import NoReturn

import msgspec

from mlx_mesh.mesh.errors import ProtocolError
from mlx_mesh.mesh.messages import EngineCommand, EngineConfig, EngineHello
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.engine.backend import (
    import_mlx,
    loaded_versions,
    offered_backends,
)
from mlx_mesh.node.engine.birth import born
from mlx_mesh.node.engine.commands import Commands
from mlx_mesh.node.engine.failure import EXIT_AGENT_GONE, EXIT_STATUS, EngineError, describe
from mlx_mesh.node.engine.light import import_mlx_lm
from mlx_mesh.node.engine.report import HeartbeatThread, Reporter, read_memory
from mlx_mesh.node.pipe import BlockingPipe

_ending = threading.Lock()  # taken once, never given back


@dataclass(frozen=True, slots=True)
class Engine:
    """What `startup` made."""

    config: EngineConfig
    commands: Commands
    reporter: Reporter
    heartbeats: HeartbeatThread


def main(arguments: list[str] | None = None) -> int:
    """The whole life of an engine; returns its exit status."""
    sock = born("mlx_mesh.node.engine", "One rank's engine.", arguments)
    config = read_config(sock)
    reporter = Reporter(BlockingPipe(sock, msgspec.msgpack.Decoder(EngineCommand)))
    try:
        engine = startup(config, sock, reporter)
        run(engine)
        shutdown(engine)
    except BaseException as error:  # the outermost frame: whatever it is, the agent must know
        traceback.print_exc()
        end(reporter, describe(error))
    return 0


def startup(config: EngineConfig, sock: socket.socket, reporter: Reporter) -> Engine:
    """Watch the agent, import MLX, say hello, start the heartbeat."""
    commands = Commands(BlockingPipe(sock, msgspec.msgpack.Decoder(EngineCommand)))
    commands.start()
    mx = import_mlx()
    import_mlx_lm()
    importlib.import_module("mlx_mesh.node.engine.phases")  # mlx-lm takes seconds: not out of connect's time
    reporter.read_memory = lambda: read_memory(mx)
    reporter.phase = Phase.IMPORTED
    reporter.send(
        EngineHello(
            pid=os.getpid(),
            versions=loaded_versions(),
            backends=offered_backends(),
            device=f"{mx.default_device()} {mx.device_info().get('device_name', '')}".strip(),
        )
    )
    heartbeats = HeartbeatThread(reporter, config.heartbeat_interval_s)
    heartbeats.start()
    return Engine(config, commands, reporter, heartbeats)


def run(engine: Engine) -> None:
    """From Connect to the stop plan."""
    # Not at the top: these import MLX, which must have been found to work first.
    from mlx_mesh.node.engine import phases
    from mlx_mesh.node.engine.loop import Leader

    config, commands, reporter = engine.config, engine.commands, engine.reporter

    def on_fatal(error: EngineError) -> None:
        end(reporter, error)

    channels = phases.connect(config, commands, reporter, on_fatal)
    try:
        phases.join_plans(config, channels, commands, on_fatal)
        command, shard, files = phases.load(config, channels, commands, reporter)
        loop = phases.warm_up(config, channels, command, shard, files, commands, reporter)
        if isinstance(loop, Leader):
            loop.run(commands)
        else:
            loop.run()
    except RuntimeError as error:  # MLX's, which does not say whom it lost
        if (ended := describe(error)).kind != "peer_lost":
            raise
        raise EngineError("peer_lost", str(ended), channels.group.hung_up()) from error
    channels.close()  # not after an error: that ends the process by os._exit


def shutdown(engine: Engine) -> None:
    """Stop what `startup` started; the commands thread ends with the process."""
    engine.heartbeats.stop()
    engine.commands.let_agent_leave()
    engine.reporter.phase = Phase.STOPPED
    engine.reporter.send(engine.reporter.heartbeat())


def end(reporter: Reporter, error: EngineError) -> NoReturn:
    """Report and end the process without its destructors: MLX's may wait for a peer that is gone.
    Of several threads the first one is heard."""
    _ending.acquire()
    print(f"engine: {error}", file=sys.stderr, flush=True)
    reporter.failed(error)
    os._exit(EXIT_STATUS[error.kind])


def read_config(sock: socket.socket) -> EngineConfig:
    """The first frame. Without it there is nobody to report to, so this ends the process."""
    try:
        config = BlockingPipe(sock, msgspec.msgpack.Decoder(EngineConfig)).receive()
    except (OSError, ProtocolError) as error:
        print(f"engine: no settings came from the agent: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_STATUS["internal"])
    if config is None:
        sys.exit(EXIT_AGENT_GONE)
    return config


if __name__ == "__main__":
    sys.exit(main())
