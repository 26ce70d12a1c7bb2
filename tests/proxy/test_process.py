"""The front end as the agent starts it: a process with two inherited descriptors."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from mlx_mesh.mesh.messages import (
    Chunk,
    ProxyBeat,
    ProxyConfig,
    ProxyReady,
    ProxyRequest,
    Readiness,
    Submit,
    TokenChunk,
)
from mlx_mesh.node.pipe import BlockingPipe

DEADLINE_S = 60.0


class Proxy:
    """The child, our end of its pipe, and its port."""

    def __init__(self, model: str, **config: Any) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        ours, theirs = socket.socketpair()
        self.port = listener.getsockname()[1]
        self.sock = ours
        ours.settimeout(DEADLINE_S)
        self.pipe: BlockingPipe[ProxyRequest] = BlockingPipe(ours, msgspec.msgpack.Decoder(ProxyRequest))
        with listener, theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-I", "-u", "-m", "mlx_mesh.proxy", "--fd", str(theirs.fileno())],
                pass_fds=(theirs.fileno(), listener.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd="/",
                start_new_session=True,
            )
            settings: dict[str, Any] = {
                "model": model,
                "model_id": "tiny",
                "served_model_names": (),
                "serve_host": "127.0.0.1",
                "serve_port": self.port,
                "listen_fd": listener.fileno(),
                "api_keys": (),
                "chat_template": "",
                "version": "0.1.0",
                **config,
            }
            self.pipe.send(ProxyConfig(**settings))

    def hear(self) -> ProxyRequest | None:
        """The next message that is no heartbeat."""
        while isinstance(message := self.pipe.receive(), ProxyBeat):
            pass
        return message

    def wait_until_serving(self) -> None:
        message = self.hear()
        assert message == ProxyReady(pid=self.process.pid)
        self.pipe.send(Readiness(ready=True, reason="", world_size=1, context_length=100, epoch=1))

    def http(self) -> httpx.Client:
        url = f"http://127.0.0.1:{self.port}"
        return httpx.Client(base_url=url, timeout=DEADLINE_S, trust_env=False, verify=False)

    def get(self, path: str) -> httpx.Response:
        with self.http() as http:
            return http.get(path)

    def ended(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out, err


@pytest.fixture
def start() -> Iterator[Any]:
    with contextlib.ExitStack() as stack:

        def make(folder: Path, **config: Any) -> Proxy:
            proxy = Proxy(**{"model": str(folder), **config})
            stack.callback(proxy.sock.close)
            stack.callback(_end, proxy.process)
            return proxy

        yield make


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.kill()
    process.communicate()


def test_it_serves_on_the_inherited_socket_and_leaves_at_once_with_the_agent(
    start: Any, model_folder: Path
) -> None:
    proxy = start(model_folder)
    proxy.wait_until_serving()
    assert proxy.get("/health").json()["status"] == "ok"
    with proxy.http() as http:
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
        with http.stream("POST", "/v1/chat/completions", json=body) as response:
            message = proxy.hear()
            assert isinstance(message, Submit) and response.status_code == 200
            proxy.sock.close()  # the agent dies with a request open
            started = time.monotonic()
            code, out, err = proxy.ended()
            assert time.monotonic() - started < 2
            assert (code, out, err) == (0, "", "")
            with pytest.raises(httpx.RemoteProtocolError):
                response.read()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", proxy.port))


def test_sigterm_lets_an_answer_finish_and_sigint_is_the_agents_matter(
    start: Any, model_folder: Path
) -> None:
    proxy = start(model_folder)
    proxy.wait_until_serving()
    os.kill(proxy.process.pid, signal.SIGINT)
    body = {"messages": [{"role": "user", "content": "x"}], "stream": True}
    with proxy.http() as http, http.stream("POST", "/v1/chat/completions", json=body) as response:
        message = proxy.hear()
        assert isinstance(message, Submit)
        os.kill(proxy.process.pid, signal.SIGTERM)
        proxy.pipe.send(Chunk(chunk=TokenChunk(id=message.request.id, finish_reason="stop")))
        assert response.read().endswith(b"data: [DONE]\n\n")
    code, out, err = proxy.ended()
    assert (code, out) == (0, "")
    assert message.request.id in err  # the one line about the answer
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"serve_host": "0.0.0.0"}, "needs an API key"),
        ({"chat_template": "/no/such/template"}, "neither a Jinja text nor a readable file"),
        ({"model": "/no/such/model"}, "/no/such/model is not a folder"),
    ],
)
def test_bad_settings_end_it_with_one_line(
    start: Any, model_folder: Path, config: dict[str, Any], words: str
) -> None:
    proxy = start(model_folder, **config)
    code, out, err = proxy.ended()
    assert code != 0 and out == ""
    assert err.startswith("error: ") and words in err and err.count("\n") == 1


def test_nonsense_on_the_pipe_ends_it(start: Any, model_folder: Path) -> None:
    proxy = start(model_folder)
    proxy.wait_until_serving()
    proxy.sock.sendall(b"\xff\xff\xff\xff")
    code, _, err = proxy.ended()
    assert code == 1 and "over the limit" in err
