"""What the launcher tells the processes that deliver a model, one line of JSON on their stdin, and what they
say, a framed line each. Tokens and certificates go no other way."""

from __future__ import annotations

import msgspec

from mlx_mesh.mesh.delivery import Holding, Piece, Spans
from mlx_mesh.mesh.part_record import RecordHead


class LookOrder(msgspec.Struct, frozen=True, kw_only=True):
    """What do you have of this model? `verify`: read everything again that was delivered."""

    marker: str
    asked: str
    candidates: tuple[str, ...]
    models: str = ""  # the hostfile's folder of models on this host
    verify: bool = False


class HashOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The SHA-256 of each of these pieces."""

    marker: str
    folder: str
    pieces: tuple[Piece, ...]


class FetchOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Get a hub model as a whole."""

    marker: str
    model: str
    offline: bool = False


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """Who may come: a host with its token (hex)."""

    host: str
    token: str


class SendOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Offer a folder at these addresses, to these peers, until stdin ends."""

    marker: str
    folder: str
    files: dict[str, int]
    addresses: tuple[str, ...]
    peers: tuple[Peer, ...]
    held: Spans | None = None  # None = all of it


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where pieces come from. `endpoints`: (address, port), tried in order."""

    host: str
    endpoints: tuple[tuple[str, int], ...]
    certificate: str  # PEM of exactly the one that it shows
    token: str
    pieces: tuple[Piece, ...]


class ReceiveOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Fetch pieces into a folder. `again`: files of which nothing that is there counts."""

    marker: str
    folder: str
    head: RecordHead
    sources: tuple[Source, ...]
    again: tuple[str, ...] = ()


# ---------------------------------------------------------------- what they say


class Offering(msgspec.Struct, frozen=True, kw_only=True, tag="offering"):
    """A sender listens."""

    ports: dict[str, int]  # by address
    certificate: str


class Refused(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """A sender sent somebody away."""

    peer: str  # address
    why: str


class Looked(msgspec.Struct, frozen=True, kw_only=True, tag="looked"):
    holding: Holding


class Reading(msgspec.Struct, frozen=True, kw_only=True, tag="reading"):
    """Bytes that were read again, or that came from the hub, so far."""

    done: int
    total: int


class Receiving(msgspec.Struct, frozen=True, kw_only=True, tag="receiving"):
    """Bytes that a receiver has written, of those that it was told to fetch."""

    done: int
    total: int
    via: str = ""  # addresses that it dialled


class Received(msgspec.Struct, frozen=True, kw_only=True, tag="received"):
    """All of it is there. `num_bytes` came over the network, frames and repetitions included."""

    num_bytes: int
    num_pieces: int
    seconds: float


class Fetched(msgspec.Struct, frozen=True, kw_only=True, tag="fetched"):
    folder: str


class Hashes(msgspec.Struct, frozen=True, kw_only=True, tag="hashes"):
    sha256: tuple[str, ...]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """It cannot go on; what is there stays. `lost`: the sender that went away, '' = something else."""

    message: str
    lost: str = ""


Said = Looked | Offering | Refused | Reading | Receiving | Received | Fetched | Hashes | Failed
