"""What a dialect must be able to write."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.pieces import Piece
from mlx_mesh.proxy.usage import Usage

COMMENT = b": keepalive\n\n"


class Answer(ABC):
    """One answer, streamed or whole. Bytes are those of the stream; b'' = nothing to say."""

    media_type = "text/event-stream"

    @abstractmethod
    def opening(self, num_sequences: int) -> bytes:
        """Sent at once, before anything is generated; not empty."""

    @abstractmethod
    def piece(self, index: int, piece: Piece) -> bytes:
        """What one piece of a sequence adds."""

    @abstractmethod
    def closing(self, usage: Usage) -> bytes:
        """After the last piece of all sequences."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The last event of an answer that cannot be finished."""

    def keepalive(self) -> bytes:
        """Whatever tells the client that the server lives, and nothing else."""
        return COMMENT

    @abstractmethod
    def whole(self, parts: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        """The answer that is not streamed, from all pieces of each sequence."""


def data_event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def named_event(name: str, body: dict[str, Any]) -> bytes:
    return f"event: {name}\n".encode() + data_event(body)


def read_arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object; they were checked to be one."""
    arguments = json.loads(text)
    assert isinstance(arguments, dict)
    return arguments
