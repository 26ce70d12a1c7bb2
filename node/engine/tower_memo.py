"""What towers made of pictures and audio, so that the next question about them costs no pass.

Known by the content of everything that the tower is given, so nothing else can be taken for it; where that
is more than arrays and plain values, nothing is kept. What it gives is handed out as new array objects:
models change arrays in place.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_flatten

from mlx_mesh.mesh.kv_budget import MEDIA_BYTES
from mlx_mesh.node.engine.hooks import Original, hook_model

_AUDIO_NAMES = ("audio", "sound")
"""In the names of parts that are for audio."""


class TowerMemo:
    """Around the largest part of a model for pictures, and the largest one for audio."""

    def __init__(self, whole: Any, limit_bytes: int = MEDIA_BYTES) -> None:
        """`limit_bytes`: of all that is kept; the least recently used go first."""
        self._limit_bytes = limit_bytes
        self._kept: OrderedDict[bytes, tuple[Any, int]] = OrderedDict()
        self.num_bytes = 0
        self.num_passes = 0
        for number, tower in enumerate(_towers_of(whole)):
            hook_model(tower, [], _Tower(self, number))

    def call(self, number: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Stands in for a tower's own call."""
        key = _key_of((number, args, kwargs))
        if key is not None and key in self._kept:
            self._kept.move_to_end(key)
            return _again(self._kept[key][0])
        self.num_passes += 1
        made = original(*args, **kwargs)
        arrays = _arrays_of(made)
        if key is None or arrays is None:
            return made
        mx.eval(arrays)
        size = sum(int(array.nbytes) for array in arrays)
        if size <= self._limit_bytes:
            self._kept[key] = (_again(made), size)
            self.num_bytes += size
            while self.num_bytes > self._limit_bytes:
                self.num_bytes -= self._kept.popitem(last=False)[1][1]
        return made


@dataclass(frozen=True, slots=True)
class _Tower:
    memo: TowerMemo
    number: int

    def call_model(self, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.memo.call(self.number, original, args, kwargs)

    def call_layer(
        self, index: int, original: Original, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """No layer of the tower is hooked."""
        raise AssertionError(f"layer {index} of a tower was hooked")


def _towers_of(whole: Any) -> list[Any]:
    def size(module: Any) -> int:
        return sum(int(array.nbytes) for _, array in tree_flatten(module.parameters()))

    owner = next((part for part in whole.children().values() if hasattr(part, "language_model")), whole)
    groups: dict[bool, list[Any]] = {False: [], True: []}
    for name, part in owner.children().items():
        if name != "language_model" and hasattr(part, "parameters") and callable(part):
            groups[any(word in name for word in _AUDIO_NAMES)].append(part)
    return [max(parts, key=size) for parts in groups.values() if parts]


def _key_of(value: Any) -> bytes | None:
    """A digest of everything in the arguments of a call; None when some of it has no content to go by."""
    digest = hashlib.blake2b(digest_size=16)

    def add(part: Any) -> None:
        if isinstance(part, mx.array):
            plain = part.view(mx.uint16) if part.dtype == mx.bfloat16 else part
            digest.update(f"array{part.shape}{part.dtype}".encode())
            digest.update(np.array(plain).tobytes())
        elif isinstance(part, np.ndarray):
            digest.update(f"numpy{part.shape}{part.dtype}".encode())
            digest.update(part.tobytes())
        elif isinstance(part, (list, tuple)):
            digest.update(b"%d(" % len(part))
            for item in part:
                add(item)
        elif isinstance(part, dict):
            for name in sorted(part):
                digest.update(f"{name}=".encode())
                add(part[name])
        elif isinstance(part, _PLAIN):
            digest.update(f"{type(part).__name__} {part!r};".encode())
        else:
            raise _NoContent

    try:
        add(value)
    except _NoContent:
        return None
    return digest.digest()


_PLAIN = (str, bytes, bool, int, float, np.generic, mx.Dtype, type(None))


class _NoContent(Exception):
    """Of an object that equal ones cannot be told by."""


def _arrays_of(value: Any) -> list[Any] | None:
    """All arrays of a result; None when it is more than arrays, so that its size is not known."""
    if isinstance(value, mx.array):
        return [value]
    if isinstance(value, (list, tuple)):
        parts = [_arrays_of(item) for item in value]
        return None if None in parts else [array for part in parts for array in part or ()]
    return [] if isinstance(value, _PLAIN) else None


def _again(value: Any) -> Any:
    """The same values in other objects."""
    if isinstance(value, mx.array):
        return mx.stop_gradient(value)
    if isinstance(value, (list, tuple)):
        items = [_again(item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
