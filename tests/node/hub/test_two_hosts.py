"""Two hosts with a cache each: every host fetches the files of its own layers, and no other weights."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from mlx_mesh.node.hub_folder import is_placeholder

READY_WITHIN_S = 120.0
GONE_WITHIN_S = 30.0


@contextlib.contextmanager
def rank(number: int, port: int, home: Path) -> Iterator[Path]:
    """One rank started by hand with a home of its own; gives the file of its output."""
    home.mkdir()
    environment = os.environ | {
        "HF_HOME": str(home / "hf"),
        "XDG_CACHE_HOME": str(home / "cache"),
        "XDG_STATE_HOME": str(home / "state"),
        "RANK": str(number),
        "WORLD_SIZE": "2",
        "PAIRED_HOST": "127.0.0.1",
        "PAIRED_PORT": str(port),
        # One secret for both, as on two machines.
        "MLX_MESH_SECRET": "the secret of this test alone",
    }
    output = home / "output"
    words = ["--model", "org/tiny", "--port", "0", "--sharding", "pipeline"]
    with output.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mlx_mesh.node", *words],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            cwd=home,
        )
    try:
        yield output
    finally:
        process.terminate()
        process.wait(GONE_WITHIN_S)


def url_of(leader: Path, *others: Path) -> str:
    """Of the mesh that is ready."""
    deadline = time.monotonic() + READY_WITHIN_S
    while True:
        text = leader.read_text()
        if ready := re.search(r"ready after.*?(http://\S+?)[.,]?\s", text):
            return ready[1]
        if "error:" in text or time.monotonic() > deadline:
            pytest.fail("\n".join([text, *(other.read_text() for other in others)]))
        time.sleep(0.1)  # the poll interval of a wait that has a deadline


def fetched(home: Path) -> list[str]:
    """Weight files that this host has."""
    (folder,) = [path for path in (home / "cache" / "mlx-mesh" / "models").glob("*/*") if path.name != "refs"]
    files = sorted(folder.glob("model-*.safetensors"))
    assert len(files) == 4, "a placeholder for each that it does not have"
    return [path.name[:11] for path in files if not is_placeholder(path)]


@pytest.mark.two_rank
@pytest.mark.long
@pytest.mark.timeout(300)
def test_each_host_fetches_only_the_files_of_its_layers(
    hub: Any, sharded_model: Path, tmp_path: Path
) -> None:
    hub.folders["org/tiny"] = sharded_model
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    last, first = tmp_path / "last", tmp_path / "first"
    with rank(0, port, last) as leader, rank(1, port, first) as follower:
        url = url_of(leader, follower)
        layers = [row["layers"] for row in httpx.get(f"{url}/v1/cluster/nodes", timeout=10).json()["ranks"]]
        assert layers == ["3-5", "0-2"]
        body = {"prompt": "over two hosts", "max_tokens": 8, "temperature": 0}
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code == 200
    # Layers 2 and 3 are in one file; the last file has the embedding, the norm and the head.
    assert fetched(last) == ["model-00002", "model-00003", "model-00004"]
    assert fetched(first) == ["model-00001", "model-00002", "model-00004"]
    assert not any(name.endswith(".py") for _, name, _ in hub.requests), "no code is fetched"
