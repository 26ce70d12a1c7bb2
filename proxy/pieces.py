"""What an answer consists of, in the order in which it is generated. Every dialect is made of these."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mlx_mesh.mesh.messages import TokenLogprobs
from mlx_mesh.proxy.toolcalls import ToolCall


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """One token of an answer; `start` is where its text begins, in characters of the answer."""

    token_id: int
    start: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text of the answer that may be shown now, and the tokens whose text begins in it."""

    text: str
    tokens: tuple[TokenSpan, ...] = ()


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    text: str


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A complete call; `number` counts the calls of its sequence from 0."""

    number: int
    call: ToolCall


@dataclass(frozen=True, slots=True)
class EndPiece:
    """The last piece of a sequence: `stop`, `length` or `tool_calls`."""

    finish_reason: str
    stop_string: str | None = None


Piece = TextPiece | ReasoningPiece | CallPiece | EndPiece

CALL_DELTA_CHARS = 256


def argument_deltas(call: ToolCall) -> list[str]:
    """The arguments in parts of a size that clients can show while they come."""
    text = call.arguments
    return [text[at : at + CALL_DELTA_CHARS] for at in range(0, len(text), CALL_DELTA_CHARS)]


@dataclass(frozen=True, slots=True)
class Collected:
    """All of one sequence."""

    text: str
    reasoning: str
    calls: tuple[ToolCall, ...]
    tokens: tuple[TokenSpan, ...]
    end: EndPiece


def collect(pieces: Iterable[Piece]) -> Collected:
    """Put the pieces of one finished sequence together."""
    text: list[str] = []
    reasoning: list[str] = []
    calls: list[ToolCall] = []
    tokens: list[TokenSpan] = []
    end: EndPiece | None = None
    for piece in pieces:
        match piece:
            case TextPiece():
                text.append(piece.text)
                tokens += piece.tokens
            case ReasoningPiece():
                reasoning.append(piece.text)
            case CallPiece():
                calls.append(piece.call)
            case EndPiece():
                end = piece
    assert end is not None, "a sequence ended without a finish_reason"
    return Collected("".join(text), "".join(reasoning), tuple(calls), tuple(tokens), end)


Block = tuple[type[TextPiece] | type[ReasoningPiece], str] | ToolCall


def blocks_of(pieces: Iterable[Piece]) -> list[Block]:
    """Text, reasoning and calls in their order, neighbours of a kind joined."""
    blocks: list[Block] = []
    for piece in pieces:
        match piece:
            case CallPiece():
                blocks.append(piece.call)
            case TextPiece() | ReasoningPiece() if piece.text:
                last = blocks[-1] if blocks else None
                if isinstance(last, tuple) and last[0] is type(piece):
                    blocks[-1] = (last[0], last[1] + piece.text)
                else:
                    blocks.append((type(piece), piece.text))
            case _:
                pass
    return blocks
