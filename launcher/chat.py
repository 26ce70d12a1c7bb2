"""A chat in the terminal, over the mesh's HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TextIO

from mlx_mesh.launcher.api import Api, ApiError
from mlx_mesh.launcher.text import harmless

PATH = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class ChatSettings:
    """What goes with every question; None = the server's default."""

    system: str = ""
    max_tokens: int | None = None
    temperature: float | None = None


class Chat:
    """One conversation. It is told whole with every question."""

    def __init__(self, api: Api, settings: ChatSettings) -> None:
        self._api = api
        self._settings = settings
        self._messages: list[dict[str, str]] = []
        if settings.system:
            self._messages.append({"role": "system", "content": settings.system})
        self._model = first_model(api)

    def ask(self, question: str) -> Iterator[str]:
        """Pieces of the answer. A question that fails is forgotten. Raises ApiError."""
        messages = [*self._messages, {"role": "user", "content": question}]
        body: dict[str, Any] = {"model": self._model, "messages": messages, "stream": True}
        if self._settings.max_tokens is not None:
            body["max_tokens"] = self._settings.max_tokens
        if self._settings.temperature is not None:
            body["temperature"] = self._settings.temperature
        answer = ""
        for event in self._api.stream(PATH, body):
            for choice in event.get("choices", []):
                piece = choice.get("delta", {}).get("content") or ""
                answer += piece
                if piece:
                    yield piece
        self._messages = [*messages, {"role": "assistant", "content": answer}]


def first_model(api: Api) -> str:
    """The id of the served model. Raises ApiError."""
    models = api.get("/v1/models").get("data", [])
    if not models:
        raise ApiError(f"{api.url} serves no model yet. See `mlx-mesh status`.")
    return str(models[0]["id"])


def ask_once(chat: Chat, prompt: str, out: TextIO) -> None:
    """Print one answer as it comes. Raises ApiError."""
    for piece in chat.ask(prompt):
        _write(out, piece)
    _write(out, "\n")


def converse(chat: Chat, out: TextIO) -> None:
    """Read questions until end of file. Ctrl-C ends an answer, or the chat when there is none."""
    while True:
        try:
            question = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            _write(out, "\n")
            return
        if not question:
            continue
        try:
            ask_once(chat, question, out)
        except KeyboardInterrupt:
            _write(out, "\n[stopped]\n")
        except ApiError as error:
            _write(out, f"\n[{error}]\n")


def _write(out: TextIO, text: str) -> None:
    """A model must not steer the terminal."""
    out.write("\n".join(harmless(line) for line in text.split("\n")))
    out.flush()
