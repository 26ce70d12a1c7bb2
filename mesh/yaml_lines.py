"""YAML and JSON text to plain data, with the line of every key and value. PyYAML's loader forgets lines and
takes the last of two equal keys silently; this one does neither."""

from __future__ import annotations

import json
from typing import Any

import yaml

Place = tuple[int | str, ...]

_MAX_NODES = 20_000  # a hostfile has hundreds; aliases of aliases could make millions
_MAX_DEPTH = 32


class YamlError(ValueError):
    """The text is not readable; `line` is 1-based."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class Lines:
    """The 1-based line of each place in the data. A place is a tuple of keys and indexes."""

    def __init__(self, of: dict[Place, int], prefix: Place = ()) -> None:
        self._of = of
        self._prefix = prefix

    def of(self, where: Place) -> int:
        """The line of `where`, or of the nearest place around it that is in the file."""
        if self._prefix and where[: len(self._prefix)] == self._prefix:
            where = where[len(self._prefix) :]
        while where and where not in self._of:
            where = where[:-1]
        return self._of.get(where, 1)

    def below(self, key: str) -> Lines:
        """The same lines for data that was put under `key`."""
        return Lines(self._of, (key,))


def load_yaml_with_lines(text: str) -> tuple[Any, Lines]:
    """Plain data (dict, list, str, int, float, bool, None) of one YAML document. Raises YamlError."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" in column {mark.column + 1}" if mark else ""
        raise YamlError(
            f"not readable as YAML: {error.problem or error.context}{where}; correct the text there",
            mark.line + 1 if mark else 1,
        ) from error
    except RecursionError as error:
        raise YamlError("too deeply nested for a hostfile; shorten it", 1) from error
    except yaml.YAMLError as error:
        raise YamlError(
            f"not readable as YAML: {' '.join(str(error).split())}; correct the text", 1
        ) from error
    if root is None:
        raise YamlError("the file is empty; start it with `hosts:` and a list of hosts", 1)
    builder = _Builder()
    data = builder.build(root, ())
    return data, Lines(builder.lines)


def load_json_with_lines(text: str) -> tuple[Any, Lines]:
    """The same for JSON text, or for YAML in flow style. Raises YamlError."""
    try:
        json.loads(text)
    except RecursionError as error:
        raise YamlError("too deeply nested for a hostfile; shorten it", 1) from error
    except json.JSONDecodeError as error:
        try:  # a YAML file may begin with `{` or `[` too
            return load_yaml_with_lines(text)
        except YamlError:
            raise YamlError(
                f"not readable as JSON: {error.msg} in column {error.colno}; correct the text there",
                error.lineno,
            ) from error
    # JSON allows raw tabs only between tokens, where YAML refuses them.
    return load_yaml_with_lines(text.replace("\t", " "))


class _Builder:
    def __init__(self) -> None:
        self.lines: dict[Place, int] = {}
        self._constructor = yaml.constructor.SafeConstructor()
        self._num_nodes = 0

    def build(self, node: yaml.Node, where: Place) -> Any:
        line = node.start_mark.line + 1
        self.lines.setdefault(where, line)
        self._num_nodes += 1
        if self._num_nodes > _MAX_NODES or len(where) > _MAX_DEPTH:
            raise YamlError("too large or too deeply nested for a hostfile; shorten it", line)
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, where)
        if isinstance(node, yaml.SequenceNode):
            return [self.build(item, (*where, index)) for index, item in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return self._scalar(node, line)

    def _mapping(self, node: yaml.MappingNode, where: Place) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else ""
            if not key:
                raise YamlError("a key must be a plain word; correct it", line)
            if key == "<<":
                raise YamlError("`<<` (merging another mapping) is not read; write the keys out here", line)
            if key in found:
                raise YamlError(f"key `{key}` stands twice in one mapping; remove one", line)
            self.lines[(*where, key)] = line
            found[key] = self.build(value_node, (*where, key))
        return found

    def _scalar(self, node: yaml.ScalarNode, line: int) -> Any:
        tag = node.tag.rpartition(":")[2]
        if tag == "timestamp":
            return str(node.value)
        if tag not in ("str", "int", "float", "bool", "null"):
            raise YamlError(f"YAML tag {node.tag} is not read; write a plain value", line)
        try:
            return self._constructor.construct_object(node)
        except (yaml.YAMLError, ValueError) as error:
            raise YamlError(f"{node.value!r} cannot be read ({error}); correct it", line) from error
