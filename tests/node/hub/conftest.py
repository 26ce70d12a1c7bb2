"""A stand-in for the hub: serves model folders by the few requests that its client library makes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """`requests` are what was asked: (method, file or 'info', bytes sent)."""

    url: str
    folders: dict[str, Path] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)  # files that cannot be had
    status: int = 0  # not 0: every answer is this error
    requests: list[tuple[str, str, int]] = field(default_factory=list)

    def sent(self, name: str) -> int:
        return sum(size for _, file, size in self.requests if file == name)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = self.path.split("?")[0]
        if self.hub.status:
            self._error(self.hub.status, "")
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            self._info(match[1], match[2])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(match[1], match[2], match[3])
        else:
            self._error(404, "")

    def _folder(self, repo: str, revision: str | None) -> Path | None:
        if repo in self.hub.gated:
            self._error(403, "GatedRepo")
        elif repo not in self.hub.folders:
            self._error(404, "RepoNotFound")
        elif revision not in (None, "main", COMMIT):
            self._error(404, "RevisionNotFound")
        else:
            return self.hub.folders[repo]
        return None

    def _info(self, repo: str, revision: str | None) -> None:
        folder = self._folder(repo, revision)
        if folder is None:
            return
        files = [{"rfilename": path.name, "size": path.stat().st_size} for path in sorted(folder.iterdir())]
        about = {"id": repo, "sha": COMMIT, "siblings": files, "private": False, "tags": []}
        body = json.dumps(about).encode()
        self._send(200, body, "info", {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str) -> None:
        folder = self._folder(repo, revision)
        if folder is None:
            return
        path = folder / name
        if not path.is_file():
            self._error(404, "EntryNotFound")
            return
        data = path.read_bytes()
        if name in self.hub.refused:
            self._error(403, "")
            return
        headers = {
            "ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
        }
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            start, end = int(wanted[1]), min(int(wanted[2] or len(data) - 1), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            self._send(206, data[start : end + 1], name, headers)
        else:
            self._send(200, data, name, headers)

    def _error(self, status: int, code: str) -> None:
        self._send(status, b"", "error", {"X-Error-Code": code} if code else {})

    def _send(self, status: int, body: bytes, name: str, headers: dict[str, str]) -> None:
        self.hub.requests.append((self.command, name, 0 if self.command == "HEAD" else len(body)))
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):
                self.wfile.write(body)


@contextlib.contextmanager
def serve() -> Iterator[FakeHub]:
    """A hub on a free loopback port, until the block ends."""
    hub = FakeHub("")
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A hub that this process and its children use, with empty caches."""
    from huggingface_hub import constants

    with serve() as served:
        for name, value in {
            "HF_ENDPOINT": served.url,
            "HF_HOME": str(tmp_path / "hf"),
            "XDG_CACHE_HOME": str(tmp_path / "cache"),
            "HF_HUB_DISABLE_XET": "1",
        }.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):  # a tokenizer of another test sets them
            monkeypatch.delenv(name, raising=False)
        # The library reads its environment when it is imported.
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", served.url)
        template = served.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        yield served


@pytest.fixture
def sharded_model(tmp_path: Path, tiny_llama: Path) -> Path:
    """The tiny llama in a file per two layers and one for the rest, as large models come."""
    from safetensors.numpy import load_file, save_file

    folder = tmp_path / "on-the-hub"
    folder.mkdir()
    for path in tiny_llama.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "modeling_llama.py").write_text("raise SystemExit('foreign code ran')")
    files: dict[str, dict[str, object]] = {}
    for name, array in load_file(tiny_llama / "model.safetensors").items():
        match = re.match(r"model\.layers\.(\d+)\.", name)
        part = int(match[1]) // 2 + 1 if match else 4
        files.setdefault(f"model-0000{part}-of-00004.safetensors", {})[name] = array
    for file, tensors in files.items():
        save_file(tensors, folder / file, metadata={"format": "mlx"})  # type: ignore[arg-type]
    index = {name: file for file, tensors in files.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return folder
