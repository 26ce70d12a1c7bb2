"""What the demo and the benchmark share: a server as a child process, and a streaming client for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mlx_mesh.launcher.state import StateFolder, state_root

POLL_S = 0.2
STOP_S = 30.0
LAST_LINES = 15


class ServerError(Exception):
    """A server did not start, or answered with an error; the message is for people."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def mesh_url(name: str, process: subprocess.Popen[bytes]) -> str:
    """The address of the mesh that this launcher process runs, '' until it is ready."""
    state = StateFolder(state_root(os.environ), name).read()
    return state.url if state is not None and state.pid == process.pid else ""


def answering(url: str, path: str) -> str:
    """`url` when a GET of `path` there gives 200, else ''."""
    try:
        with urllib.request.urlopen(url + path, timeout=5) as answer:
            return url if answer.status == 200 else ""
    except OSError:  # refused, or an HTTP error: not ready
        return ""


def wait_until_ready(
    name: str, process: subprocess.Popen[bytes], ready_url: Callable[[], str], timeout_s: float
) -> str:
    """What `ready_url` gives once it gives something. Raises ServerError when the process ends first, or is
    not ready within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not (url := ready_url()):
        if process.poll() is not None:
            raise ServerError(f"{name} ended with status {process.returncode} before it was ready.")
        if time.monotonic() > deadline:
            raise ServerError(f"{name} was not ready within {timeout_s:.0f} s.")
        time.sleep(POLL_S)
    return url


def stop(process: subprocess.Popen[bytes], is_told: bool = False) -> int:
    """Ask a server to end as Ctrl-C does (unless the terminal has told it) and wait; KILL when it takes too
    long. Returns its status."""
    if process.poll() is None and not is_told:
        process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    if process.poll() is None:
        process.kill()
    return process.wait()


@contextlib.contextmanager
def running(
    name: str,
    command: list[str],
    ready_url: Callable[[subprocess.Popen[bytes]], str],
    timeout_s: float,
    **variables: str,
) -> Iterator[str]:
    """The address of the server of `command`, ready; stopped at the end whatever happens. What it prints is
    shown only when something goes wrong."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, **variables}
        )
        try:
            yield wait_until_ready(name, process, lambda: ready_url(process), timeout_s)
        except ServerError as error:
            output.seek(0)
            last = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
            raise ServerError("\n  ".join([f"{error} The last lines of {name}:", *last])) from error
        finally:
            stop(process)


@dataclass
class Answer:
    """What one streamed request gave. Times are seconds since it was sent."""

    text: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    first_s: float = 0.0
    last_s: float = 0.0


def stream(url: str, body: dict[str, Any], answer: Answer, timeout_s: float = 600.0) -> Iterator[str]:
    """POST `body` with "stream": true; yields each piece of text and fills `answer`.
    Raises ServerError with the server's own message."""
    data = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    sent = time.perf_counter()
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            answer.headers = {name.lower(): value for name, value in response.headers.items()}
            for line in response:
                if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
                    continue
                event = json.loads(line[len(b"data: ") :])
                if "error" in event:
                    raise ServerError(f"{url} answered: {event['error']}")
                answer.usage = event.get("usage") or answer.usage
                for choice in event.get("choices", []):
                    piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
                    if piece:
                        answer.last_s = time.perf_counter() - sent
                        answer.first_s = answer.first_s or answer.last_s
                        answer.text += piece
                        yield piece
    except urllib.error.HTTPError as error:
        raise ServerError(f"{url} answered {error.code}: {error.read().decode(errors='replace')}") from error
    except OSError as error:
        raise ServerError(f"{url}: {error}") from error


def complete(url: str, body: dict[str, Any]) -> Answer:
    """The whole streamed answer. Raises ServerError when there is no text in it."""
    answer = Answer()
    for _ in stream(url, body, answer):
        pass
    if not answer.text:
        raise ServerError(f"{url} answered without any text.")
    return answer
