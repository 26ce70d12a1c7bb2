"""Which stored tensors a lazy array would read, by the graph that MLX keeps of it. Nothing is evaluated."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from typing import Any

import mlx.core as mx

_NUM_AT_ONCE = 900  # keyword arguments of one call
_EDGE = re.compile(r'^("?\w+"?) -> ("?\w+"?)$')


class Sources:
    """Of the tensors `given` (name -> array as it came from the files). They must not be evaluated later."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._readers: dict[str, str] = {}  # what reads a tensor, by MLX's name for it -> the tensor's name
        names = list(given)
        loose = set(names)
        for first in range(0, len(names), _NUM_AT_ONCE):
            some = names[first : first + _NUM_AT_ONCE]
            for source, target in _edges({f"g{i}": given[name] for i, name in enumerate(some)}):
                if target.startswith('"g'):
                    name = some[int(target[2:-1])]
                    self._readers[source] = name
                    loose.discard(name)
        self.read_already = loose
        """Tensors that were evaluated while the model was built: whoever builds it reads them."""

    def of(self, arrays: Sequence[Any]) -> set[str]:
        """The names of all tensors that evaluating these arrays would read."""
        found: set[str] = set()
        for first in range(0, len(arrays), _NUM_AT_ONCE):
            some = arrays[first : first + _NUM_AT_ONCE]
            for source, _ in _edges({f"a{i}": array for i, array in enumerate(some)}):
                if source in self._readers:
                    found.add(self._readers[source])
        return found


def _edges(arrays: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Of the graph of everything that these named arrays depend on. An array given twice has one name."""
    unique = {id(array): (name, array) for name, array in arrays.items()}
    text = io.StringIO()
    mx.export_to_dot(text, **dict(unique.values()))
    matches = (_EDGE.match(line) for line in text.getvalue().splitlines())
    return [(match[1], match[2]) for match in matches if match]
