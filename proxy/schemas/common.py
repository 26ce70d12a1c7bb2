"""Request fields that all generating endpoints share."""

from __future__ import annotations

from typing import Annotated, Any

import pydantic
from pydantic import ConfigDict, Field

from mlx_mesh.proxy.media.limits import MAX_PIXELS
from mlx_mesh.proxy.schemas.fields import Refused

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 16
MAX_SALT_CHARS = 128

FILTERS_THAT_ARE_NOT = {
    "typical_p": Refused("this filter does not exist here.", (1.0, 1)),
    "top_n_sigma": Refused("this filter does not exist here.", (-1.0, -1, 0.0, 0)),
    "p_less": Refused("this filter does not exist here.", (False,)),
}
"""Of other servers for MLX; mlx-lm has none of them."""

StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]


class Strict(pydantic.BaseModel):
    """No conversions ("0.5" is not a number) and no fields that are not listed."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, hide_input_in_errors=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # accepted: padding against traffic analysis is not sent


class CoreSampling(Strict):
    """What every dialect of ours takes. OpenAI's ranges; top_k, min_p and repetition_penalty as in mlx-lm."""

    model: str | None = None
    stream: bool | None = None
    temperature: float | None = Field(default=None, ge=0, le=2, allow_inf_nan=False)
    top_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float | None = Field(default=None, gt=0, le=10, allow_inf_nan=False)
    repetition_context_size: int | None = Field(default=None, ge=1, le=4096)
    presence_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float | None = Field(default=None, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]] | None = None
    xtc_probability: float | None = Field(default=None, ge=0, le=1, allow_inf_nan=False)
    xtc_threshold: float | None = Field(default=None, ge=0, le=0.5, allow_inf_nan=False)
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**63)
    max_time_s: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    cache_salt: str | None = Field(default=None, min_length=1, max_length=MAX_SALT_CHARS)
    skip_prefix_cache: bool | None = None


class PixelFields(Strict):
    """How many pixels images are scaled to, as in mlx-vlm; `mm_processor_kwargs` is vLLM's place for it, and
    with `media_io_kwargs` the one for the frames of videos. Checked in `media.pixels` and
    `media.frame_wish`."""

    min_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    max_pixels: int | None = Field(default=None, ge=1, le=MAX_PIXELS)
    mm_processor_kwargs: dict[str, Any] | None = None
    media_io_kwargs: dict[str, Any] | None = None


class SamplingFields(CoreSampling):
    """The two completions endpoints."""

    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    # The form of the answer; checked in `convert.structure`. All but the first are vLLM's names.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    @property
    def wants_usage_chunk(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)
