"""A proxy without HTTP: whoever connects sends ProxyRequests and gets ProxyEvents, as JSON lines.

fake_proxy.py --script FILE --fd N      FILE: JSON with "start": "" | "exit:STATUS" | "hang",
and the same for a model that is served, under "start " and its name
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from mlx_mesh.mesh.messages import (
    ProxyBeat,
    ProxyEvent,
    ProxyReady,
    ProxyRequest,
    StatusQuery,
    StatusReply,
)
from mlx_mesh.node.client import read_config
from mlx_mesh.node.pipe import AsyncPipe


async def main(fd: int, scripted: dict[str, str]) -> None:
    sock = socket.socket(fileno=fd)
    config = read_config(sock)
    action = scripted.get(f"start {config.model_id}", scripted.get("start", ""))
    sock.setblocking(False)
    print("proxy serves", config.model_id, flush=True)
    if action.startswith("exit:"):
        print("the proxy has a problem", flush=True)
        sys.exit(int(action.removeprefix("exit:")))
    pipe = await AsyncPipe.open(sock, msgspec.msgpack.Decoder(ProxyEvent))
    clients: set[asyncio.StreamWriter] = set()
    last: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        clients.add(writer)
        writer.writelines(last)
        async for line in reader:
            request: ProxyRequest = msgspec.json.decode(line, type=ProxyRequest)
            pipe.send(request)
        clients.discard(writer)

    async def beat() -> None:
        while True:
            pipe.send(ProxyBeat())
            await asyncio.sleep(0.1)

    beats = asyncio.create_task(beat())
    await asyncio.start_server(serve, sock=socket.socket(fileno=os.dup(config.listen_fd)))
    if action != "hang":
        pipe.send(ProxyReady(pid=os.getpid()))
    # A question on SIGTERM: with its answer everything that was said before has arrived.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, pipe.send, StatusQuery(id="last"))
    while (event := await pipe.receive()) is not None:
        if isinstance(event, StatusReply) and event.id == "last":
            beats.cancel()
            await asyncio.gather(*(writer.drain() for writer in clients))
            return
        line = msgspec.json.encode(event) + b"\n"
        if b'"readiness"' in line:
            last[:] = [line]
        for writer in clients:
            writer.write(line)


if __name__ == "__main__":
    arguments = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
    scripted = json.loads(Path(arguments["--script"]).read_text())
    asyncio.run(main(int(arguments["--fd"]), scripted))
