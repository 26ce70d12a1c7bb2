"""Answers of Anthropic's /v1/messages: blocks of text, thinking and tool use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_mesh.proxy.answers.base import Answer, named_event, read_arguments
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.pieces import (
    Block,
    CallPiece,
    EndPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
    argument_deltas,
    blocks_of,
    collect,
)
from mlx_mesh.proxy.toolcalls import ToolCall
from mlx_mesh.proxy.usage import Usage

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer(Answer):
    """`num_prompt`: tokens of the prompt, which a stream says before anything is generated."""

    def __init__(self, *, answer_id: str, model_id: str, num_prompt: int) -> None:
        self._num_prompt = num_prompt
        self._head = {"id": answer_id, "type": "message", "role": "assistant", "model": model_id}
        self._num_blocks = 0
        self._open: type[Piece] | None = None  # the kind of the block that is being written
        self._end = EndPiece("stop")

    def opening(self, num_sequences: int) -> bytes:
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(self._num_prompt, 0), "output_tokens": 0},
        }
        return named_event("message_start", {"type": "message_start", "message": message}) + self.keepalive()

    def keepalive(self) -> bytes:
        return named_event("ping", {"type": "ping"})

    def piece(self, index: int, piece: Piece) -> bytes:
        match piece:
            case TextPiece() if piece.text:
                return self._in_block(piece, {"type": "text_delta", "text": piece.text})
            case ReasoningPiece():
                return self._in_block(piece, {"type": "thinking_delta", "thinking": piece.text})
            case CallPiece():
                return self._call(piece.call)
            case EndPiece():
                self._end = piece
        return b""

    def closing(self, usage: Usage) -> bytes:
        ending = self._close()
        if self._num_blocks == 0:  # clients expect a block
            ending = self._start(TextPiece, {"type": "text", "text": ""}) + self._close()
        delta = {
            "type": "message_delta",
            "delta": _stop(self._end),
            "usage": {
                **_usage(usage.prompt_tokens, usage.cached_tokens),
                "output_tokens": usage.completion_tokens,
            },
        }
        return (
            ending
            + named_event("message_delta", delta)
            + named_event("message_stop", {"type": "message_stop"})
        )

    def failure(self, error: ApiError) -> bytes:
        return named_event("error", error.anthropic())

    def whole(self, parts: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        (pieces,) = parts
        blocks = [_block(block) for block in blocks_of(pieces)]
        return {
            **self._head,
            "content": blocks or [{"type": "text", "text": ""}],
            **_stop(collect(pieces).end),
            "usage": {
                **_usage(usage.prompt_tokens, usage.cached_tokens),
                "output_tokens": usage.completion_tokens,
            },
        }

    # ------------------------------------------------------------ blocks

    def _in_block(self, piece: TextPiece | ReasoningPiece, delta: dict[str, Any]) -> bytes:
        begin = b""
        if self._open is not type(piece):
            begin = self._close() + self._start(type(piece), _block((type(piece), "")))
        return begin + self._delta(delta)

    def _call(self, call: ToolCall) -> bytes:
        head = {"type": "tool_use", "id": call.id, "name": call.name, "input": {}}
        begin = self._close() + self._start(CallPiece, head)
        deltas = [
            self._delta({"type": "input_json_delta", "partial_json": part}) for part in argument_deltas(call)
        ]
        return begin + b"".join(deltas) + self._close()

    def _start(self, kind: type[Piece], block: dict[str, Any]) -> bytes:
        self._open = kind
        event = {"type": "content_block_start", "index": self._num_blocks, "content_block": block}
        return named_event("content_block_start", event)

    def _delta(self, delta: dict[str, Any]) -> bytes:
        event = {"type": "content_block_delta", "index": self._num_blocks, "delta": delta}
        return named_event("content_block_delta", event)

    def _close(self) -> bytes:
        """End the block that is open, if one is."""
        if self._open is None:
            return b""
        ending = b""
        if self._open is ReasoningPiece:
            ending = self._delta({"type": "signature_delta", "signature": ""})
        event = {"type": "content_block_stop", "index": self._num_blocks}
        self._open = None
        self._num_blocks += 1
        return ending + named_event("content_block_stop", event)


def _block(block: Block) -> dict[str, Any]:
    if isinstance(block, ToolCall):
        return {
            "type": "tool_use",
            "id": block.id,
            "name": block.name,
            "input": read_arguments(block.arguments),
        }
    kind, text = block
    if kind is ReasoningPiece:
        return {"type": "thinking", "thinking": text, "signature": ""}
    return {"type": "text", "text": text}


def _stop(end: EndPiece) -> dict[str, Any]:
    reason = _STOP_REASONS[end.finish_reason]
    if end.stop_string is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": end.stop_string}


def _usage(num_prompt: int, num_cached: int) -> dict[str, Any]:
    """Anthropic counts what came from a cache apart."""
    return {
        "input_tokens": num_prompt - num_cached,
        "cache_read_input_tokens": num_cached,
        "cache_creation_input_tokens": 0,
    }
