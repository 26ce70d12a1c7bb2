"""The nouns: sharding, phases, hosts' facts, shards and placements. Frozen values without behaviour."""

from __future__ import annotations

import hashlib
from enum import StrEnum

import msgspec

from mlx_mesh.mesh.interfaces import Interface

PROTOCOL_VERSION = 1

MEDIA_KINDS = ("image", "audio", "video")
"""What prompts may hold beside text, by the model."""

STILLS = "stills"
"""Among what a model takes: it takes pictures and no video, so some frames of one are shown as pictures."""


class Sharding(StrEnum):
    AUTO = "auto"
    TENSOR = "tensor"
    PIPELINE = "pipeline"
    NONE = "none"  # world size 1


class VisionMode(StrEnum):
    """Whether a vision model is served with its towers: as its config says, or as the user wants."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"

    @classmethod
    def of(cls, choice: bool | None) -> VisionMode:
        """Of --vision, --no-vision or neither."""
        return cls.AUTO if choice is None else cls.ON if choice else cls.OFF


class Backend(StrEnum):
    AUTO = "auto"
    RING = "ring"
    JACCL = "jaccl"
    JACCL_RING = "jaccl-ring"
    NCCL = "nccl"
    NONE = "none"  # world size 1 has no data group


class Phase(StrEnum):
    """Where one rank is in its epoch, in order. `FAILED` and `STOPPED` can follow any of them."""

    STARTING = "starting"  # process started, importing
    IMPORTED = "imported"  # versions known, nothing opened yet
    CONNECTING = "connecting"  # inside mx.distributed.init and the checked collective
    CONNECTED = "connected"
    LOADING = "loading"
    LOADED = "loaded"
    WARMING = "warming"  # cut check and one-token warm-up
    READY = "ready"
    FAILED = "failed"
    STOPPED = "stopped"


class Versions(msgspec.Struct, frozen=True, kw_only=True):
    """Versions that must match over all ranks, read from the loaded modules ('' = not installed)."""

    mlx_mesh: str
    mlx: str
    mlx_lm: str
    python: str
    protocol: int = PROTOCOL_VERSION


class HostFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a host says of itself. Bytes are bytes; addresses are its IPv4 addresses, loopback included."""

    hostname: str
    system: str  # platform.system(): Darwin, Linux
    machine: str  # platform.machine()
    chip: str
    memory_bytes: int
    usable_memory_bytes: int  # what engines of this host may use together
    addresses: tuple[str, ...]
    versions: Versions
    interfaces: tuple[Interface, ...] = ()
    model_digest: str = ""  # hash over config and weight file names and sizes; '' = model not found
    model_error: str = ""  # why model_digest is empty, in words with the fix
    model_part: str = ""  # what is there of a model that was delivered in part, "1.2 of 4.5 GB"; '' = all
    is_delivered: bool = False  # mlx-mesh brought the model here
    adapter_digest: str = ""  # hash over the adapter's files; '' = none was asked for, or there is none
    adapter_error: str = ""  # why adapter_digest is empty although one was asked for
    tokenizer_error: str = ""  # why this host could not serve HTTP for the model; followers need no tokenizer
    embedding_bytes: int = 0  # memory that the embedding model beside the engines takes; 0 = none
    embedding_error: str = ""  # why there is none although one is asked for

    @property
    def engine_memory_bytes(self) -> int:
        """What is left for the ranks of this host."""
        return max(0, self.usable_memory_bytes - self.embedding_bytes)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's share of the model. Pipeline: layers [start_layer, end_layer). Tensor: all layers,
    and `weight` of the sum of all weights of every unit that can be split."""

    rank: int
    host: str
    start_layer: int
    end_layer: int
    weight: int = 1
    weights_bytes: int = 0  # predicted bytes of parameters on this rank
    kv_bytes_per_token: int = 0
    memory_limit_bytes: int = 0


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Which rank holds what. In a pipeline rank 0, the leader, is the last stage and rank N-1 has layer 0."""

    sharding: Sharding  # NONE, PIPELINE or TENSOR, never AUTO
    model_digest: str
    num_layers: int
    shards: tuple[Shard, ...]  # indexed by rank
    reasons: tuple[str, ...] = ()  # why this one, and what else was considered

    @property
    def world_size(self) -> int:
        return len(self.shards)

    def digest(self) -> str:
        """Hex SHA-256 over the canonical encoding; every rank must hold the same one."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).hexdigest()
