"""Answers of /v1/responses: output items, and the events in which they grow."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from mlx_mesh.proxy.answers.base import Answer, named_event
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.logprobs import chat_logprobs
from mlx_mesh.proxy.pieces import (
    CallPiece,
    EndPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
    TokenSpan,
    argument_deltas,
)
from mlx_mesh.proxy.schemas.responses import ResponsesRequest
from mlx_mesh.proxy.tokenizer import ModelTokenizer
from mlx_mesh.proxy.toolcalls import ToolCall
from mlx_mesh.proxy.usage import Usage

Event = tuple[str, dict[str, Any]]


class ResponsesAnswer(Answer):
    """`on_complete`: called once with the finished body, before the client has it."""

    def __init__(
        self,
        *,
        answer_id: str,
        model_id: str,
        body: ResponsesRequest,
        tokenizer: ModelTokenizer,
        on_complete: Callable[[dict[str, Any]], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = body.num_logprobs is not None
        self._on_complete = on_complete
        self._output: list[dict[str, Any]] = []
        self._growing: type[Piece] | None = None  # the kind of the last item, if it is not complete
        self._end: EndPiece | None = None
        self._num_events = 0
        self._response = _response(answer_id, model_id, body)

    # ------------------------------------------------------------ the dialect

    def opening(self, num_sequences: int) -> bytes:
        events = [(f"response.{name}", {"response": self._response}) for name in ("created", "in_progress")]
        return self._write(events)

    def piece(self, index: int, piece: Piece) -> bytes:
        return self._write(self._grow(piece))

    def closing(self, usage: Usage) -> bytes:
        events = self._settle()
        body = self._finished(usage)
        return self._write([*events, (f"response.{body['status']}", {"response": body})])

    def failure(self, error: ApiError) -> bytes:
        body = {
            **self._response,
            "status": "failed",
            "output": self._output,
            "error": {"code": "server_error", "message": str(error)},
        }
        plain = {"code": error.code, "message": str(error), "param": error.param}
        return self._write([("error", plain), ("response.failed", {"response": body})])

    def whole(self, parts: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        (pieces,) = parts
        for piece in pieces:
            self._grow(piece)
        self._settle()
        return self._finished(usage)

    def _write(self, events: Sequence[Event]) -> bytes:
        written = []
        for name, fields in events:
            written.append(named_event(name, {"type": name, "sequence_number": self._num_events, **fields}))
            self._num_events += 1
        return b"".join(written)

    def _finished(self, usage: Usage) -> dict[str, Any]:
        is_cut = self._end is not None and self._end.finish_reason == "length"
        body = {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": self._output,
            "usage": _usage(usage),
        }
        self._on_complete(body)
        return body

    # ------------------------------------------------------------ items

    def _grow(self, piece: Piece) -> list[Event]:
        match piece:
            case TextPiece():
                return self._grow_text(piece)
            case ReasoningPiece():
                begin = [] if self._growing is ReasoningPiece else [*self._settle(), *self._begin_reasoning()]
                self._part()["text"] += piece.text
                return [*begin, ("response.reasoning_text.delta", {**self._where(), "delta": piece.text})]
            case CallPiece():
                return [*self._settle(), *self._call(piece.call)]
            case EndPiece():
                self._end = piece
                return []

    def _grow_text(self, piece: TextPiece) -> list[Event]:
        if not piece.text and not (self._with_logprobs and piece.tokens):
            return []
        begin = [] if self._growing is TextPiece else [*self._settle(), *self._begin_text()]
        logprobs = self._logprobs(piece.tokens)
        part = self._part()
        part["text"] += piece.text
        part["logprobs"] += logprobs
        delta = {**self._where(), "delta": piece.text, "logprobs": logprobs}
        return [*begin, ("response.output_text.delta", delta)]

    def _begin_text(self) -> list[Event]:
        item = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "status": "in_progress",
            "content": [{"type": "output_text", "text": "", "annotations": [], "logprobs": []}],
        }
        return self._begin(TextPiece, item)

    def _begin_reasoning(self) -> list[Event]:
        item = {
            "id": f"rs_{uuid.uuid4().hex}",
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": ""}],
        }
        return self._begin(ReasoningPiece, item)

    def _begin(self, kind: type[Piece], item: dict[str, Any]) -> list[Event]:
        self._output.append(item)
        self._growing = kind
        empty = {**item, "content": []}
        return [
            ("response.output_item.added", {"output_index": self._last, "item": empty}),
            ("response.content_part.added", {**self._where(), "part": dict(item["content"][0])}),
        ]

    def _settle(self) -> list[Event]:
        """Complete the item that is growing."""
        if self._growing is None:
            return []
        item, part, where = self._output[-1], self._part(), self._where()
        is_cut = self._end is not None and self._end.finish_reason == "length"
        item["status"] = "incomplete" if is_cut else "completed"
        if self._growing is TextPiece:
            done = {**where, "text": part["text"], "logprobs": part["logprobs"]}
            text: Event = ("response.output_text.done", done)
        else:
            text = ("response.reasoning_text.done", {**where, "text": part["text"]})
        self._growing = None
        return [
            text,
            ("response.content_part.done", {**where, "part": part}),
            ("response.output_item.done", {"output_index": self._last, "item": item}),
        ]

    def _call(self, call: ToolCall) -> list[Event]:
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
            "status": "completed",
        }
        self._output.append(item)
        where = {"output_index": self._last, "item_id": item["id"]}
        name = "response.function_call_arguments"
        begun = {**item, "arguments": "", "status": "in_progress"}
        return [
            ("response.output_item.added", {"output_index": self._last, "item": begun}),
            *((f"{name}.delta", {**where, "delta": part}) for part in argument_deltas(call)),
            (f"{name}.done", {**where, "name": call.name, "arguments": call.arguments}),
            ("response.output_item.done", {"output_index": self._last, "item": item}),
        ]

    @property
    def _last(self) -> int:
        return len(self._output) - 1

    def _part(self) -> dict[str, Any]:
        part: dict[str, Any] = self._output[-1]["content"][0]
        return part

    def _where(self) -> dict[str, Any]:
        return {"item_id": self._output[-1]["id"], "output_index": self._last, "content_index": 0}

    def _logprobs(self, tokens: Sequence[TokenSpan]) -> list[dict[str, Any]]:
        if not self._with_logprobs:
            return []
        content: list[dict[str, Any]] = chat_logprobs(self._tokenizer, tokens)["content"]
        return content


def _response(answer_id: str, model_id: str, body: ResponsesRequest) -> dict[str, Any]:
    """The response as it is before anything is generated, with what was asked for."""
    return {
        "id": answer_id,
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "background": False,
        "completed_at": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": model_id,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": (body.reasoning or {}).get("effort"), "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
    }


def _usage(usage: Usage) -> dict[str, Any]:
    names = (
        "input_tokens",
        "output_tokens",
        "total_tokens",
        "output_tokens_details",
        "tokens_per_second",
        "timings",
    )
    ours = usage.openai()
    return {
        **{name: ours[name] for name in names},
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
    }
