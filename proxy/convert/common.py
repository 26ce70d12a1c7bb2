"""The common request behind every dialect, and the sequences that it becomes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from mlx_mesh.mesh.kv_budget import KvBudget
from mlx_mesh.mesh.messages import GenerateRequest, Media, SamplingParams
from mlx_mesh.proxy.assembler import NewSequence
from mlx_mesh.proxy.convert.prefixes import PrefixChoice
from mlx_mesh.proxy.convert.structure import ANY_FORM, Form, grammar_of
from mlx_mesh.proxy.convert.tool_turns import for_template
from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.markup import Markup, Region
from mlx_mesh.proxy.media.frame_wish import NO_WISH, FrameWish
from mlx_mesh.proxy.media.item import Item, items_of, media_of, of_kind, params_of
from mlx_mesh.proxy.media.pixels import NO_BOUNDS, PixelBounds
from mlx_mesh.proxy.media.placing import check_count, place
from mlx_mesh.proxy.media.stills import with_stills
from mlx_mesh.proxy.metrics import Metrics
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import EncodedChat, PromptTooLong

CLAMPED_HEADER = "x-mlx-mesh-max-tokens-clamped"

UNKNOWN_CONTEXT_MAX_TOKENS = 4096
"""The default of max_tokens for a model that does not say how long its context is."""

MAX_SEQUENCES = 64
"""Sequences of one request: prompts times choices."""

_SEED_STRIDE = 0x9E3779B97F4A7C15  # odd, so that the choices of a request never share a seed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """How to generate, whatever the prompt."""

    id: str
    sampling: SamplingParams
    max_tokens: int | None = None  # None = what the context leaves
    stop_strings: tuple[str, ...] = ()
    num_logprobs: int | None = None
    num_choices: int = 1  # of each prompt
    max_time_s: float = 0.0  # from submission to the end; 0 = only the mesh's own limit
    form: Form = ANY_FORM
    prefixes: PrefixChoice = field(default_factory=PrefixChoice)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(Sequences):
    """A conversation to answer. `messages` and `tools` as chat templates read them."""

    messages: list[dict[str, Any]]
    tools: tuple[dict[str, Any], ...] = ()
    one_call: bool = False
    template_options: dict[str, Any] = field(default_factory=dict)
    strip_thinking: bool = False
    thinking_budget: int | None = None
    continues_last: bool = False  # the answer goes on with the last, an assistant's turn
    param: str = "messages"  # the field that errors about the prompt name
    pixels: PixelBounds = NO_BOUNDS
    frames: FrameWish = NO_WISH


@dataclass(frozen=True, slots=True)
class Prepared:
    """All sequences of one HTTP request; `headers` tell the client of a clamp."""

    id: str
    sequences: tuple[NewSequence, ...]
    headers: dict[str, str] = field(default_factory=dict)


async def prepare_chat(services: Services, job: ChatJob) -> Prepared:
    """Raises ApiError and the tokenizer's errors."""
    tokenizer = services.tokenizer
    room = Room.of(services)
    try:
        encoded, items = await encode_job(services, job, room.num_tokens)
    except PromptTooLong as error:
        raise room.too_long(error.at_least, job.param) from error
    markup = tokenizer.markup
    thinking_end_ids: tuple[int, ...] = ()
    if job.thinking_budget is not None and markup.think_end:
        thinking_end_ids = tokenizer.plain_ids(f"\n{markup.think_end}\n\n")
    return prepare(
        services,
        job,
        [encoded.ids],
        job.param,
        NewSequence(
            request=GenerateRequest(id="", prompt_ids=(), max_tokens=0),
            markup=markup,
            region=encoded.region,
            tools=job.tools,
            one_call=job.one_call,
            strip_thinking=job.strip_thinking,
            thinking_budget=job.thinking_budget if thinking_end_ids else None,
            thinking_end_ids=thinking_end_ids,
            media_params=params_of(items),
        ),
        grammar=await grammar_of(services, job.form, markup, encoded.region),
        cache_points=encoded.shared_lengths,
        system_tokens=encoded.system_length,
        media=_media(encoded, items, job.pixels),
    )


def _media(encoded: EncodedChat, items: Sequence[Item], pixels: PixelBounds) -> Media | None:
    bounds = pixels.with_detail(of_kind(items, "image"))
    return media_of(items, encoded.text, bounds.least, bounds.most)


async def encode_job(services: Services, job: ChatJob, limit: int = 0) -> tuple[EncodedChat, Sequence[Item]]:
    """The prompt's tokens, in which a picture, audio or video is its mark alone, and those items in order,
    read and checked. Raises ApiError, PromptTooLong for a limit other than 0, and the tokenizer's errors."""
    tokenizer, media = services.tokenizer, services.media
    options = dict(job.template_options)
    if job.tools:
        options["tools"] = list(job.tools)
    if job.continues_last:
        options |= {"add_generation_prompt": False, "continue_final_message": True}
    messages = for_template(job.messages, tokenizer)
    marks = media.marks
    items = items_of(messages)
    for item in items:  # of a stored response, or the model went in this moment
        if item.kind not in marks.of and not (item.kind == "video" and media.shows_stills):
            raise media.parts.unsupported(item.param, item.kind)
    if not marks.of:
        return await tokenizer.encode_chat(messages, limit=limit, template_options=options), ()
    await media.read(items, job.frames, job.num_choices, services.metrics)
    placed = place(with_stills(messages) if media.shows_stills else messages, marks)
    encoded = await tokenizer.encode_chat(
        placed.turns,
        limit=limit,
        template_options=marks.harmless(options),
        is_shared=lambda text: not (placed.items and marks.count(text)),
    )
    check_count(encoded.text, marks, placed.items)
    return encoded, placed.items


PLAIN = NewSequence(
    request=GenerateRequest(id="", prompt_ids=(), max_tokens=0), markup=Markup(), region=Region.ANSWER
)
"""Text without tags."""


def prepare(
    services: Services,
    job: Sequences,
    prompts: Sequence[tuple[int, ...]],
    param: str,
    like: NewSequence = PLAIN,
    continues_prompt: bool = False,
    grammar: str = "",
    cache_points: tuple[int, ...] = (),
    system_tokens: int = 0,
    media: Media | None = None,
) -> Prepared:
    """The sequences of all prompts, each prompt's choices side by side. Raises ApiError 400."""
    num_sequences = len(prompts) * job.num_choices
    if num_sequences > MAX_SEQUENCES:
        raise invalid(
            f"At most {MAX_SEQUENCES} answers to one request; this asks for {num_sequences}.", param="n"
        )
    special = [services.tokenizer.special_token_id(stop) for stop in job.stop_strings]
    end_ids = dict.fromkeys((*services.tokenizer.end_token_ids, *(i for i in special if i is not None)))
    room = Room.of(services)
    headers: dict[str, str] = {}
    sequences: list[NewSequence] = []
    for prompt_ids in prompts:
        max_tokens = room.for_answer(len(prompt_ids), job.max_tokens, param)
        if job.max_tokens is not None and max_tokens < job.max_tokens:
            headers[CLAMPED_HEADER] = str(max_tokens)
        for choice in range(job.num_choices):
            request = GenerateRequest(
                id=job.id if num_sequences == 1 else f"{job.id}-{len(sequences)}",
                prompt_ids=prompt_ids,
                max_tokens=max_tokens,
                sampling=_of_choice(job.sampling, choice),
                stop_token_ids=tuple(end_ids),
                logprobs=job.num_logprobs,
                max_time_s=job.max_time_s,
                grammar=grammar,
                cache_salt=job.prefixes.salt,
                skip_prefix_cache=job.prefixes.is_skipped,
                reset_prefix=job.prefixes.is_reset,
                cache_points=cache_points,
                system_tokens=system_tokens,
                media=media,
            )
            sequences.append(
                dataclasses.replace(
                    like,
                    request=request,
                    stop_strings=job.stop_strings,
                    prompt_tail=prompt_ids if continues_prompt else (),
                    shares_prompt=choice > 0,
                )
            )
    return Prepared(job.id, tuple(sequences), headers)


def _of_choice(sampling: SamplingParams, choice: int) -> SamplingParams:
    """The first choice is the answer that there would be with n = 1; the others draw differently."""
    if choice == 0:
        return sampling
    seed = (sampling.seed + choice * _SEED_STRIDE) & (2**63 - 1)
    return msgspec.structs.replace(sampling, seed=seed)


@dataclass(frozen=True, slots=True)
class Room:
    """How long a sequence may be: within the model's context, and within the memory that the tightest rank
    has for keys and values. 0 tokens of context = unknown."""

    context_length: int
    kv: KvBudget
    metrics: Metrics

    @classmethod
    def of(cls, services: Services) -> Room:
        readiness = services.client.readiness
        return cls(readiness.context_length, readiness.kv, services.metrics)

    @property
    def num_tokens(self) -> int:
        """Prompt and answer together; 0 = unknown."""
        in_memory = self.kv.longest_sequence(self.context_length)
        if in_memory is None:
            return self.context_length
        return min(in_memory, self.context_length or in_memory)

    def for_answer(self, num_prompt: int, wanted: int | None, param: str) -> int:
        """How many tokens may be generated: what was asked for, within the room. Raises ApiError 400 when not
        even one fits."""
        if not self.num_tokens and not self.kv.short(1, num_prompt + 1):
            return wanted or UNKNOWN_CONTEXT_MAX_TOKENS
        left = self.num_tokens - num_prompt
        if left < 1:
            raise self.too_long(num_prompt, param)
        return left if wanted is None else min(wanted, left)

    def too_long(self, num_prompt: int, param: str) -> ApiError:
        """The refusal of a prompt with so many tokens, or more, that says which limit it is."""
        if self.context_length and num_prompt >= self.context_length:
            self.metrics.too_long.labels("context").inc()
            return invalid(
                f"This model's maximum context length is {self.context_length} tokens, and the prompt has "
                f"{num_prompt} or more; at least one more is needed for the answer. Shorten the prompt.",
                param=param,
                code="context_length_exceeded",
            )
        self.metrics.too_long.labels("kv_memory").inc()
        message = self.kv.explain(num_prompt + 1, self.context_length)
        return invalid(message, param=param, code="kv_memory_exceeded")
