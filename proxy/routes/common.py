"""What the generating routes share: reading the body, and answering streamed or whole."""

from __future__ import annotations

import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from mlx_mesh.proxy.answers.base import Answer
from mlx_mesh.proxy.bodies import read_json_object
from mlx_mesh.proxy.conversation import Conversation
from mlx_mesh.proxy.convert.common import Prepared
from mlx_mesh.proxy.errors import json_response
from mlx_mesh.proxy.generation import Generation
from mlx_mesh.proxy.pieces import Piece
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.streaming import EventStream, answer_events, while_connected
from mlx_mesh.proxy.tenants import note_conversation, with_owner
from mlx_mesh.proxy.usage import Usage, count

REFUSAL_GRACE_S = 0.1
"""How long a stream waits before its first byte for the coordinator to refuse: a full queue is then a
status that clients retry on, and not an error event."""

ADMISSION_S = 2.0
"""How long the headers of a stream wait for its request to have its place, which they tell of."""

CLIENT_GONE_STATUS = 499  # nginx's; nobody reads it

T = TypeVar("T")

_log = logging.getLogger("mlx_mesh.proxy")


def services_of(request: Request) -> Services:
    services = request.app.state.services
    assert isinstance(services, Services)
    return services


def request_id(request: Request) -> str:
    """The id in the `x-request-id` header of the answer."""
    return str(request.scope["state"]["request_id"])


async def read_body(request: Request) -> dict[str, Any]:
    """The JSON body of a request that can be served now. Raises ApiError and ClientDisconnect."""
    services = services_of(request)
    # The body is read even when the answer is 503: closing a connection on unread bytes loses the answer.
    raw = await read_json_object(request, services.config.max_body_bytes)
    services.require_ready()
    note_conversation(request, raw)
    return raw


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What is done before an answer can begin, unless the client goes: then nothing more is read or decoded
    for it, and ClientDisconnect is raised."""
    try:
        return await while_connected(request.receive, work)
    except ClientDisconnect:
        services_of(request).metrics.disconnects.inc()
        raise


async def respond(
    request: Request,
    services: Services,
    prepared: Prepared,
    answer: Answer,
    *,
    stream: bool,
    conversation: Conversation | None = None,
) -> Response:
    """Generate, and answer as `stream` says. Raises GenerationFailed before the first byte. With a
    conversation, the answer's headers tell of it."""
    prepared = with_owner(request, prepared, is_per_key=services.config.has_prefixes_per_key)
    generation = Generation(services.client, services.tokenizer, prepared.sequences)
    ids = (prepared.id, request_id(request))
    services.open_answers.add(ids, generation)

    async def finish(is_complete: bool) -> None:
        services.open_answers.remove(ids, generation)
        if conversation is not None:
            services.conversations.end(conversation)
        await generation.close()
        count(services.metrics, generation.tallies)
        if not is_complete:
            services.metrics.disconnects.inc()
        used = Usage.of(generation.tallies)
        _log.info(
            "%s: %d prompt tokens, %d generated, %.1f tokens/s%s",
            prepared.id,
            used.prompt_tokens,
            used.completion_tokens,
            used.decode_rate,
            "" if is_complete else ", not finished",
        )

    is_complete = False
    owns_generation = True
    try:
        if stream:
            headers = prepared.headers
            if conversation is not None:
                waiting = generation.is_admitted(min(ADMISSION_S, services.config.keepalive_s))
                is_admitted = await while_connected(request.receive, waiting)
                headers = headers | conversation.headers(generation.tallies[0] if is_admitted else None)
            first = await _first_piece(generation)
            owns_generation = False  # the stream closes it
            events = answer_events(generation, first, answer, services.config.keepalive_s)
            return EventStream(events, finish, headers, answer.media_type)
        pieces = await while_connected(request.receive, _collect(generation))
        is_complete = True
        body = answer.whole(pieces, Usage.of(generation.tallies))
        more = {} if conversation is None else conversation.headers(generation.tallies[0])
        return json_response(body, headers=prepared.headers | more)
    except ClientDisconnect:
        return Response(status_code=CLIENT_GONE_STATUS)
    finally:
        if owns_generation:
            await finish(is_complete)


async def _first_piece(generation: Generation) -> tuple[int, Piece] | None:
    try:
        return await generation.next(REFUSAL_GRACE_S)
    except TimeoutError:
        return None


async def _collect(generation: Generation) -> Sequence[Sequence[Piece]]:
    pieces: list[list[Piece]] = [[] for _ in generation.tallies]
    while (item := await generation.next()) is not None:
        index, piece = item
        pieces[index].append(piece)
    return pieces
