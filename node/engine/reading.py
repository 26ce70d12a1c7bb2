"""How parameters become real: read from the files, or only noted, to know which bytes a rank would read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_mesh.mesh.spans import Span, merge
from mlx_mesh.mesh.tensor_units import Range
from mlx_mesh.node.engine.loader import LazyModel, RangeReader, StoredTensor, read_spans
from mlx_mesh.node.engine.probe import take_ranges
from mlx_mesh.node.engine.sources import Sources


class Reading:
    """Reads. Use it in a `with` block."""

    def __init__(self) -> None:
        self._reader = RangeReader()

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    def evaluate(self, arrays: Sequence[Any]) -> None:
        mx.eval(list(arrays))
        mx.clear_cache()

    def slice(self, stored: StoredTensor | None, array: Any, axis: int, ranges: Sequence[Range]) -> Any:
        """The given ranges of an array, joined. `stored`: where it lies, if it is a tensor as it is."""
        if stored is not None:
            return self._reader.read(stored, axis, ranges)
        part = mx.contiguous(take_ranges(array, axis, ranges))
        mx.eval(part)
        return part


class Noting(Reading):
    """Reads nothing, and notes what would be read of a model that was opened with `keep_given`."""

    def __init__(self, lazy: LazyModel) -> None:
        super().__init__()
        self._lazy = lazy
        self._spans: dict[Path, list[Span]] = {}
        self._wanted: list[Any] = []
        self._sliced: list[Any] = []  # the arrays themselves: an id is only good while its object lives

    def evaluate(self, arrays: Sequence[Any]) -> None:
        sliced = {id(array) for array in self._sliced}
        self._wanted += [array for array in arrays if id(array) not in sliced]

    def slice(self, stored: StoredTensor | None, array: Any, axis: int, ranges: Sequence[Range]) -> Any:
        if stored is not None:
            self._spans.setdefault(stored.path, []).extend(read_spans(stored, axis, ranges))
        else:
            self._wanted.append(array)
        part = take_ranges(array, axis, ranges)
        self._sliced.append(part)
        return part

    def spans(self) -> dict[str, list[Span]]:
        """File name -> what would be read of it, headers included."""
        lazy = self._lazy
        sources = Sources(lazy.given)
        for name in sources.of(self._wanted) | sources.read_already:
            tensor = lazy.tensors.get(name)
            if tensor is not None and tensor.num_bytes:
                span = (tensor.offset, tensor.offset + tensor.num_bytes)
                self._spans.setdefault(tensor.path, []).append(span)
        for path, size in lazy.header_sizes.items():
            self._spans.setdefault(path, []).append((0, size))
        return {path.name: merge(spans) for path, spans in self._spans.items()}
