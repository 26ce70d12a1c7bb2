"""Answers of /v1/chat/completions and /v1/completions."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from mlx_mesh.proxy.answers.base import COMMENT, Answer, data_event
from mlx_mesh.proxy.errors import ApiError
from mlx_mesh.proxy.logprobs import chat_logprobs, text_logprobs
from mlx_mesh.proxy.pieces import (
    CallPiece,
    Collected,
    EndPiece,
    Piece,
    ReasoningPiece,
    TextPiece,
    TokenSpan,
    argument_deltas,
    collect,
)
from mlx_mesh.proxy.tokenizer import ModelTokenizer
from mlx_mesh.proxy.toolcalls import ToolCall
from mlx_mesh.proxy.usage import Usage


class OpenAIAnswer(Answer):
    """What both have: choices in chunks, a usage chunk when asked for, `[DONE]`."""

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
        more: dict[str, Any] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._with_logprobs = with_logprobs
        self._with_usage_chunk = with_usage_chunk
        self._more = more or {}
        self._head = {
            "id": answer_id,
            "created": int(time.time()),
            "model": model_id,
            "system_fingerprint": fingerprint,
        }

    def closing(self, usage: Usage) -> bytes:
        chunk = data_event({**self._chunk([]), "usage": usage.openai()}) if self._with_usage_chunk else b""
        return chunk + b"data: [DONE]\n\n"

    def failure(self, error: ApiError) -> bytes:
        return data_event(error.envelope())

    def piece(self, index: int, piece: Piece) -> bytes:
        return b"".join(data_event(self._chunk([choice])) for choice in self._choices(index, piece))

    def whole(self, parts: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        choices = [self._whole_choice(index, one) for index, one in enumerate(map(collect, parts))]
        head = {**self._head, "object": self.object_name, "choices": choices, "usage": usage.openai()}
        return {**head, **self._more}

    @abstractmethod
    def _choices(self, index: int, piece: Piece) -> list[dict[str, Any]]: ...

    @abstractmethod
    def _whole_choice(self, index: int, answer: Collected) -> dict[str, Any]: ...

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {**self._head, "object": self.chunk_name, "choices": choices}
        return {**chunk, "usage": None} if self._with_usage_chunk else chunk


class ChatAnswer(OpenAIAnswer):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def opening(self, num_sequences: int) -> bytes:
        return b"".join(
            data_event(self._chunk([_delta(index, {"role": "assistant", "content": ""})]))
            for index in range(num_sequences)
        )

    def _choices(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        match piece:
            case TextPiece():
                return [_delta(index, {"content": piece.text}, logprobs=self._logprobs(piece.tokens))]
            case ReasoningPiece():
                return [_delta(index, _both_names(piece.text))]
            case CallPiece():
                return [_delta(index, {"tool_calls": [part]}) for part in _call_deltas(piece)]
            case EndPiece():
                return [_delta(index, {}, finish_reason=piece.finish_reason)]

    def _whole_choice(self, index: int, answer: Collected) -> dict[str, Any]:
        content = None if answer.calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.reasoning:
            message |= _both_names(answer.reasoning)
        if answer.calls:
            message["tool_calls"] = [_call(call) for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(answer.tokens),
            "finish_reason": answer.end.finish_reason,
        }

    def _logprobs(self, tokens: Sequence[TokenSpan]) -> dict[str, Any] | None:
        return chat_logprobs(self._tokenizer, tokens) if self._with_logprobs else None


class TextAnswer(OpenAIAnswer):
    """`echo`: what each choice's text begins with; '' = nothing. `prompt_ids`: of each choice, when token ids
    are to be shown; () = not. `num_kept`: of each prompt's choices the
    ones with the best mean log probability, () = all."""

    object_name = "text_completion"
    chunk_name = "text_completion"

    def __init__(
        self,
        *,
        echo: Sequence[str] = (),
        prompt_ids: Sequence[Sequence[int]] = (),
        num_per_prompt: int = 1,
        num_kept: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._echo = echo
        self._prompt_ids = prompt_ids
        self._num_per_prompt = num_per_prompt
        self._num_kept = num_kept

    def opening(self, num_sequences: int) -> bytes:
        chunks = [
            data_event(self._chunk([self._with_prompt(index, self._choice(index, text, (), None))]))
            for index, text in enumerate(self._echo)
            if text or self._prompt_ids
        ]
        return b"".join(chunks) or COMMENT

    def whole(self, parts: Sequence[Sequence[Piece]], usage: Usage) -> dict[str, Any]:
        answer = super().whole(parts, usage)
        if self._num_kept < self._num_per_prompt:
            answer["choices"] = self._best(answer["choices"], [collect(one) for one in parts])
        return answer

    def _best(self, choices: list[dict[str, Any]], answers: list[Collected]) -> list[dict[str, Any]]:
        kept: list[dict[str, Any]] = []
        for first in range(0, len(choices), self._num_per_prompt):
            group = range(first, first + self._num_per_prompt)
            ranked = sorted(group, key=lambda at: -_mean_logprob(answers[at].tokens))
            kept += [choices[at] for at in ranked[: self._num_kept]]
        return [{**choice, "index": index} for index, choice in enumerate(kept)]

    def _choices(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        match piece:
            case TextPiece():
                return [self._choice(index, piece.text, piece.tokens, None)]
            case EndPiece():
                return [self._choice(index, "", (), piece.finish_reason)]
            case _:
                raise AssertionError("plain text has neither reasoning nor calls")

    def _whole_choice(self, index: int, answer: Collected) -> dict[str, Any]:
        echo = self._echo[index] if self._echo else ""
        choice = self._choice(index, echo + answer.text, answer.tokens, answer.end.finish_reason)
        return self._with_prompt(index, choice)

    def _with_prompt(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        """Once for each choice."""
        return choice | {"prompt_token_ids": list(self._prompt_ids[index])} if self._prompt_ids else choice

    def _choice(
        self, index: int, text: str, tokens: Sequence[TokenSpan], reason: str | None
    ) -> dict[str, Any]:
        logprobs = text_logprobs(self._tokenizer, tokens) if self._with_logprobs else None
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return choice | {"token_ids": [token.token_id for token in tokens]} if self._prompt_ids else choice


def _mean_logprob(tokens: Sequence[TokenSpan]) -> float:
    logprobs = [token.logprobs.logprob for token in tokens if token.logprobs is not None]
    return sum(logprobs) / len(logprobs) if logprobs else float("-inf")


def _both_names(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def _call(call: ToolCall) -> dict[str, Any]:
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _call_deltas(piece: CallPiece) -> list[dict[str, Any]]:
    """The head with id and name, then the arguments in parts."""
    head = {
        "index": piece.number,
        "id": piece.call.id,
        "type": "function",
        "function": {"name": piece.call.name, "arguments": ""},
    }
    return [
        head,
        *({"index": piece.number, "function": {"arguments": part}} for part in argument_deltas(piece.call)),
    ]


def _delta(
    index: int,
    delta: dict[str, Any],
    *,
    logprobs: dict[str, Any] | None = None,
    finish_reason: str | None = None,
) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
