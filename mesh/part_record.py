"""What is in a model folder that has some of a model's bytes: a journal that can be cut off anywhere. Pure.

The first line names the model and its files. Then a line for each piece that was received and written, and
now and then a number: so many pieces, from the first on, are on the disk whatever happens to the machine. The
others may have been lost with the power, so they are read again before they are believed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from mlx_mesh.mesh.delivery import Piece, Spans
from mlx_mesh.mesh.spans import covers, merge, total

RECORD_NAME = ".mlx-mesh-part.jsonl"
_VERSION = 1


class RecordHead(msgspec.Struct, frozen=True, kw_only=True):
    """`files`: name -> size, all of the model's. `samples`: of weight files, see `ModelFile`."""

    asked: str  # the model as it was named
    digest: str
    files: dict[str, int]
    samples: dict[str, str] = {}
    version: int = _VERSION


class KeptPiece(msgspec.Struct, frozen=True, array_like=True):
    """A piece and the hex SHA-256 of its bytes as they were received."""

    file: str
    start: int
    end: int
    sha256: str

    @property
    def piece(self) -> Piece:
        return Piece(self.file, self.start, self.end)


class PartRecord(msgspec.Struct, frozen=True, kw_only=True):
    head: RecordHead
    pieces: tuple[KeptPiece, ...]
    num_settled: int  # of `pieces`, from the first on

    @property
    def is_settled(self) -> bool:
        return self.num_settled == len(self.pieces)

    def spans(self) -> Spans:
        """The bytes that are there."""
        by_file: dict[str, list[tuple[int, int]]] = {name: [] for name in self.head.files}
        for kept in self.pieces:
            by_file.setdefault(kept.file, []).append((kept.start, kept.end))
        return {name: merge(spans) for name, spans in by_file.items()}

    @property
    def is_whole(self) -> bool:
        spans = self.spans()
        return self.is_settled and all(
            covers(spans[name], [(0, size)]) for name, size in self.head.files.items()
        )

    @property
    def has_small_files(self) -> bool:
        """Whether all files but the weights are complete: without them it is no model folder."""
        spans = self.spans()
        return all(
            covers(spans[name], [(0, size)])
            for name, size in self.head.files.items()
            if not name.endswith(".safetensors")
        )

    @property
    def num_bytes(self) -> int:
        return sum(total(spans) for spans in self.spans().values())


def head_line(head: RecordHead) -> bytes:
    return msgspec.json.encode(head) + b"\n"


def piece_line(kept: KeptPiece) -> bytes:
    return msgspec.json.encode(kept) + b"\n"


def settled_line(num_pieces: int) -> bytes:
    return b"%d\n" % num_pieces


def parse_record(data: bytes) -> PartRecord:
    """A last line that was cut off does not count. Raises ValueError for what is no such journal."""
    lines = data.split(b"\n")
    lines.pop()  # '' when the last line is whole
    if not lines:
        raise ValueError("it has no first line")
    try:
        head = msgspec.json.decode(lines[0], type=RecordHead)
    except msgspec.MsgspecError as error:
        raise ValueError(f"its first line is {error}") from error
    if head.version != _VERSION:
        raise ValueError(f"it is of version {head.version}, this mlx-mesh knows {_VERSION}")
    pieces: list[KeptPiece] = []
    num_settled = 0
    for line in lines[1:]:
        try:
            item: Any = msgspec.json.decode(line, type=KeptPiece | int)
        except msgspec.MsgspecError as error:
            raise ValueError(f"line {len(pieces) + 2} is {error}") from error
        if isinstance(item, int):
            if not num_settled <= item <= len(pieces):
                raise ValueError(f"it tells of {item} settled pieces and has {len(pieces)}")
            num_settled = item
            continue
        if not 0 <= item.start < item.end <= head.files.get(item.file, 0):
            raise ValueError(f"it tells of bytes {item.start}-{item.end} of {item.file}, which are none")
        pieces.append(item)
    return PartRecord(head=head, pieces=tuple(pieces), num_settled=num_settled)


def write_record(head: RecordHead, pieces: Iterable[KeptPiece]) -> bytes:
    """The journal of pieces that were all checked."""
    kept = list(pieces)
    return head_line(head) + b"".join(map(piece_line, kept)) + settled_line(len(kept))
