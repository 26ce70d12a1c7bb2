"""Kept prefixes of one rank in files, which outlive the process: one safetensors file for each.

A name says for what a file is right (model files, split, rank, form of the cache, versions) and of which
tokens it is. A file is complete or not there: it is written beside its place and moved, and its data has a
checksum. Whatever is wrong with one makes it a miss that is said in the log.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mesh.node.engine.exchange import Array
from mlx_mesh.node.engine.prefix_store import Cache, leaves
from mlx_mesh.node.engine.row_media import RowMedia

FORMAT = "1"
"""Changes with whatever makes old files wrong."""

FAREWELL_S = 5.0
"""From the stop plan until files that are under way are written; one that is not is lost."""

MAX_QUEUED = 8
MAX_FAILURES = 2
"""After so many failures in a row nothing is written any more."""

_DTYPES = {
    mx.float32: "F32",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int64: "I64",
    mx.bool_: "BOOL",
}


class UnusableFile(Exception):
    """What is wrong with a file, in words."""


@dataclass(frozen=True, slots=True)
class Packed:
    """A cache as forms, in JSON, and the arrays that these number."""

    forms: list[Any]
    arrays: list[Array]
    dtypes: list[str]


def pack(cache: Cache) -> Packed:
    """A row's cache for a file. Arrays are lazy copies in the bytes that are to be written."""
    arrays: list[Array] = []
    dtypes: list[str] = []

    def form(value: Any) -> Any:
        if isinstance(value, mx.array):
            if value.dtype not in _DTYPES:
                raise UnusableFile(f"a cache keeps numbers of type {value.dtype}, which no file can")
            dtypes.append(_DTYPES[value.dtype])
            whole = mx.contiguous(value)
            arrays.append(whole.view(mx.uint16) if value.dtype.size == 2 else whole)  # bytes are bytes
            return {"array": len(arrays) - 1}
        if isinstance(value, (tuple, list)):
            return {type(value).__name__: [form(item) for item in value]}
        if value is None or isinstance(value, (bool, int, float, str)):
            return {"value": value}
        raise UnusableFile(f"a cache keeps a {type(value).__name__}, which no file can")

    forms = []
    for _, leaf in leaves(cache):
        if getattr(leaf, "start_position", 0):
            raise UnusableFile("a cache has only the last chunk of its prefix, which no file can")
        if getattr(leaf, "keys", None) is not None and hasattr(leaf, "keys_and_values"):
            leaf.keys, leaf.values = leaf.keys_and_values()  # without room to grow
        more = getattr(leaf, "meta_state", "")  # mlx-vlm's caches keep lengths there, mlx-lm's in `state`
        forms.append([type(leaf).__name__, form(leaf.state), *([form(more)] if more else [])])
    return Packed(forms, arrays, dtypes)


def unpack(forms: Sequence[Any], arrays: dict[str, Any], fresh: Cache, num_tokens: int) -> Cache:
    """`fresh`, an empty cache of the model, filled with that of `num_tokens`. Raises UnusableFile when it is
    of another kind."""

    def value(form: Any) -> Any:
        ((kind, content),) = form.items()
        match kind:
            case "array":
                return arrays[str(content)]
            case "tuple":
                return tuple(value(item) for item in content)
            case "list":
                return [value(item) for item in content]
            case _:
                return content

    empty = [leaf for _, leaf in leaves(fresh)]
    if [name for name, *_ in forms] != [type(leaf).__name__ for leaf in empty]:
        raise UnusableFile("it is of other kinds of caches")
    for leaf, (_, form, *more) in zip(empty, forms, strict=True):
        if bool(getattr(leaf, "meta_state", "")) != bool(more):
            raise UnusableFile("it does not say how long its caches are")
        leaf.state = value(form)
        if more:
            leaf.meta_state = value(more[0])
    if isinstance(fresh[-1], RowMedia):  # what it knows is no array
        fresh[-1].num_tokens = [num_tokens]
    return fresh


def key_of(tokens: Iterable[int]) -> str:
    """The same on all ranks."""
    return hashlib.blake2b(array("I", tokens).tobytes(), digest_size=16).hexdigest()


def identity_of(model: str, adapter: str, *other: object) -> str:
    """Changes with the folders of model and adapter, with any of their files (name, size, time of its last
    change) and with `other`. Sizes and times alone are not enough: fine-tunes of one model have files of the
    same sizes, and some tools give all files the same time."""
    seen: list[Any] = [FORMAT, *map(repr, other)]
    for folder in filter(None, (model, adapter)):
        place = Path(folder).expanduser().resolve()
        seen.append(str(place))
        for path in sorted(place.glob("*")):
            if path.suffix in (".safetensors", ".json") and path.is_file():
                status = path.stat()
                seen.append((path.name, status.st_size, status.st_mtime_ns))
    return hashlib.blake2b(json.dumps(seen).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True, slots=True)
class Loaded:
    """One file's content."""

    key: str
    tokens: tuple[int, ...]
    cache: Cache


@dataclass(frozen=True, slots=True)
class Job:
    """One file to write; its arrays are evaluated."""

    tokens: tuple[int, ...]
    packed: Packed


class PrefixFolder:
    """The files of one rank in a folder that ranks of one host, and meshes, may share."""

    def __init__(self, folder: Path, identity: str, rank: int, limit_bytes: int) -> None:
        """`limit_bytes`: of all files of this rank, whatever they are right for."""
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._of_rank = f"r{rank}-"
        self._prefix = f"{self._of_rank}{identity}-"

    def touch(self, key: str) -> bool:
        """It was used. False: there is no such file."""
        try:
            os.utime(self._path(key))
        except OSError:
            return False
        return True

    def load(
        self, new_cache: Callable[[], Cache], limit_bytes: int, on_file: Callable[[], None] = lambda: None
    ) -> list[Loaded]:
        """What can be used now, most recently used first, up to so many bytes. `on_file`: one more was
        read, or found to be of no use."""
        found: list[Loaded] = []
        for path in self._files(self._prefix):
            try:
                size = path.stat().st_size
                if size > limit_bytes:
                    break
                found.append(self._read(path, new_cache()))
                limit_bytes -= size
            except (OSError, UnusableFile, ValueError, KeyError, TypeError, RuntimeError) as error:
                say(f"{path} cannot be used, and is removed: {error}")
                path.unlink(missing_ok=True)
            on_file()
        return found

    def write(self, job: Job) -> None:
        """Raises OSError."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        parts = [memoryview(one).cast("B") if one.size else memoryview(b"") for one in job.packed.arrays]
        checksum, header, end = hashlib.blake2b(digest_size=16), {}, 0
        for number, (one, dtype, part) in enumerate(
            zip(job.packed.arrays, job.packed.dtypes, parts, strict=True)
        ):
            checksum.update(part)
            offsets = [end, end + part.nbytes]
            header[str(number)] = {"dtype": dtype, "shape": list(one.shape), "data_offsets": offsets}
            end = offsets[1]
        metadata = {
            "tokens": json.dumps(job.tokens),
            "forms": json.dumps(job.packed.forms),
            "checksum": checksum.hexdigest(),
        }
        text = json.dumps({"__metadata__": metadata, **header}).encode()
        text += b" " * (-len(text) % 8)
        path = self._path(key_of(job.tokens))
        beside = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            beside.touch(mode=0o600)  # prompts are nobody else's business
            with beside.open("wb") as file:
                file.write(len(text).to_bytes(8, "little") + text)
                for part in parts:
                    file.write(part)
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
        self._remove_oldest()

    def _read(self, path: Path, fresh: Cache) -> Loaded:
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        if not 0 < length <= len(raw) - 8:
            raise UnusableFile("it is cut off")
        metadata = json.loads(raw[8 : 8 + length])["__metadata__"]
        checksum = hashlib.blake2b(memoryview(raw)[8 + length :], digest_size=16).hexdigest()
        if checksum != metadata["checksum"]:
            raise UnusableFile("its data is not what was written")
        tokens = tuple(json.loads(metadata["tokens"]))
        if self._path(key_of(tokens)) != path:
            raise UnusableFile("it is of other tokens than its name says")
        arrays = mx.load(str(path), format="safetensors")
        mx.eval(arrays)
        return Loaded(
            key_of(tokens), tokens, unpack(json.loads(metadata["forms"]), arrays, fresh, len(tokens))
        )

    def _remove_oldest(self) -> None:
        total = 0
        for path in self._files(self._of_rank):
            total += path.stat().st_size
            if total > self._limit_bytes:
                path.unlink(missing_ok=True)

    def _files(self, prefix: str) -> list[Path]:
        """Most recently used first. Others' halves of an hour ago go."""
        files: list[tuple[int, Path]] = []
        for path in self._folder.glob(f"{prefix}*"):
            try:
                changed_ns = path.stat().st_mtime_ns
            except OSError:  # another process removed it
                continue
            if path.suffix == ".safetensors":
                files.append((changed_ns, path))
            elif time.time_ns() - changed_ns > 3600 * 10**9:
                path.unlink(missing_ok=True)
        return [path for _, path in sorted(files, reverse=True)]

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._prefix}{key}.safetensors"


class DiskWriter:
    """Writes files in a thread of its own; close it."""

    def __init__(self, folder: PrefixFolder) -> None:
        self.folder = folder
        self._jobs: queue.Queue[Job | None] = queue.Queue(MAX_QUEUED)
        self._num_failures = 0
        self._thread = threading.Thread(target=self._run, name="prefix files", daemon=True)
        self._thread.start()

    def write(self, job: Job) -> None:
        """Take a job; one too many is dropped and said."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            say(f"{MAX_QUEUED} prefixes wait to be written; one more is not kept on disk")

    def close(self) -> None:
        """Wait FAREWELL_S for what is under way."""
        try:
            self._jobs.put(None, timeout=FAREWELL_S)
        except queue.Full:
            return
        self._thread.join(FAREWELL_S)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if self._num_failures >= MAX_FAILURES:
                continue
            try:
                self.folder.write(job)
                self._num_failures = 0
            except Exception as error:  # whatever it is, it is one file's; answers need none
                self._num_failures += 1
                last = self._num_failures >= MAX_FAILURES
                more = "; no other will be tried" if last else ""
                say(f"a prefix cannot be written: {error or type(error).__name__}{more}")


def say(message: str) -> None:
    print(f"engine: prefix cache: {message}", file=sys.stderr, flush=True)
