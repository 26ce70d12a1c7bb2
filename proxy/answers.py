"""Answers in OpenAI's shapes, streamed and whole: one class per endpoint."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from mlx_mesh.proxy.generation import Piece, TokenSpan
from mlx_mesh.proxy.logprobs import chat_logprobs, text_logprobs
from mlx_mesh.proxy.tokenizer import ModelTokenizer


class Answer(ABC):
    """The shapes of one answer. `usage_chunk`: whether a stream ends with one."""

    object_name: str
    chunk_name: str

    def __init__(
        self,
        *,
        answer_id: str,
        model_id: str,
        fingerprint: str,
        tokenizer: ModelTokenizer,
        with_logprobs: bool,
        with_usage_chunk: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self.with_usage_chunk = with_usage_chunk
        self._head = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model_id,
            "system_fingerprint": fingerprint,
        }

    @abstractmethod
    def opening(self, num_sequences: int) -> list[dict[str, Any]]:
        """Chunks that are sent before anything is generated."""

    @abstractmethod
    def _text_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A streamed choice with new text."""

    @abstractmethod
    def _last_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        """A streamed choice with the finish_reason."""

    @abstractmethod
    def _whole_choice(
        self, index: int, text: str, tokens: Sequence[TokenSpan], reason: str
    ) -> dict[str, Any]:
        """A choice of a whole answer."""

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """What one piece adds to a stream: text, then, once per sequence, the finish_reason."""
        chunks = []
        if piece.text or piece.tokens:
            chunks.append(self._chunk([self._text_choice(index, piece)]))
        if piece.finish_reason is not None:
            chunks.append(self._chunk([self._last_choice(index, piece)]))
        return chunks

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The chunk after the last choice that `stream_options.include_usage` asks for."""
        return {**self._chunk([]), "usage": usage}

    def whole(self, pieces: Sequence[Sequence[Piece]], usage: dict[str, Any]) -> dict[str, Any]:
        """The answer that is not streamed, from all pieces of each sequence."""
        choices = []
        for index, parts in enumerate(pieces):
            text = "".join(piece.text for piece in parts)
            tokens = [token for piece in parts for token in piece.tokens]
            reason = parts[-1].finish_reason
            assert reason is not None, "a sequence ended without a finish_reason"
            choices.append(self._whole_choice(index, text, tokens, reason))
        return {**self._head, "object": self.object_name, "choices": choices, "usage": usage}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_name, "choices": choices}
        return {**chunk, "usage": None} if self.with_usage_chunk else chunk


class ChatAnswer(Answer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self, num_sequences: int) -> list[dict[str, Any]]:
        return [
            self._chunk([_delta(index, {"role": "assistant", "content": ""})])
            for index in range(num_sequences)
        ]

    def _text_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return _delta(index, {"content": piece.text}, logprobs=self._logprobs(piece.tokens))

    def _last_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return _delta(index, {}, finish_reason=piece.finish_reason)

    def _whole_choice(
        self, index: int, text: str, tokens: Sequence[TokenSpan], reason: str
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(tokens),
            "finish_reason": reason,
        }

    def _logprobs(self, tokens: Sequence[TokenSpan]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._with_logprobs else None


class TextAnswer(Answer):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def opening(self, num_sequences: int) -> list[dict[str, Any]]:
        return []

    def _text_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._choice(index, piece.text, piece.tokens, None)

    def _last_choice(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._choice(index, "", (), piece.finish_reason)

    def _whole_choice(
        self, index: int, text: str, tokens: Sequence[TokenSpan], reason: str
    ) -> dict[str, Any]:
        return self._choice(index, text, tokens, reason)

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenSpan], reason: str | None
    ) -> dict[str, Any]:
        logprobs = text_logprobs(self._tokenizer, tokens) if self._with_logprobs else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}


def _delta(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
