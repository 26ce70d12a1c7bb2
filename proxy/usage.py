"""What an answer used: its counts and rates. Each dialect writes them under its own names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.assembler import Tally
from mlx_mesh.proxy.metrics import Metrics


@dataclass(frozen=True, slots=True)
class Usage:
    """Over all sequences of a request; a prompt that several share counts once."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int
    prefill_s: float
    decode_s: float
    num_timed: int  # tokens generated in decode_s

    @classmethod
    def of(cls, tallies: Sequence[Tally]) -> Usage:
        own = [tally for tally in tallies if not tally.shares_prompt]
        started = [tally for tally in tallies if tally.completion_tokens]
        decode_s = 0.0
        if started:
            decode_s = max(tally.last_at for tally in started) - min(tally.first_at for tally in started)
        return cls(
            prompt_tokens=sum(tally.prompt_tokens for tally in own),
            completion_tokens=sum(tally.completion_tokens for tally in tallies),
            cached_tokens=sum(tally.cached_tokens for tally in own),
            reasoning_tokens=sum(tally.reasoning_tokens for tally in tallies),
            prefill_s=sum(tally.prefill_s for tally in own),
            decode_s=decode_s,
            num_timed=sum(tally.completion_tokens - 1 for tally in started),
        )

    @property
    def decode_rate(self) -> float:
        """Tokens a second after the first ones; 0.0 while there is only one token to measure."""
        return self.num_timed / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def prefill_rate(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prefill_s if self.prefill_s > 0 else 0.0

    def openai(self) -> dict[str, Any]:
        """OpenAI's names, the newer input/output names, rates, and timings under llama.cpp's names."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "input_tokens": self.prompt_tokens,
            "output_tokens": self.completion_tokens,
            "tokens_per_second": round(self.decode_rate, 2),
            "prompt_tokens_per_second": round(self.prefill_rate, 2),
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "input_tokens_details": {"cached_tokens": self.cached_tokens},
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "timings": {
                "prompt_n": self.prompt_tokens - self.cached_tokens,
                "cache_n": self.cached_tokens,
                "prompt_ms": round(self.prefill_s * 1000, 3),
                "prompt_per_second": round(self.prefill_rate, 2),
                "predicted_n": self.completion_tokens,
                "predicted_ms": round(self.decode_s * 1000, 3),
                "predicted_per_second": round(self.decode_rate, 2),
            },
        }


def count(metrics: Metrics, tallies: Sequence[Tally]) -> None:
    """Add an answer, complete or not, to the process's counters."""
    for tally in tallies:
        if not tally.first_at:
            continue
        if not tally.shares_prompt:
            metrics.prompt_tokens.inc(tally.prompt_tokens)
            metrics.cached_tokens.inc(tally.cached_tokens)
        metrics.completion_tokens.inc(tally.completion_tokens)
        metrics.first_token_s.observe(tally.first_at - tally.submitted_at)
        if (rate := Usage.of((tally,)).decode_rate) > 0:
            metrics.decode_rate.observe(rate)
