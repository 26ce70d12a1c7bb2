"""Which bytes of a model go from which host to which: values and decisions. Pure.

A model is its small files (config, tokenizer) and its weight files. A host needs all small files whole, the
header of every weight file, and those tensors that its ranks read. What travels are pieces of at most
MAX_PIECE_BYTES, each with its own SHA-256.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.mesh.link_plan import PairLink, links_between
from mlx_mesh.mesh.spans import Span, merge, on_grid, subtract, total

MIN_PIECE_BYTES = 256 * 1024
MAX_PIECE_BYTES = 8 * 1024 * 1024
_NUM_PIECES = 256
"""Into so many a delivery is cut, if it is not too large or small for that: the pieces under way when it is
ended come again."""

SPARE_BYTES = 512 * 1024 * 1024
"""Stays free on a disk that a model is written to."""

Spans = dict[str, list[Span]]
"""File name -> merged spans of it."""


class ModelFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of a model's folder. `sha256` (hex) is that of the whole file, of small files only; `sample`
    (hex) is that of blocks all over a weight file, of one delivered in part as they were where it came from:
    weights that were trained on keep name and size. '' = not known."""

    name: str
    size: int
    sha256: str = ""
    sample: str = ""

    @property
    def is_weights(self) -> bool:
        return self.name.endswith(".safetensors")


State = Literal["whole", "part", "none"]


class Holding(msgspec.Struct, frozen=True, kw_only=True):
    """What one host has of a model. `whole`: a complete folder; `part`: one that mlx-mesh made and that has
    some of the bytes; `none`: nothing that can be used."""

    state: State
    folder: str = ""  # where it is; of `none` where an unfinished delivery is, '' = nowhere
    digest: str = ""
    files: tuple[ModelFile, ...] = ()
    held: Spans = {}  # of `part` and of an unfinished delivery: bytes that are there and were checked
    target: str = ""  # the folder into which a delivery would go
    free_bytes: int = 0  # on its disk
    num_damaged: int = 0  # pieces that were there and are not what was received; they were given up
    num_checked: int = 0  # pieces that were read again and are right
    problem: str = ""  # why it is `none`, in words
    is_delivered: bool = False  # mlx-mesh made the folder


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """Bytes [start, end) of a file."""

    file: str
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


def whole_files(files: Sequence[ModelFile]) -> Spans:
    return {file.name: [(0, file.size)] if file.size else [] for file in files}


def needed_spans(files: Sequence[ModelFile], of_ranks: Sequence[Mapping[str, Sequence[Span]]]) -> Spans:
    """What a host needs whose ranks read these spans of weight files (headers included)."""
    found: Spans = {}
    for file in files:
        if file.is_weights:
            found[file.name] = merge(span for rank in of_ranks for span in rank.get(file.name, ()))
        else:
            found[file.name] = [(0, file.size)] if file.size else []
    return found


def missing_spans(needed: Spans, held: Mapping[str, Sequence[Span]]) -> Spans:
    return {name: left for name, spans in needed.items() if (left := subtract(spans, held.get(name, ())))}


def stale_files(source: Sequence[ModelFile], here: Sequence[ModelFile]) -> set[str]:
    """Files of the source that have another content here. They have to come again."""
    own = {file.name: file for file in here}
    return {
        file.name
        for file in source
        if (mine := own.get(file.name)) is not None
        and any(
            known and wanted and known != wanted
            for known, wanted in ((mine.sha256, file.sha256), (mine.sample, file.sample))
        )
    }


def size_of(spans: Mapping[str, Sequence[Span]]) -> int:
    return sum(total(each) for each in spans.values())


def piece_bytes_for(num_bytes: int) -> int:
    """The largest piece of a delivery of so many bytes: a power of two."""
    size = MIN_PIECE_BYTES
    while size < MAX_PIECE_BYTES and size * _NUM_PIECES < num_bytes:
        size *= 2
    return size


def pieces_of(spans: Mapping[str, Sequence[Span]], piece_bytes: int = 0) -> list[Piece]:
    """Small files first, so that a folder can be judged early; then as they lie in the files. `piece_bytes` 0
    = by the size of it all."""
    piece_bytes = piece_bytes or piece_bytes_for(size_of(spans))
    names = sorted(spans, key=lambda name: (name.endswith(".safetensors"), name))
    return [Piece(name, start, end) for name in names for start, end in on_grid(spans[name], piece_bytes)]


# ---------------------------------------------------------------- who sends


class Holder(msgspec.Struct, frozen=True, kw_only=True):
    """A host that can send. `held` None = everything."""

    host: str
    interfaces: tuple[Interface, ...] = ()
    address: str = ""  # by which it is known to be reached
    held: Spans | None = None

    def has(self, piece: Piece) -> bool:
        if self.held is None:
            return True
        spans = self.held.get(piece.file, ())
        return not subtract([(piece.start, piece.end)], spans)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """How a receiver dials a sender: addresses in the order in which they are tried."""

    addresses: tuple[str, ...]
    words: str  # "en1 Thunderbolt", for people
    rate: int  # assumed bytes a second; only for sharing the work


_RATES = {LinkClass.THUNDERBOLT: 2_000_000_000, LinkClass.ETHERNET: 115_000_000, LinkClass.WIFI: 30_000_000}
_UNKNOWN_RATE = 100_000_000


def route_between(receiver: Holder, sender: Holder) -> Route:
    """The best link that the two have in common first, then the address that is known to work. Wi-Fi is
    better than nothing here: nobody waits for each token."""
    links = links_between(
        (receiver.host, receiver.interfaces), (sender.host, sender.interfaces), allow_wifi=True
    )
    addresses = [link.listens.address for link in links]
    if sender.address and sender.address not in addresses:
        addresses.append(sender.address)
    if not links:
        return Route(addresses=tuple(addresses), words="", rate=_UNKNOWN_RATE)
    return Route(addresses=tuple(addresses), words=_link_words(links[0]), rate=_rate_of(links[0]))


def _link_words(link: PairLink) -> str:
    return f"{link.dials.interface} ({link.link_class})"


def _rate_of(link: PairLink) -> int:
    if link.link_class is LinkClass.ETHERNET and link.mbits:
        return link.mbits * 125_000
    return _RATES.get(link.link_class, _UNKNOWN_RATE)


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """What one receiver gets from one sender."""

    receiver: str
    sender: str
    pieces: tuple[Piece, ...]


def assign(
    wanted: Mapping[str, Sequence[Piece]], holders: Sequence[Holder], rates: Mapping[tuple[str, str], int]
) -> tuple[list[Assignment], dict[str, list[Piece]]]:
    """Each wanted piece, receiver by receiver in turn, to the holder that would have sent it first: a
    sender is busy with what it was given before. `rates`: (receiver, sender) ->
    bytes a second. Second: pieces that nobody holds. Equal inputs give equal answers."""
    given: dict[tuple[str, str], list[Piece]] = {}
    nobody: dict[str, list[Piece]] = {}
    busy: dict[str, float] = {}  # seconds of work that a sender has
    queues = {receiver: list(reversed(pieces)) for receiver, pieces in wanted.items()}
    while any(queues.values()):
        for receiver, queue in queues.items():
            if not queue:
                continue
            piece = queue.pop()
            able = [holder.host for holder in holders if holder.host != receiver and holder.has(piece)]
            if not able:
                nobody.setdefault(receiver, []).append(piece)
                continue
            seconds = {host: piece.size / rates.get((receiver, host), _UNKNOWN_RATE) for host in able}
            best = min(able, key=lambda host: (busy.get(host, 0.0) + seconds[host], able.index(host)))
            busy[best] = busy.get(best, 0.0) + seconds[best]
            given.setdefault((receiver, best), []).append(piece)
    found = [
        Assignment(receiver=receiver, sender=sender, pieces=tuple(pieces))
        for (receiver, sender), pieces in given.items()
    ]
    return found, nobody


def short_disks(missing: Mapping[str, int], free: Mapping[str, int], what: str) -> list[str]:
    """In words, the hosts (by name) whose disk has too little room for the bytes that they miss."""
    return [
        f"{host}: needs {gigabytes(num)} more of {what} and its disk has {gigabytes(free[host])} free; "
        f"{gigabytes(num + SPARE_BYTES - free[host])} are missing ({gigabytes(SPARE_BYTES)} stay free). Free "
        "some, or set `models:` of this host to a folder on a larger disk"
        for host, num in missing.items()
        if num and num + SPARE_BYTES > free[host]
    ]


def gigabytes(num_bytes: int) -> str:
    """In words; megabytes for less."""
    return f"{num_bytes / 1e9:.2f} GB" if num_bytes >= 10**9 else f"{num_bytes / 1e6:.1f} MB"
