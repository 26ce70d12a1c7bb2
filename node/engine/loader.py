"""Open a model folder without reading weights, then read exactly the bytes that a rank needs.

`open_lazy` builds mlx-lm's full model over lazy arrays: sizes and types come from the file headers.
`RangeReader` reads rows or columns of one stored tensor; mlx's own lazy load reads a tensor whole first.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import load_adapters

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.node.adapters import resolve_adapter
from mlx_mesh.node.engine.vision_model import load_vision
from mlx_mesh.node.vision import why_alone

_MAX_HEADER_BYTES = 256 * 1024 * 1024
_LONG_RUN_BYTES = 64 * 1024  # from here on one read per run beats reading whole rows and dropping most
_BLOCK_BYTES = 4 * 1024 * 1024

_DTYPES: dict[str, tuple[Any, Any]] = {  # safetensors name -> (numpy type of the same width, mlx type)
    "F64": (np.float64, mx.float64),
    "F32": (np.float32, mx.float32),
    "F16": (np.float16, mx.float16),
    "BF16": (np.uint16, mx.bfloat16),
    "I64": (np.int64, mx.int64),
    "I32": (np.int32, mx.int32),
    "I16": (np.int16, mx.int16),
    "I8": (np.int8, mx.int8),
    "U64": (np.uint64, mx.uint64),
    "U32": (np.uint32, mx.uint32),
    "U16": (np.uint16, mx.uint16),
    "U8": (np.uint8, mx.uint8),
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `offset` is its first byte in the file."""

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: str
    num_bytes: int = 0


@dataclass(slots=True)
class LazyModel:
    """A model none of whose weights has been read. `stored[p]` says where parameter path `p` lies, for
    those parameters that are a stored tensor as it is (not stacked, transposed or unpacked on the way).
    `whole`: of a vision model, the one with the towers; `model` is its language part."""

    folder: Path
    model: Any
    config: dict[str, Any]
    stored: dict[str, StoredTensor]
    whole: Any = None
    tensors: dict[str, StoredTensor] = field(default_factory=dict)  # all, by their names in the files
    given: dict[str, Any] = field(default_factory=dict)  # with `keep_given`: the same as lazy arrays

    @property
    def header_sizes(self) -> dict[Path, int]:
        """Of each weight file, the bytes before its tensors."""
        return {file: _header_size(file) for file in sorted(self.folder.glob("model*.safetensors"))}

    @property
    def layers(self) -> list[Any]:
        return list(self.model.layers)


def open_lazy(
    folder: str | Path, adapter: str | Path = "", *, with_vision: bool = False, keep_given: bool = False
) -> LazyModel:
    """Build the model of a local folder over lazy arrays; `adapter` is a folder as mlx-lm's LoRA and DoRA
    training writes it, '' none. `with_vision`: build mlx-vlm's model, with its towers, instead of mlx-lm's.
    `keep_given`: for one that is only looked at; evaluated tensors would stay in memory beside what is made
    of them. Raises SettingsError when a folder is no model that the library knows, would need code of its
    own, or is no adapter of this model."""
    path = Path(folder).expanduser()
    _check_folder(path)
    tensors = read_headers(path)
    if with_vision:
        return _open_vision(path, str(adapter))
    given: dict[str, Any] = {}
    original: list[type] = []

    def recording_classes(config: dict[str, Any]) -> tuple[type, type]:
        model_class, args_class = mlx_lm.utils._get_classes(config)
        original.append(model_class)
        base: Any = model_class

        class Recording(base):  # type: ignore[misc]
            """Sees the tensors as they are named in the files, before the model's own renaming."""

            def sanitize(self, weights: dict[str, Any]) -> dict[str, Any]:
                given.update(weights)
                inherited = getattr(super(), "sanitize", None)
                return weights if inherited is None else dict(inherited(weights))

        return Recording, args_class

    try:
        model, config = mlx_lm.utils.load_model(path, lazy=True, get_model_classes=recording_classes)
    except FileNotFoundError as error:
        raise SettingsError(f"{path}: {error}. Copy the complete model folder to this host.") from error
    except (ValueError, TypeError, KeyError, AttributeError, NotImplementedError, RuntimeError) as error:
        message = str(error).strip().splitlines() or [type(error).__name__]
        raise SettingsError(
            f"{path}: mlx-lm cannot build this model: {message[0].rstrip('.')}. "
            "Check that config.json and the weight files belong together, and that mlx-lm knows the type."
        ) from error
    model.__class__ = original[0]
    if adapter:
        _add_adapter(model, resolve_adapter(str(adapter)))
    names = {id(array): name for name, array in given.items()}
    stored: dict[str, StoredTensor] = {}
    for parameter, array in tree_flatten(model.parameters()):
        tensor = tensors.get(names.get(id(array), ""))
        if tensor is not None and _same(tensor, array):
            stored[parameter] = tensor
    kept = given if keep_given else {}
    return LazyModel(path, model, config, stored, tensors=tensors, given=kept)


def _open_vision(path: Path, adapter: str) -> LazyModel:
    from mlx_mesh.node.engine.language_part import LanguagePart

    if adapter:
        raise SettingsError(
            f"{adapter} is an adapter of a text model; {path} is served with its vision tower. Merge the "
            "adapter into the model, or add --no-vision."
        )
    whole, config = load_vision(path)
    part = LanguagePart(whole.language_model, is_for_one_row=bool(why_alone(config)))
    return LazyModel(path, part, config, {}, whole)


def _add_adapter(model: Any, path: Path) -> None:
    try:
        load_adapters(model, str(path))
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise SettingsError(f"{path} is no adapter of this model: {_misfit(str(error))}") from error
    model.eval()  # new layers come in training mode, with dropout


def _misfit(text: str) -> str:
    """mlx-lm's complaint in one line: what it has against each tensor comes in a line of its own."""
    first, *tensors = [" ".join(line.split()) for line in text.splitlines()] or [""]
    if not tensors:
        return f"{first}."
    more = f"; and {len(tensors) - 1} more tensors" if len(tensors) > 1 else ""
    return f"{tensors[0]}{more}. Use the model that it was trained on."


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise SettingsError(f"{path} is not a folder on this host. Give the model's folder, or copy it here.")
    if not (path / "config.json").is_file():
        raise SettingsError(f"{path} has no config.json, so it is not a model folder.")
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SettingsError(f"{path / 'config.json'} cannot be read as JSON: {error}") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise SettingsError(f"{path / 'config.json'} has no model_type.")
    for key in ("num_hidden_layers", "hidden_size", "vocab_size"):
        value = config.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise SettingsError(
                f"{path / 'config.json'} says `{key}: {str(value)[:40]}`, which must be a whole number of at "
                "least 1. Copy the model's own config.json again."
            )
    if config.get("model_file"):
        raise SettingsError(
            f"{path} wants to run its own code ({config['model_file']}). mlx-mesh runs no code from model "
            "folders; use a model of an architecture that mlx-lm has."
        )
    if not any(path.glob("model*.safetensors")):
        raise SettingsError(f"{path} has no model*.safetensors file. Download or copy the weights.")


def read_headers(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of the folder's weight files, by name; reads headers only."""
    tensors: dict[str, StoredTensor] = {}
    for file in sorted(path.glob("model*.safetensors")):
        try:
            with file.open("rb") as stream:
                start_of_file = stream.read(8)
                if len(start_of_file) < 8:
                    raise ValueError(f"it has only {len(start_of_file)} bytes; download or copy it again")
                (length,) = struct.unpack("<Q", start_of_file)
                if length > _MAX_HEADER_BYTES:
                    raise ValueError(f"its header claims {length} bytes")
                header = json.loads(stream.read(length))
        except (OSError, ValueError, struct.error) as error:
            raise SettingsError(f"{file} is not a usable safetensors file: {error}") from error
        size = file.stat().st_size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            start, end = entry["data_offsets"]
            if 8 + length + end > size:
                raise SettingsError(
                    f"{file} ends early: {name} should reach byte {8 + length + end}, the file has {size}. "
                    "Download or copy it again."
                )
            tensors[name] = StoredTensor(
                file, 8 + length + start, tuple(entry["shape"]), entry["dtype"], end - start
            )
    return tensors


def _header_size(file: Path) -> int:
    with file.open("rb") as stream:
        return 8 + int(struct.unpack("<Q", stream.read(8))[0])


def _same(tensor: StoredTensor, array: Any) -> bool:
    known = _DTYPES.get(tensor.dtype)
    return known is not None and known[1] == array.dtype and tensor.shape == tuple(array.shape)


def read_spans(tensor: StoredTensor, axis: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The bytes of its file that RangeReader reads for these ranges, as [start, end)."""
    spans = [(start, stop) for start, stop in ranges if stop > start]
    outer, inner, row = _rows(tensor, axis % len(tensor.shape))
    if not spans:
        return []
    if not _by_run(spans, outer, inner):
        return [(tensor.offset, tensor.offset + outer * row)]
    return [
        (tensor.offset + i * row + start * inner, tensor.offset + i * row + stop * inner)
        for i in range(outer)
        for start, stop in spans
    ]


def _rows(tensor: StoredTensor, axis: int) -> tuple[int, int, int]:
    """How many rows lie behind each other, the bytes of one element of the axis, and those of a row."""
    itemsize = np.dtype(_DTYPES[tensor.dtype][0]).itemsize
    inner = int(np.prod(tensor.shape[axis + 1 :], dtype=np.int64)) * itemsize
    return int(np.prod(tensor.shape[:axis], dtype=np.int64)), inner, tensor.shape[axis] * inner


def _by_run(spans: list[tuple[int, int]], outer: int, inner: int) -> bool:
    """Whether each run is read by itself; else whole rows, most of which is dropped."""
    return outer == 1 or min((stop - start) * inner for start, stop in spans) >= _LONG_RUN_BYTES


@dataclass(slots=True)
class RangeReader:
    """Reads parts of stored tensors. `bytes_kept` counts what it returned, `bytes_read` what it asked the
    file for. Close it, or use it in a `with` block."""

    bytes_read: int = 0
    bytes_kept: int = 0
    _files: dict[Path, int] = field(default_factory=dict)

    def __enter__(self) -> RangeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def read(self, tensor: StoredTensor, axis: int, ranges: Iterable[tuple[int, int]]) -> Any:
        """The given [start, stop) ranges along `axis`, joined in order, as an evaluated mlx array."""
        spans = [(start, stop) for start, stop in ranges if stop > start]
        axis %= len(tensor.shape)
        for start, stop in spans:
            if start < 0 or stop > tensor.shape[axis]:
                raise ValueError(f"range {start}:{stop} outside axis {axis} of {tensor.shape}")
        np_type, mx_type = _DTYPES[tensor.dtype]
        outer, inner, row = _rows(tensor, axis)
        taken = sum(stop - start for start, stop in spans)
        out = np.empty((outer, taken * inner), dtype=np.uint8)
        fd = self._open(tensor.path)
        if _by_run(spans, outer, inner):
            for i in range(outer):
                at = 0
                for start, stop in spans:
                    length = (stop - start) * inner
                    self._fill(fd, out[i, at : at + length], tensor.offset + i * row + start * inner)
                    at += length
        else:
            num_rows = max(1, _BLOCK_BYTES // row)
            block = np.empty((min(num_rows, outer), row), dtype=np.uint8)
            for first in range(0, outer, num_rows):
                rows = min(num_rows, outer - first)
                self._fill(fd, block[:rows].reshape(-1), tensor.offset + first * row)
                at = 0
                for start, stop in spans:
                    length = (stop - start) * inner
                    out[first : first + rows, at : at + length] = block[:rows, start * inner : stop * inner]
                    at += length
        self.bytes_kept += out.nbytes
        shape = (*tensor.shape[:axis], taken, *tensor.shape[axis + 1 :])
        array = mx.array(out.view(np_type).reshape(shape))
        return array if array.dtype == mx_type else array.view(mx_type)

    def _open(self, path: Path) -> int:
        if path not in self._files:
            self._files[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._files[path]

    def _fill(self, fd: int, target: Any, offset: int) -> None:
        view = memoryview(target)
        done = 0
        while done < len(view):
            got = os.preadv(fd, [view[done:]], offset + done)
            if got <= 0:
                raise SettingsError("A weight file became shorter while it was read. Copy the model again.")
            done += got
        self.bytes_read += done
