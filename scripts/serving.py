"""What the demo and the benchmark share: a server as a child process, and a streaming client for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

POLL_S = 0.2
STOP_S = 30.0


class ServerError(Exception):
    """A server did not start, or answered with an error; the message is for people."""


def free_port() -> int:
    """A TCP port on 127.0.0.1 that nothing uses now."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@dataclass(frozen=True)
class Server:
    """One HTTP server of OpenAI's dialect that runs as our child."""

    name: str
    url: str  # without a path
    ready_path: str
    process: subprocess.Popen[bytes]

    def wait_until_ready(self, timeout_s: float) -> None:
        """Raises ServerError when the child ends, or is not ready within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not self._answers():
            if self.process.poll() is not None:
                raise ServerError(
                    f"{self.name} ended with status {self.process.returncode} before it was ready."
                )
            if time.monotonic() > deadline:
                raise ServerError(f"{self.name} was not ready within {timeout_s:.0f} s.")
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(self.url + self.ready_path, timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # refused, or an HTTP error: not ready
            return False

    def stop(self, is_told: bool = False) -> int:
        """Ask the child to end as Ctrl-C does (unless the terminal has told it) and wait; KILL when it takes
        too long. Returns its status."""
        if self.process.poll() is None and not is_told:
            self.process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        if self.process.poll() is None:
            self.process.kill()
        return self.process.wait()


@contextlib.contextmanager
def running(
    name: str, command: list[str], url: str, ready_path: str, timeout_s: float, **variables: str
) -> Iterator[Server]:
    """The server of `command`, ready; stopped at the end whatever happens."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env={**os.environ, **variables})
    server = Server(name, url, ready_path, process)
    try:
        server.wait_until_ready(timeout_s)
        yield server
    finally:
        server.stop()


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
