"""Every way to end a request, at every moment, with every option: it ends, it is told, and nothing stays."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.two_rank

WITHIN_S = 30.0
LONG = 1900  # tokens; nobody gets all of them
LONG_PROMPT = "word " * 250  # a token each letter
COMMANDS = {1: ("serve",), 2: ("up", "--sim", "2")}
HOWS = ("disconnect", "cancel", "max_time_s")
MOMENTS = ("queue", "prefill", "decode")
ENDLESS = {"temperature": 0.9, "logit_bias": {"0": -100, "1": -100, "2": -100}}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seed": {**ENDLESS, "seed": 7},
    "penalties": {**ENDLESS, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "n": {**ENDLESS, "n": 2},
    "logprobs": {**ENDLESS, "seed": 3, "logprobs": 2},
}
_ids = itertools.count()


@dataclass(frozen=True)
class Cell:
    how: str
    moment: str
    option: str
    stream: bool


ALL = [Cell(*cell) for cell in itertools.product(HOWS, MOMENTS, OPTIONS, (True, False))]


def some_cells(shift: int) -> list[Cell]:
    """Each way at each moment once, with another option each; streamed and whole take turns."""
    names = list(OPTIONS)
    return [
        Cell(how, moment, names[(at + shift) % len(names)], (at + shift) % 2 == 0)
        for at, (how, moment) in enumerate(itertools.product(HOWS, MOMENTS))
    ]


class Asked:
    """A request whose answer is not read yet."""

    def __init__(self, mesh: Any, prompt: str, stream: bool, **fields: Any) -> None:
        self.id = f"matrix-{next(_ids)}"
        self.stream = stream
        body = {"prompt": prompt, "max_tokens": LONG, "stream": stream, **fields}
        data = json.dumps(body)
        self.socket = socket.create_connection(("127.0.0.1", int(mesh.url.rpartition(":")[2])), WITHIN_S)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(data)}\r\n"
        head += f"Content-Type: application/json\r\nConnection: close\r\nX-Request-Id: {self.id}\r\n\r\n"
        self.socket.sendall((head + data).encode())
        self._received = b""

    def wait_for_text(self) -> None:
        """The first token is there."""
        while b'"text"' not in self._received:
            part = self.socket.recv(4096)
            assert part, self._received
            self._received += part

    def error(self) -> str:
        """The code of the error that ended it."""
        while part := self.socket.recv(65536):
            self._received += part
        self.socket.close()
        status = int(self._received.split(b" ", 2)[1])
        # A stream that ends before its first byte has a status, too.
        assert status in (400, 503, 504) or (status == 200 and self.stream), self._received[-500:]
        events = [json.loads(line) for line in _json_lines(self._received)]
        assert not any(
            "finish_reason" in c and c["finish_reason"] for e in events for c in e.get("choices", ())
        )
        code: str = events[-1]["error"]["code"]
        return code


def _json_lines(answer: bytes) -> Iterator[bytes]:
    for line in answer.splitlines():
        line = line.removeprefix(b"data: ")
        if line.startswith(b"{"):
            yield line


def status(mesh: Any) -> Any:
    return httpx.get(f"{mesh.url}/v1/cluster/status", timeout=10).json()


def wait(mesh: Any, what: str, count: int) -> None:
    give_up = time.monotonic() + WITHIN_S
    while (seen := status(mesh)[what]) != count:
        assert time.monotonic() < give_up, f"{what} is {seen}, not {count}"
        time.sleep(0.02)  # the poll interval of a wait that has a deadline


def kv_bytes(mesh: Any) -> float:
    """Of all ranks, as their last heartbeats have it."""
    text = httpx.get(f"{mesh.url}/metrics", timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("mlx_mesh_rank_kv_bytes{")]
    assert lines
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def wait_until_nothing_is_left(mesh: Any) -> None:
    wait(mesh, "num_open", 0)
    give_up = time.monotonic() + WITHIN_S
    while (left := kv_bytes(mesh)) or status(mesh)["num_running"]:
        assert time.monotonic() < give_up, f"{left} bytes of KV memory are still taken"
        time.sleep(0.1)


def try_cell(mesh: Any, cell: Cell) -> None:
    fields = dict(OPTIONS[cell.option])
    num_sequences = fields.get("n", 1)
    if cell.how == "max_time_s":
        fields["max_time_s"] = {"queue": 0.2, "prefill": 0.01, "decode": 0.6}[cell.moment]
    num_before = status(mesh)["num_open"]
    asked = Asked(mesh, LONG_PROMPT if cell.moment == "prefill" else "a few words", cell.stream, **fields)
    if cell.how != "max_time_s":
        wait(mesh, "num_open", num_before + num_sequences)
        if cell.moment == "decode" and cell.stream:
            asked.wait_for_text()
        elif cell.moment == "decode":
            wait(mesh, "num_running", 1)
    if cell.how == "disconnect":
        asked.socket.close()
    elif cell.how == "cancel":
        reply = httpx.post(f"{mesh.url}/v1/requests/{asked.id}/cancel", timeout=10)
        assert reply.status_code == 200, cell
        assert asked.error() == "request_cancelled", cell
    else:
        assert asked.error() == "timeout", cell
    wait(mesh, "num_open", num_before)


def try_cells(mesh: Any, cells: list[Cell]) -> None:
    for cell in cells:
        if cell.moment != "queue":
            try_cell(mesh, cell)
            continue
        # One for each cell: an older one could come to its end meanwhile, and leave its place to the other.
        blocker = Asked(mesh, "the one that runs", True, **ENDLESS)
        with blocker.socket:
            blocker.wait_for_text()
            try_cell(mesh, cell)
        wait(mesh, "num_open", 0)
    wait_until_nothing_is_left(mesh)


def answer(mesh: Any) -> str:
    body = {"prompt": "after all", "max_tokens": 20, "temperature": 0.7, "seed": 3}
    text: str = httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=120).json()["choices"][0]["text"]
    return text


def listeners(mesh: Any) -> set[tuple[str, str]]:
    """Linux: (command, IPv4 address) of each TCP socket that a process of the mesh listens on."""
    found = set()
    for pid in mesh.processes():
        links = set()
        with contextlib.suppress(OSError):
            links = {str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()}
        for table in ("tcp", "tcp6"):
            for row in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                fields = row.split()
                if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                    address = ".".join(map(str, reversed(bytes.fromhex(fields[1].partition(":")[0][-8:]))))
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                    found.add((next(w.decode() for w in words if w.startswith(b"mlx_mesh.")), address))
    return found


@contextlib.contextmanager
def mesh_of(start_mesh: Any, world_size: int, model: Path) -> Iterator[Any]:
    """One row at a time, so that a second request waits."""
    arguments = ("--model", str(model), "--served-model-name", "tiny", "--max-sequences", "1")
    with start_mesh(*COMMANDS[world_size], *arguments) as mesh:
        yield mesh


def try_all(mesh: Any, cells: list[Cell]) -> None:
    before = answer(mesh)
    wait_until_nothing_is_left(mesh)
    try_cells(mesh, cells)
    assert answer(mesh) == before
    assert status(mesh)["epoch"] == 1


@pytest.mark.parametrize("world_size", COMMANDS)
def test_each_way_to_end_a_request_works_at_each_moment_and_shutdown_ends_the_rest(
    start_mesh: Any, tiny_llama: Path, world_size: int
) -> None:
    with mesh_of(start_mesh, world_size, tiny_llama) as mesh:
        if sys.platform == "linux":
            listening = listeners(mesh)
            assert {address for _, address in listening} == {"127.0.0.1"}, (
                "the links' addresses and HTTP's only"
            )
            assert ("mlx_mesh.proxy", "127.0.0.1") in listening
        try_all(mesh, some_cells(world_size))
        # One decodes, the others wait; a shutdown takes no new ones, and when asked again ends the open ones.
        rows = [Asked(mesh, "a few words", True, **OPTIONS["seed"])]
        rows[0].wait_for_text()
        rows.append(Asked(mesh, LONG_PROMPT, False, **OPTIONS["logprobs"]))
        rows.append(Asked(mesh, "more", True, **OPTIONS["penalties"]))
        wait(mesh, "num_open", 3)
        mesh.launcher.send_signal(signal.SIGINT)
        give_up = time.monotonic() + WITHIN_S
        body = {"prompt": "too late", "max_tokens": 1, "max_time_s": 0.1}
        while (late := httpx.post(f"{mesh.url}/v1/completions", json=body, timeout=60)).status_code == 504:
            assert time.monotonic() < give_up, "the signal was not heeded"
        assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
        assert int(late.headers["retry-after"]) > 0
        mesh.launcher.send_signal(signal.SIGINT)
        assert [row.error() for row in rows] == ["draining"] * 3
        assert mesh.launcher.wait(WITHIN_S) == 0


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("world_size", COMMANDS)
def test_the_whole_matrix(start_mesh: Any, tiny_llama: Path, world_size: int) -> None:
    with mesh_of(start_mesh, world_size, tiny_llama) as mesh:
        try_all(mesh, ALL)
        assert mesh.stop() == 0
