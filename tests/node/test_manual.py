"""The manual bootstrap with real engines and the real proxy on a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.two_rank

READY_S = 90.0
SOON_S = 15.0


class Rank:
    """One `python -m mlx_mesh.node` as a user would start it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.lines: list[str] = []

    async def says(self, words: str, within_s: float = READY_S) -> str:
        """The next line with these words; fails with everything it said."""
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(within_s):
                while line := (await self.process.stdout.readline()).decode():
                    self.lines.append(line)
                    if words in line:
                        return line.strip()
        except TimeoutError:
            pass
        raise AssertionError(f"it never said {words!r}:\n{''.join(self.lines)}")

    async def ends(self, within_s: float = SOON_S) -> int:
        async with asyncio.timeout(within_s):
            out, _ = await self.process.communicate()
        self.lines += out.decode().splitlines(keepends=True)
        assert self.process.returncode is not None
        return self.process.returncode

    @property
    def text(self) -> str:
        return "".join(self.lines)


class Shell:
    """Starts ranks with a fresh home and a fresh port, and ends them."""

    def __init__(self, home: Path, model: Path) -> None:
        self.home = home
        self.model = model
        self.ranks: list[Rank] = []
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]

    async def start(self, rank: int, *flags: str, **variables: str) -> Rank:
        environment = {
            name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
        }
        environment |= {
            "XDG_STATE_HOME": str(self.home),
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "PAIRED_HOST": "127.0.0.1",
            "PAIRED_PORT": str(self.port),
        }
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "mlx_mesh.node", "--model", str(self.model), "--port", "0", *flags,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env=environment | variables,
            cwd=self.home,
        )  # fmt: skip
        self.ranks.append(Rank(process))
        return self.ranks[-1]

    async def close(self) -> None:
        for rank in self.ranks:
            with contextlib.suppress(ProcessLookupError):
                rank.process.kill()
            await rank.process.communicate()


@pytest.fixture
def shell(tmp_path: Path, tiny_llama: Path) -> Any:
    @contextlib.asynccontextmanager
    async def run() -> AsyncIterator[Shell]:
        opened = Shell(tmp_path, tiny_llama)
        try:
            yield opened
        finally:
            await opened.close()

    return run


async def call(url: str, path: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url + path, data=data, headers={"content-type": "application/json"})

    def fetch() -> Any:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)

    return await asyncio.to_thread(fetch)


def url_in(line: str) -> str:
    return line[line.index("http://") :]


def family(pid: int) -> list[int]:
    """Linux: a process and all that descend from it."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    children = "".join((task / "children").read_text() for task in tasks)
    return [pid, *(member for child in children.split() for member in family(int(child)))]


def shows(pid: int, secret: str, *names: str) -> bool:
    """Linux: others of this machine may read the secret in `cmdline` or `environ`."""
    return any(secret.encode() in Path(f"/proc/{pid}/{name}").read_bytes() for name in names)


async def test_two_ranks_serve_and_a_killed_engine_changes_no_answer(shell: Any) -> None:
    """And their secret is nowhere but where the user put it."""
    secret = "the-secret-of-both-0123456789abcdef"
    async with shell() as it:
        follower = await it.start(0, "--distributed-server-rank", "1", MLX_MESH_SECRET=secret)
        leader = await it.start(1, "--distributed-server-rank", "1", MLX_MESH_SECRET=secret)
        url = url_in(await leader.says("ready after"))
        nodes = await call(url, "/v1/cluster/nodes")
        assert [(row["rank"], row["user_rank"]) for row in nodes["ranks"]] == [(0, 1), (1, 0)]
        ask = {"prompt": "one two three", "max_tokens": 24, "temperature": 0}
        before = await call(url, "/v1/completions", ask)
        os.kill(nodes["ranks"][1]["engine_pid"], signal.SIGKILL)
        await leader.says("ready again")
        after = await call(url, "/v1/completions", ask)
        assert before["choices"][0]["text"] == after["choices"][0]["text"]
        status = await call(url, "/v1/cluster/status")
        assert status["epoch"] == 2 and secret not in json.dumps(status)
        for rank in it.ranks if sys.platform == "linux" else ():
            agent, *children = family(rank.process.pid)
            assert children and shows(agent, secret, "environ") and not shows(agent, secret, "cmdline")
            assert not any(shows(child, secret, "cmdline", "environ") for child in children)
        leader.process.send_signal(signal.SIGTERM)
        assert await leader.ends() == 0
        assert await follower.ends() == 0
        assert secret not in leader.text + follower.text
        files = [path for path in it.home.rglob("*") if path.is_file()]
        assert files and not [path for path in files if secret.encode() in path.read_bytes()]


async def test_only_one_of_two_started_names_the_missing_rank(shell: Any) -> None:
    async with shell() as it:
        leader = await it.start(0, "--distributed-timeout", "3")
        assert await leader.ends() == 5
        assert "error: rank 1 did not join within 3 s (join_s)." in leader.text


async def test_a_follower_alone_says_where_it_looked(shell: Any) -> None:
    async with shell() as it:
        follower = await it.start(1, MLX_DISTRIBUTED_TIMEOUT="2")
        assert await follower.ends() == 5
        assert f"127.0.0.1:{it.port}" in follower.text and "nothing answers there" in follower.text


async def test_a_rank_that_does_not_exist_is_refused_at_once(shell: Any) -> None:
    async with shell() as it:
        rank = await it.start(2)
        assert await rank.ends() == 2
        assert "RANK is 2, but with WORLD_SIZE=2 ranks go from 0 to 1" in rank.text


async def test_serving_beyond_loopback_without_a_key_is_refused(shell: Any) -> None:
    async with shell() as it:
        rank = await it.start(0, "--host", "0.0.0.0")
        assert await rank.ends() == 2
        assert "needs an API key" in rank.text
