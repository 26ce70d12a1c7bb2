"""The id of a conversation, which a client may give with a request and finds in the answer."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request

from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.schemas.chat import ChatRequest

CONVERSATION_HEADER = "x-conv-id"

_REQUEST_HEADER = "x-conversation-id"
_ID = re.compile(r"[\x21-\x7e]{1,256}")  # as it can stand in a header


def conversation_id(request: Request, body: ChatRequest) -> str:
    """'' when none is given. The order is Kamiwaza's, and OpenAI's metadata after it.
    Raises ApiError 400."""
    metadata: dict[str, Any] = body.metadata or {}
    given = {
        "conversation": body.conversation,
        "conversation_id": body.conversation_id,
        _REQUEST_HEADER: request.headers.get(_REQUEST_HEADER),
        "metadata.conversation_id": metadata.get("conversation_id"),
    }
    for param, value in given.items():
        if value is None:
            continue
        if not isinstance(value, str) or not _ID.fullmatch(value):
            raise invalid(
                f"Invalid '{param}': 1 to 256 visible ASCII characters, without spaces.", param=param
            )
        return value
    return ""
