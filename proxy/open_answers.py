"""Answers that are being generated, by the ids under which somebody may ask for their end."""

from __future__ import annotations

from typing import Protocol

from mlx_mesh.mesh.errors import MeshError


class CancelledByRequest(MeshError):
    """Somebody asked for the end of this answer by its id."""


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class OpenAnswers:
    """Ids of answers and of HTTP requests; an answer is here from its start to its end."""

    def __init__(self) -> None:
        self._open: dict[str, Cancellable] = {}

    def add(self, ids: tuple[str, ...], answer: Cancellable) -> None:
        for one in ids:
            self._open[one] = answer

    def remove(self, ids: tuple[str, ...], answer: Cancellable) -> None:
        for one in ids:
            if self._open.get(one) is answer:
                del self._open[one]

    def cancel(self, answer_id: str) -> bool:
        """False when no open answer has this id."""
        answer = self._open.get(answer_id)
        if answer is not None:
            answer.cancel()
        return answer is not None
