"""A model folder whose weight files are fetched when a rank needs them.

Until then each weight file is a placeholder: its true header and size without its bytes (a sparse file).
Sizes, cuts and digests come out as from the complete folder, and a rank reads only files that were fetched
for it.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec

from mlx_mesh.mesh.errors import PreflightError

RECORD_NAME = ".mlx-mesh-hub.json"
MAX_HEADER_BYTES = 256 * 1024 * 1024
_LAYER = re.compile(r"^(?P<stack>.*?(?:layers|blocks|h|block|layer))\.(?P<number>\d+)\.")


class HubFolder(msgspec.Struct, frozen=True, kw_only=True):
    """Where the files of a folder come from. `files`: weight file -> size."""

    repo: str
    commit: str
    files: dict[str, int]


def read_record(folder: Path) -> HubFolder | None:
    """None: an ordinary, complete model folder."""
    try:
        return msgspec.json.decode((folder / RECORD_NAME).read_bytes(), type=HubFolder)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise PreflightError(
            f"{folder / RECORD_NAME} cannot be read ({error}). Delete {folder}; it is made again."
        ) from error


def write_placeholder(path: Path, header: bytes, size: int) -> None:
    """`header` is the file's beginning: eight bytes of length and the JSON."""
    with path.open("wb") as stream:
        stream.write(header)
        stream.truncate(size)


def is_placeholder(path: Path) -> bool:
    """Fetched files are links into the hub's cache."""
    return not path.is_symlink()


def put_file(folder: Path, name: str, target: Path) -> None:
    """Replace a placeholder by a link to the file's cached copy, at once: another rank may look."""
    temporary = folder / f".{name}.{os.getpid()}"
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    temporary.symlink_to(target)
    temporary.replace(folder / name)


def tensor_names(path: Path) -> list[str]:
    """The tensors of one safetensors file, from its header."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"its header claims {length} bytes")
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
    except (OSError, ValueError, struct.error) as error:
        raise PreflightError(f"{path} is not a usable safetensors file: {error}") from error
    return [name for name in header if name != "__metadata__"]


def files_of_layers(names: Mapping[str, Sequence[str]], num_layers: int, start: int, end: int) -> list[str]:
    """Of `file -> its tensors` the files that a stage with layers [start, end) may read: all but those that
    hold nothing but other layers. When the layers cannot be told by their names: all files."""
    stack = _stack(names.values(), num_layers)

    def is_needed(tensor: str) -> bool:
        match = _LAYER.match(tensor)
        return stack is None or not match or match["stack"] != stack or start <= int(match["number"]) < end

    return [file for file, tensors in names.items() if not tensors or any(map(is_needed, tensors))]


def _stack(names: Iterable[Sequence[str]], num_layers: int) -> str | None:
    """What the model's own layers are called: the only stack with at least so many of them."""
    numbers: dict[str, set[int]] = {}
    for tensors in names:
        for tensor in tensors:
            if match := _LAYER.match(tensor):
                numbers.setdefault(match["stack"], set()).add(int(match["number"]))
    wanted = set(range(num_layers))
    full = [stack for stack, found in numbers.items() if wanted <= found]
    return full[0] if len(full) == 1 else None
