"""Whose prompts have something in common: what a request says of its conversation, and of its API key.

Neither changes an answer. The conversation keeps requests on one replica, where there are several; with
`--prefix-cache-per-key` the key keeps prefixes of one client from those of the others.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request

from mlx_mesh.proxy.conversation import DEFAULT_ID
from mlx_mesh.proxy.convert.common import Prepared

_NUM_HEX = 32


def note_conversation(request: Request, raw: Mapping[str, Any]) -> None:
    """Remember what the body or the headers name: the conversation, else a cache key, else the user. Fields
    are only looked at here; their own endpoint says which are right."""
    metadata = raw.get("metadata")
    given = (
        raw.get("conversation"),
        raw.get("conversation_id"),
        request.headers.get("x-conversation-id"),
        metadata.get("conversation_id") if isinstance(metadata, dict) else None,
        raw.get("prompt_cache_key"),
        raw.get("user"),
    )
    name = next((one for one in given if isinstance(one, str) and one), "")
    request.state.conversation = digest_of(name) if name and name != DEFAULT_ID else ""


def with_owner(request: Request, prepared: Prepared, *, is_per_key: bool) -> Prepared:
    """The sequences with the conversation, and with the key's part of the salt."""
    conversation: str = getattr(request.state, "conversation", "")
    key: str = getattr(request.state, "api_key_digest", "") if is_per_key else ""
    if not conversation and not key:
        return prepared
    sequences = tuple(
        dataclasses.replace(
            sequence,
            request=msgspec.structs.replace(
                sequence.request,
                conversation=conversation,
                cache_salt=f"{key}:{sequence.request.cache_salt}" if key else sequence.request.cache_salt,
            ),
        )
        for sequence in prepared.sequences
    )
    return dataclasses.replace(prepared, sequences=sequences)


def digest_of(text: str) -> str:
    """Short, of one length, and no secret any more."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:_NUM_HEX]
