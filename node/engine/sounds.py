"""Audio files of a prompt as the waveforms that a model's processor takes."""

from __future__ import annotations

import inspect
import io
import wave
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

DEFAULT_RATE = 16_000
"""Samples per second, of a processor that does not say."""


READ_APART = ("gemma4",)
"""Families in which mlx-vlm lays all rows of several sounds end to end, the padding of shorter ones included,
so that from the second on they are not where their marks are."""

LAST_TOKEN = {"gemma4": (640, 160)}
"""By family: samples of a token, and of how many at the end mlx-vlm's processor counts a token that its tower
gives no row for; the model's place for it would be filled with the first row again."""


class SoundError(ValueError):
    """Of one audio file; the message says why it cannot be used."""


def sampling_rate(processor: Any) -> int:
    """Samples per second that the processor takes."""
    rate = getattr(_extractor(processor), "sampling_rate", None)
    return int(rate or getattr(processor, "audio_sampling_rate", None) or DEFAULT_RATE)


def longest_sound(processor: Any) -> int:
    """Samples of the longest audio of which the processor drops nothing; 0 = it says of no bound."""
    extractor = _extractor(processor)
    bounds = [getattr(extractor, "n_samples", 0)]  # Whisper's
    parameters = inspect.signature(type(extractor).__call__).parameters if extractor is not None else {}
    if "truncation" in parameters and parameters["truncation"].default is True:
        bounds.append(getattr(parameters.get("max_length"), "default", 0))
    num_tokens, token_ms = (
        getattr(processor, name, None) for name in ("audio_seq_length", "audio_ms_per_token")
    )
    if num_tokens and token_ms:
        bounds.append(int(num_tokens * token_ms * sampling_rate(processor) / 1000))
    return min((bound for bound in bounds if isinstance(bound, int) and bound > 0), default=0)


def waveform(file: bytes, rate: int, longest: int = 0) -> Any:
    """The samples of a WAV file of 16 bits, mono, as float32 in [-1, 1). `rate`: what it must have;
    `longest`: the most samples, 0 = any number. Raises SoundError."""
    try:
        with wave.open(io.BytesIO(file)) as sound:
            form = (sound.getnchannels(), sound.getsampwidth(), sound.getframerate())
            data = sound.readframes(sound.getnframes())
    except (wave.Error, EOFError, OSError) as error:
        raise SoundError(f"it cannot be read as WAV ({error})") from error
    if form != (1, 2, rate):
        raise SoundError(
            f"it has {form[0]} channels of {8 * form[1]} bits at {form[2]} Hz; the model's processor takes "
            f"one of 16 bits at {rate} Hz"
        )
    samples = np.frombuffer(data[: len(data) // 2 * 2], dtype="<i2")
    if not samples.size:
        raise SoundError("it is empty")
    if longest and samples.size > longest:
        raise SoundError(
            f"it lasts {samples.size / rate:.1f} s, and the model's processor takes {longest / rate:.1f} s "
            "at most; it is refused because the processor would drop the rest. Send a shorter part of it"
        )
    return samples.astype(np.float32) / 32768.0


def with_whole_end(samples: Any, family: str) -> Any:
    """The samples, with silence behind them where the end is too short for the token that stands for it."""
    per_token, too_short = LAST_TOKEN.get(family, (1, 0))
    missing = too_short + 1 - len(samples) % per_token
    return np.pad(samples, (0, missing)) if 0 < missing <= too_short else samples


def embed_apart(whole: Any, ids: list[int], runs: Sequence[range], inputs: dict[str, Any]) -> Any:
    """What `whole.get_input_embeddings` gives, called for each sound alone. `runs`: where the tokens of each
    are in `ids`; `inputs`: the other arguments, one row for each sound in its features."""
    names = [name for name in ("input_features", "input_features_mask") if name in inputs]
    rows = {name: inputs.pop(name) for name in names}
    pixels = inputs.pop("pixel_values", None)
    found = whole.get_input_embeddings(mx.array([ids]), pixels, **inputs)
    embeds = found.inputs_embeds
    for at, run in enumerate(runs):
        alone = [
            0 if any(i in other for other in runs) and i not in run else token for i, token in enumerate(ids)
        ]
        own = {name: mx.array(value)[at : at + 1] for name, value in rows.items()}
        heard = whole.get_input_embeddings(mx.array([alone]), None, **own).inputs_embeds
        embeds = mx.concatenate(
            [embeds[:, : run.start], heard[:, run.start : run.stop], embeds[:, run.stop :]], axis=1
        )
    found.inputs_embeds = embeds
    return found


def _extractor(processor: Any) -> Any:
    return getattr(processor, "feature_extractor", None) or getattr(processor, "audio_processor", None)
