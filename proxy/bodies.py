"""Reading a request's JSON body within limits of size and time, before anything looks into it."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request

from mlx_mesh.proxy.errors import ApiError, invalid

BODY_DEADLINE_S = 60.0
"""For a whole body to arrive."""

_DISCARD_FACTOR = 8
"""A body over the limit is still read, and thrown away, up to this many times the limit: an answer given
while the client is sending is lost when the connection closes under it."""


async def read_json_object(request: Request, max_bytes: int, *, may_be_empty: bool = False) -> dict[str, Any]:
    """The body as a JSON object. Raises ApiError 400, 408 or 413. `may_be_empty`: no body is {}."""
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            raw = await _read(request, max_bytes)
    except ClientDisconnect as error:  # nobody reads the answer; without one it would count as our fault
        raise invalid(
            "The connection ended before the request body was complete.", param=None, code="body_incomplete"
        ) from error
    except TimeoutError as error:
        raise ApiError(
            408, f"The request body did not arrive within {BODY_DEADLINE_S:g} s.", code="body_timeout"
        ) from error
    if may_be_empty and not raw.strip():
        return {}
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise invalid(
            f"The request body is not valid JSON: {error}.", param=None, code="invalid_json"
        ) from error
    if not isinstance(body, dict):
        raise invalid("The request body must be a JSON object.", param=None, code="invalid_json")
    return body


async def _read(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    too_large = ApiError(
        413,
        f"The request body is over the limit of {max_bytes} bytes"
        + (f" (it has {declared})." if declared else "."),
        code="request_too_large",
    )
    is_waiting = request.headers.get("expect", "").lower() == "100-continue"
    discard_bytes = max_bytes * _DISCARD_FACTOR
    if declared.isdecimal() and int(declared) > (max_bytes if is_waiting else discard_bytes):
        raise too_large  # it has not been sent yet, or is not worth reading
    parts: list[bytes] = []
    num_bytes = 0
    async for part in request.stream():
        num_bytes += len(part)
        if num_bytes <= max_bytes:
            parts.append(part)
        else:
            parts.clear()
            if num_bytes > discard_bytes:
                break
    if num_bytes > max_bytes:
        raise too_large
    return b"".join(parts)
