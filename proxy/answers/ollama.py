"""Answers of Ollama's /api/chat and /api/generate: one JSON object a line."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from mlx_mesh.proxy.answers.base import Answer, read_arguments
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.logprobs import chat_logprobs
from mlx_mesh.proxy.pieces import (
    CallPiece,
    EndPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
    TokenSpan,
    collect,
)
from mlx_mesh.proxy.tokenizer import ModelTokenizer
from mlx_mesh.proxy.toolcalls import ToolCall
from mlx_mesh.proxy.usage import Usage


class OllamaAnswer(Answer):
    """`is_chat`: text stands in a message; else in `response`."""

    media_type = "application/x-ndjson"

    def __init__(self, *, model: str, tokenizer: ModelTokenizer, is_chat: bool, with_logprobs: bool) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._is_chat = is_chat
        self._with_logprobs = with_logprobs
        self._started = time.perf_counter()
        self._end = EndPiece("stop")

    def opening(self, num_sequences: int) -> bytes:
        return self.keepalive()

    def keepalive(self) -> bytes:
        return self._line({**self._head(), **self._said(), "done": False})

    def piece(self, index: int, piece: Piece) -> bytes:
        match piece:
            case TextPiece():
                more = self._logprobs(piece.tokens)
                return self._line({**self._head(), **self._said(piece.text), **more, "done": False})
            case ReasoningPiece():
                return self._line({**self._head(), **self._said(thinking=piece.text), "done": False})
            case CallPiece():
                return self._line({**self._head(), **self._said(calls=[piece.call]), "done": False})
            case EndPiece():
                self._end = piece
                return b""

    def closing(self, usage: Usage) -> bytes:
        return self._line({**self._head(), **self._said(), **self._done(usage)})

    def failure(self, error: ApiError) -> bytes:
        return self._line(error.ollama())

    def whole(self, parts: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        answer = collect(parts[0])
        self._end = answer.end
        said = self._said(answer.text, answer.reasoning, list(answer.calls))
        return {**self._head(), **said, **self._logprobs(answer.tokens), **self._done(usage)}

    def _head(self) -> dict[str, Any]:
        return {"model": self._model, "created_at": timestamp()}

    def _said(self, text: str = "", thinking: str = "", calls: Sequence[ToolCall] = ()) -> dict[str, Any]:
        more: dict[str, Any] = {"thinking": thinking} if thinking else {}
        if not self._is_chat:
            return {"response": text, **more}
        if calls:
            more["tool_calls"] = [
                {"function": {"name": call.name, "arguments": read_arguments(call.arguments)}}
                for call in calls
            ]
        return {"message": {"role": "assistant", "content": text, **more}}

    def _logprobs(self, tokens: Sequence[TokenSpan]) -> dict[str, Any]:
        if not self._with_logprobs:
            return {}
        return {"logprobs": chat_logprobs(self._tokenizer, tokens)["content"]}

    def _done(self, usage: Usage) -> dict[str, Any]:
        """Durations are nanoseconds."""
        return {
            "done": True,
            "done_reason": "length" if self._end.finish_reason == "length" else "stop",
            "total_duration": int((time.perf_counter() - self._started) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": usage.prompt_tokens,
            "prompt_eval_duration": int(usage.prefill_s * 1e9),
            "eval_count": usage.completion_tokens,
            "eval_duration": int(usage.decode_s * 1e9),
        }

    def _line(self, body: dict[str, Any]) -> bytes:
        return msgspec.json.encode(body) + b"\n"


def timestamp() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")
