"""What an answer used, under OpenAI's names, under the newer input/output names, and with rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_mesh.proxy.generation import Tally
from mlx_mesh.proxy.metrics import Metrics


def usage(tallies: Sequence[Tally]) -> dict[str, Any]:
    """`tokens_per_second` is the decode rate, from the first token to the last; prefill has its own."""
    num_prompt = sum(tally.prompt_tokens for tally in tallies)
    num_completion = sum(tally.completion_tokens for tally in tallies)
    num_cached = sum(tally.cached_tokens for tally in tallies)
    prefill_s = sum(tally.prefill_s for tally in tallies)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_completion,
        "total_tokens": num_prompt + num_completion,
        "input_tokens": num_prompt,
        "output_tokens": num_completion,
        "tokens_per_second": round(decode_rate(tallies), 2),
        "prompt_tokens_per_second": round((num_prompt - num_cached) / prefill_s, 2) if prefill_s > 0 else 0.0,
        "prompt_tokens_details": {"cached_tokens": num_cached},
        "completion_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {"cached_tokens": num_cached},
        "output_tokens_details": {"reasoning_tokens": 0},
    }


def decode_rate(tallies: Sequence[Tally]) -> float:
    """Tokens a second after the first ones; 0.0 while there is only one token to measure."""
    started = [tally for tally in tallies if tally.completion_tokens]
    if not started:
        return 0.0
    seconds = max(tally.last_at for tally in started) - min(tally.first_at for tally in started)
    num_timed = sum(tally.completion_tokens - 1 for tally in started)
    return num_timed / seconds if seconds > 0 else 0.0


def count(metrics: Metrics, tallies: Sequence[Tally]) -> None:
    """Add an answer, complete or not, to the process's counters."""
    for tally in tallies:
        if not tally.first_at:
            continue
        metrics.prompt_tokens.inc(tally.prompt_tokens)
        metrics.cached_tokens.inc(tally.cached_tokens)
        metrics.completion_tokens.inc(tally.completion_tokens)
        metrics.first_token_s.observe(tally.first_at - tally.submitted_at)
        if (rate := decode_rate((tally,))) > 0:
            metrics.decode_rate.observe(rate)
