"""The HTTP front end of a mesh, a child of the leader's agent.

`python -I -u -m mlx_mesh.proxy --fd N`: N is this end of a socket pair; its first frame has the settings.
The listening socket is inherited, too. When the agent goes, so does this process, at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator

import uvicorn

from mlx_mesh.mesh.errors import ExitCode, MeshError
from mlx_mesh.mesh.messages import ProxyConfig
from mlx_mesh.node.client import CoordinatorClient, read_config
from mlx_mesh.proxy.app import build_app
from mlx_mesh.proxy.metrics import Metrics
from mlx_mesh.proxy.protocol import EnvelopeProtocol
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import ModelTokenizer, TokenizerError

GRACEFUL_STOP_S = 2
"""After SIGTERM, for answers that are being written; the agent kills after `Deadlines.stop_s`."""

_PR_SET_PDEATHSIG = 1

_log = logging.getLogger("mlx_mesh.proxy")


def main() -> int:
    """The process. Errors of settings and model go to stderr, which the agent reads."""
    parser = argparse.ArgumentParser(
        prog="python -m mlx_mesh.proxy", description="Started by the agent only."
    )
    parser.add_argument("--fd", type=int, required=True, help="inherited end of the socket pair")
    arguments = parser.parse_args()
    _die_with_parent()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(message)s")
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        pipe = socket.socket(fileno=arguments.fd)
        pipe.set_inheritable(False)
        config = read_config(pipe)
        asyncio.run(serve(config, pipe))
    except TokenizerError as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.PREFLIGHT  # another start would meet the same files
    except MeshError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return ExitCode.OK


async def serve(config: ProxyConfig, pipe: socket.socket) -> None:
    """Startup, main loop, shutdown. Returns after SIGTERM; does not return when the agent goes."""
    listener = socket.socket(fileno=config.listen_fd)
    listener.set_inheritable(False)
    client = await CoordinatorClient.open(pipe)
    events = asyncio.create_task(_follow_agent(client))
    beats = asyncio.create_task(client.beat())
    tokenizer = await asyncio.to_thread(ModelTokenizer.load, config.model, config.chat_template)
    if tokenizer.chat_template_error:
        _log.warning("chat completions are refused: %s", tokenizer.chat_template_error)
    services = Services(config=config, client=client, tokenizer=tokenizer, metrics=Metrics(client))
    server = _Server(
        uvicorn.Config(
            build_app(services),
            http=EnvelopeProtocol,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACEFUL_STOP_S,
        ),
        client,
    )
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, server.stop)
    loop.add_signal_handler(
        signal.SIGINT, lambda: None
    )  # Ctrl-C reaches the whole terminal; the agent decides
    try:
        await server.serve(sockets=[listener])
    finally:
        beats.cancel()
        events.cancel()
        tokenizer.close()
        await client.close()


class _Server(uvicorn.Server):
    """uvicorn without its signal handling, telling the coordinator when it accepts connections."""

    def __init__(self, config: uvicorn.Config, client: CoordinatorClient) -> None:
        super().__init__(config)
        self._client = client

    def stop(self) -> None:
        self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._client.announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _follow_agent(client: CoordinatorClient) -> None:
    """Hand out the coordinator's events; when there are no more, leave without ceremony: whatever is open
    cannot be finished."""
    try:
        await client.run()
        code = ExitCode.OK
    except MeshError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        code = ExitCode.FAILED
    except asyncio.CancelledError:
        return
    os._exit(code)


def _die_with_parent() -> None:
    """On Linux the kernel kills this process with the agent. Elsewhere, and in the moment before this call,
    the end of the socket pair does it."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    status = main()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)  # what imported libraries do at the interpreter's end takes seconds on a busy host
