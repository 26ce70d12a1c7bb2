"""/v1/completions as prompts and sequences."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from mlx_mesh.proxy.convert.common import Prepared, Room, Sequences, prepare
from mlx_mesh.proxy.convert.prefixes import PrefixChoice
from mlx_mesh.proxy.convert.sampling import sampling_params
from mlx_mesh.proxy.convert.structure import form_of, grammar_of, wanted_form
from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.markup import Markup, Region
from mlx_mesh.proxy.schemas.completions import CompletionRequest, Prompt
from mlx_mesh.proxy.services import Services
from mlx_mesh.proxy.tokenizer import PromptTooLong


@dataclass(frozen=True, slots=True)
class PreparedText:
    """`echo`: the text that each choice begins with; `prompt_ids`: of each choice, () = not asked for."""

    prepared: Prepared
    echo: tuple[str, ...]
    prompt_ids: tuple[tuple[int, ...], ...] = ()


async def prepare_completion(services: Services, body: CompletionRequest) -> PreparedText:
    """Raises ApiError and the tokenizer's errors."""
    _check_choices(body)
    room = Room.of(services)
    prompts: list[tuple[int, ...]] = []
    for prompt in body.prompts:
        try:
            prompts.append(await _completion_ids(services, prompt, room.num_tokens))
        except PromptTooLong as error:
            raise room.too_long(error.at_least, "prompt") from error
    num_choices = body.best_of or body.n or 1
    job = Sequences(
        id=f"cmpl-{uuid.uuid4().hex}",
        sampling=sampling_params(body, services.tokenizer),
        max_tokens=body.max_tokens,
        stop_strings=body.stop_strings,
        num_logprobs=0 if body.logprobs is None and body.picks_best else body.logprobs,
        num_choices=num_choices,
        max_time_s=body.max_time_s or 0.0,
        prefixes=PrefixChoice.of(body),
    )
    form = form_of(wanted_form(body))
    grammar = await grammar_of(services, form, Markup(), Region.ANSWER)
    prepared = prepare(services, job, prompts, "prompt", continues_prompt=True, grammar=grammar)
    echo = tuple(
        (given if isinstance(given, str) else services.tokenizer.decode(given)) if body.echo else ""
        for given in body.prompts
        for _ in range(num_choices)
    )
    shown = [ids for ids in prompts for _ in range(num_choices)] if body.return_token_ids else []
    return PreparedText(prepared, echo, tuple(shown))


def _check_choices(body: CompletionRequest) -> None:
    if body.best_of is not None and body.best_of < (body.n or 1):
        raise invalid("'best_of' must not be less than 'n'.", param="best_of")
    if body.picks_best and body.stream:
        raise invalid(
            "'best_of' answers cannot be streamed: the best one is known at the end.", param="best_of"
        )
    if body.echo and body.logprobs is not None:
        raise invalid(
            "'echo' together with 'logprobs' is not supported here: prompts have no log probabilities.",
            param="echo",
            code="unsupported_parameter",
        )


async def _completion_ids(services: Services, prompt: Prompt, limit: int) -> tuple[int, ...]:
    tokenizer = services.tokenizer
    if isinstance(prompt, str):
        ids = await tokenizer.encode(prompt, limit=limit)
        if not ids and tokenizer.bos_token_id is not None:
            ids = (tokenizer.bos_token_id,)
        if not ids:
            raise invalid(
                "The prompt is empty, and this model has no token to start a text with.", param="prompt"
            )
        return ids
    if (largest := max(prompt)) >= tokenizer.vocab_size:
        raise invalid(
            f"The prompt has token id {largest}; ids of this model are below {tokenizer.vocab_size}.",
            param="prompt",
        )
    return prompt
