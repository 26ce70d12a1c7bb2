"""How long a step should take on this rank, learned from the steps before it."""

from __future__ import annotations

_WEIGHT = 0.2  # of the newest step in the running means


class Pace:
    """Seconds of a step = a part of its own + a part per prompt token; both are running means."""

    def __init__(self) -> None:
        self._step_s: float | None = None
        self._token_s: float | None = None

    def expect(self, num_prompt_tokens: int) -> float:
        """Predicted seconds, below 0 when a part of it was never measured."""
        if num_prompt_tokens == 0:
            return -1.0 if self._step_s is None else self._step_s
        if self._token_s is None:
            return -1.0
        return (self._step_s or 0.0) + self._token_s * num_prompt_tokens

    def learn(self, num_prompt_tokens: int, seconds: float) -> None:
        """Take in a step that was computed."""
        if num_prompt_tokens == 0:
            self._step_s = _mean(self._step_s, seconds)
        else:
            rest_s = max(0.0, seconds - (self._step_s or 0.0))
            self._token_s = _mean(self._token_s, rest_s / num_prompt_tokens)


def _mean(mean: float | None, value: float) -> float:
    return value if mean is None else mean + _WEIGHT * (value - mean)
