"""Models on the Hugging Face hub: sizes without weights, and only the files that a rank needs.

Hub ids may carry a revision: `org/name@revision`. With HF_HUB_OFFLINE set, or for files that are all in the
local cache, nothing goes over the network. No code from a repository is fetched or run.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import re
import shutil
import socket
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from mlx_mesh.mesh.errors import PreflightError
from mlx_mesh.node.hub_folder import (
    MAX_HEADER_BYTES,
    RECORD_NAME,
    HubFolder,
    files_of_layers,
    is_placeholder,
    put_file,
    read_record,
    tensor_names,
    write_placeholder,
)

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
SMALL_FILES = re.compile(r"[^/]+\.(json|jsonl|txt|jinja|model|tiktoken)")  # no *.py: no foreign code
WEIGHTS = re.compile(r"model[^/]*\.safetensors")
_INDEX = "model.safetensors.index.json"
_FIRST_READ_BYTES = 256 * 1024
_TIMEOUT_S = 30.0
_TICK_S = 1.0
_NUM_PARALLEL = 8
_SPARE_BYTES = 512 * 1024**2  # stays free on the disk

OnBytes = Callable[[int, int], None]
"""Bytes that have come so far, of how many."""


def parse_hub_id(model: str) -> tuple[str, str] | None:
    """Repository and revision ('' = the default branch); None when `model` is no hub id."""
    match = _HUB_ID.fullmatch(model)
    return (match["repo"], match["revision"] or "") if match else None


def is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def cache_root() -> Path:
    """Where mlx-mesh keeps what it can make again."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "mlx-mesh"


def locate(repo: str, revision: str = "") -> Path:
    """A folder of that model: the complete one of the hub's cache, or one with placeholders for weight files.
    Raises PreflightError."""
    if (snapshot := _cached_snapshot(repo, revision)) is not None:
        return snapshot
    known = _known_folder(repo, revision)
    if known is not None and (is_offline() or _is_complete(known)):
        return known
    if is_offline():
        raise PreflightError(
            f"the model {_named(repo, revision)} is not (or not completely) in the hub cache of "
            f"{socket.gethostname()}, and HF_HUB_OFFLINE or --offline forbids to ask the hub. Fetch it there "
            f"first: hf download {repo}{f' --revision {revision}' if revision else ''}"
        )
    with _hub_errors(repo, revision):
        return _make_folder(repo, revision)


def fetch_for_layers(folder: Path, num_layers: int, start: int, end: int, on_bytes: OnBytes) -> None:
    """Make the files real that layers [start, end) of `num_layers` need. An ordinary folder: nothing to do.
    Raises PreflightError; a disk that is too small is told before anything is fetched."""
    record = read_record(folder)
    if record is None:
        return
    names = {file: tensor_names(folder / file) for file in record.files}
    needed = files_of_layers(names, num_layers, start, end)
    missing = [file for file in needed if is_placeholder(folder / file)]
    if missing:
        _fetch(folder, record, missing, on_bytes)


def fetch_all(folder: Path, on_bytes: OnBytes) -> None:
    """Make all files real. An ordinary folder: nothing to do. Raises PreflightError."""
    record = read_record(folder)
    missing = [file for file in record.files if is_placeholder(folder / file)] if record is not None else []
    if record is not None and missing:
        _fetch(folder, record, missing, on_bytes)


def find_complete(repo: str, revision: str = "") -> Path | None:
    """A folder of that model with all of its weights, in the hub's cache or made by us; asks nobody."""
    if (snapshot := _cached_snapshot(repo, revision)) is not None:
        return snapshot
    known = _known_folder(repo, revision)
    return known if known is not None and _is_complete(known) else None


# ---------------------------------------------------------------- the folder


def _cached_snapshot(repo: str, revision: str) -> Path | None:
    """The hub cache's own folder, when all weight files of its index are there."""
    from huggingface_hub import try_to_load_from_cache  # slow to import, and most models are folders

    config = try_to_load_from_cache(repo, "config.json", revision=revision or None)
    if not isinstance(config, str):
        return None
    folder = Path(config).parent
    present = {path.name for path in folder.glob("model*.safetensors") if path.exists()}
    try:
        index = msgspec.json.decode((folder / _INDEX).read_bytes(), type=dict[str, msgspec.Raw])
        listed = set(msgspec.json.decode(index["weight_map"], type=dict[str, str]).values())
    except FileNotFoundError:
        listed = {"model.safetensors"}
    except (OSError, KeyError, msgspec.MsgspecError):
        return None
    return folder if listed <= present else None


def _known_folder(repo: str, revision: str) -> Path | None:
    """The folder that was made when the hub was last asked for this revision."""
    base = _folder_of(repo)
    try:
        folder = base / _ref(base, revision).read_text("utf-8").strip()
    except OSError:
        folder = base / (revision or "none")
    return folder if (folder / RECORD_NAME).is_file() else None


def _folder_of(repo: str) -> Path:
    return cache_root() / "models" / repo.replace("/", "--")


def _ref(base: Path, revision: str) -> Path:
    return base / "refs" / (revision or "main").replace("/", "--")


def _is_complete(folder: Path) -> bool:
    """No placeholder, and what its links point to is there."""
    record = read_record(folder)
    return record is not None and all(
        not is_placeholder(folder / name) and (folder / name).is_file() for name in record.files
    )


def _make_folder(repo: str, revision: str) -> Path:
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision or None, files_metadata=True, timeout=_TIMEOUT_S)
    commit = str(info.sha)
    sizes = {sibling.rfilename: int(sibling.size or 0) for sibling in info.siblings or []}
    weights = {name: size for name, size in sizes.items() if WEIGHTS.fullmatch(name)}
    if "config.json" not in sizes or not weights:
        what = "config.json" if "config.json" not in sizes else "model*.safetensors file"
        raise PreflightError(
            f"{_named(repo, revision)} on the hub has no {what}: it is no model that mlx-lm can load. Look "
            "for a version in the MLX or safetensors format."
        )
    folder = _folder_of(repo) / commit
    ref = _ref(folder.parent, revision)
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit, "utf-8")
    if (folder / RECORD_NAME).is_file() and all((folder / name).is_file() for name in weights):
        return folder
    shutil.rmtree(folder, ignore_errors=True)  # the hub's cache was emptied under it
    making = Path(tempfile.mkdtemp(prefix=".making-", dir=folder.parent))
    try:
        with concurrent.futures.ThreadPoolExecutor(_NUM_PARALLEL) as pool:
            work = [
                pool.submit(_add_small, making, repo, commit, name)
                for name in sizes
                if SMALL_FILES.fullmatch(name)
            ]
            work += [
                pool.submit(_add_weights, making, repo, commit, name, size) for name, size in weights.items()
            ]
            for item in concurrent.futures.as_completed(work):
                item.result()
        record = HubFolder(repo=repo, commit=commit, files=weights)
        (making / RECORD_NAME).write_bytes(msgspec.json.encode(record))
        with contextlib.suppress(OSError):  # another process was faster
            making.rename(folder)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return folder


def _add_small(folder: Path, repo: str, commit: str, name: str) -> None:
    from huggingface_hub import hf_hub_download

    put_file(folder, name, Path(hf_hub_download(repo, name, revision=commit)))


def _add_weights(folder: Path, repo: str, commit: str, name: str, size: int) -> None:
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repo, name, revision=commit)
    if isinstance(cached, str):
        put_file(folder, name, Path(cached))
    else:
        write_placeholder(folder / name, _read_header(repo, commit, name, size), size)


def _read_header(repo: str, commit: str, name: str, size: int) -> bytes:
    """The beginning of a safetensors file, by range requests."""
    data = _read_range(repo, commit, name, 0, min(size, _FIRST_READ_BYTES))
    if len(data) < 8:
        raise PreflightError(f"{repo}: {name} has {size} bytes and is no safetensors file.")
    length = 8 + int(struct.unpack("<Q", data[:8])[0])
    if length > min(size, MAX_HEADER_BYTES):
        raise PreflightError(f"{repo}: {name} claims a header of {length} bytes; it is no safetensors file.")
    if len(data) < length:
        data += _read_range(repo, commit, name, len(data), length)
    return data[:length]


def _read_range(repo: str, commit: str, name: str, start: int, end: int) -> bytes:
    """Bytes [start, end). A server that ignores the range is not read further."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    headers = {**build_hf_headers(), "Range": f"bytes={start}-{end - 1}"}
    session: Any = get_session()
    url = hf_hub_url(repo, name, revision=commit)
    found = bytearray()
    with session.stream("GET", url, headers=headers, follow_redirects=True, timeout=_TIMEOUT_S) as response:
        hf_raise_for_status(response)
        skip = 0 if response.status_code == 206 else start
        for chunk in response.iter_bytes():
            found += chunk
            if len(found) >= skip + end - start:
                break
        return bytes(found[skip : skip + end - start])


# ---------------------------------------------------------------- fetching


def _fetch(folder: Path, record: HubFolder, files: Sequence[str], on_bytes: OnBytes) -> None:
    from huggingface_hub import constants

    total = sum(record.files[name] for name in files)
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    if total + _SPARE_BYTES > free:
        raise PreflightError(
            f"{len(files)} files of {record.repo} with {_gb(total)} are needed on {socket.gethostname()}, "
            f"and the disk of {cache} has {_gb(free)} free: {_gb(total + _SPARE_BYTES - free)} are missing. "
            "Free some, or set HF_HOME to a folder on a larger disk."
        )
    if is_offline():
        raise PreflightError(
            f"{len(files)} files of {record.repo} ({', '.join(files[:3])}) are not on "
            f"{socket.gethostname()}, and HF_HUB_OFFLINE or --offline forbids to fetch them."
        )
    with _hub_errors(record.repo, record.commit):
        done = 0

        def on_file(here: int) -> None:
            on_bytes(done + here, total)

        for name in files:
            put_file(folder, name, _download(record, name, on_file))
            done += record.files[name]
            on_bytes(done, total)


def _download(record: HubFolder, name: str, on_bytes: Callable[[int], None]) -> Path:
    """One file into the hub's cache. `on_bytes` is told now and then, but only when more has come, so that a
    stalled download is one that says nothing."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    lock, come = threading.Lock(), 0

    class Counter(tqdm):
        """Shows nothing and counts."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool | None:
            nonlocal come
            with lock:
                come += int(n or 0)
            return None

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        work = pool.submit(hf_hub_download, record.repo, name, revision=record.commit, tqdm_class=Counter)
        told = 0
        while True:
            finished, _ = concurrent.futures.wait([work], timeout=_TICK_S)
            if finished:
                return Path(work.result())
            if come > told:
                told = come
                on_bytes(told)


# ---------------------------------------------------------------- errors


@contextlib.contextmanager
def _hub_errors(repo: str, revision: str) -> Iterator[None]:
    """Whatever the hub's library raises, as one PreflightError in words."""
    from huggingface_hub import errors

    named = _named(repo, revision)
    try:
        yield
    except PreflightError:
        raise
    except errors.GatedRepoError as error:
        raise PreflightError(
            f"{named} is gated: its owner wants to be asked first. Accept the terms on its page on the hub, "
            "then log in on this host with `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise PreflightError(
            f"{repo} has no revision {revision!r} on the hub. Check it on its page."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise PreflightError(
            f"the hub has no model {repo}, or it is private and this host is not logged in "
            "(`hf auth login`). Check the spelling."
        ) from error
    except errors.LocalEntryNotFoundError as error:  # it asked, nobody answered, and there is no copy
        raise PreflightError(_no_network(named, error)) from error
    except errors.EntryNotFoundError as error:
        raise PreflightError(f"a file of {named} is not on the hub: {error}") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise PreflightError(f"the hub answered {status} for {named}: {_line(error)}. Try again.") from error
    except OSError as error:
        if shutil.disk_usage(_existing(cache_root())).free < 1024**2:
            raise PreflightError(f"the disk of {cache_root()} is full ({error}).") from error
        raise PreflightError(_no_network(named, error)) from error
    except Exception as error:  # the transport's own exceptions share no base with anything of ours
        raise PreflightError(_no_network(named, error)) from error


def _existing(path: Path) -> Path:
    return next(parent for parent in (path, *path.parents) if parent.exists())


def _no_network(named: str, error: Exception) -> str:
    return (
        f"the hub cannot be reached from {socket.gethostname()} for {named} ({type(error).__name__}: "
        f"{_line(error)}). Check the network, or copy the model folder there and name it."
    )


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".")


def _named(repo: str, revision: str) -> str:
    return f"{repo}@{revision}" if revision else repo


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.1f} GB"
