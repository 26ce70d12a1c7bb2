"""One end of a trial connection between two hosts: "listen" for it, or "dial" and tell how it went.

By the interpreter that a rank would be: firewalls and macOS's privacy judge by program. Readable by
Python 3.8.
"""

from __future__ import annotations

import errno
import json
import socket
import subprocess
import sys
from typing import Any

ACCEPT_S = 20.0
DIAL_S = 8.0
GREETING = b"mlx-mesh?"


def listen(address: str, say: Any) -> None:
    try:
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        listener.bind((address, 0))
        listener.listen(1)
    except OSError as error:
        say({"not_listening": error.strerror or str(error)})
        return
    with listener:
        listener.settimeout(ACCEPT_S)
        say({"port": listener.getsockname()[1]})
        connection, _ = listener.accept()
    with connection:
        connection.settimeout(DIAL_S)
        connection.sendall(connection.recv(len(GREETING)))


def dial(address: str, port: int) -> dict[str, object]:
    try:
        with socket.create_connection((address, port), timeout=DIAL_S) as connection:
            connection.sendall(GREETING)
            if connection.recv(len(GREETING)) != GREETING:
                return {"error": "EPROTO", "said": "another program answered"}
    except TimeoutError:
        return {
            "error": "ETIMEDOUT",
            "said": f"no answer within {DIAL_S:g} s",
            "has_route": has_route(address),
        }
    except OSError as error:
        name = errno.errorcode.get(error.errno or 0, type(error).__name__)
        return {"error": name, "said": error.strerror or str(error), "has_route": has_route(address)}
    return {}


def has_route(address: str) -> bool:
    """The system knows an interface for that address."""
    for words in (["/sbin/route", "-n", "get", address], ["ip", "route", "get", address]):
        try:
            done = subprocess.run(
                words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=5
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        told = done.stdout.decode("utf-8", "replace")
        if done.returncode == 0 and ("interface:" in told or " dev " in told):
            return True
    return False


def main(marker: str, request: str) -> None:
    asked = json.loads(request)

    def say(answer: object) -> None:
        sys.stdout.write(f"\n{marker} {json.dumps(answer)}\n")
        sys.stdout.flush()

    if asked["do"] == "listen":
        listen(asked["address"], say)
    else:
        say(dial(asked["address"], asked["port"]))
