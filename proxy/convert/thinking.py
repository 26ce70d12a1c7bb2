"""Control of reasoning: what a request says, as options of the model's own chat template."""

from __future__ import annotations

from typing import Any

from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.tokenizer import ModelTokenizer

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")

_SWITCHES = ("enable_thinking", "thinking")
"""Names under which templates read whether to think."""

_RESERVED = frozenset(
    {
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "tokenize",
        "add_generation_prompt",
        "continue_final_message",
        "return_dict",
        "return_tensors",
        "return_assistant_tokens_mask",
        "padding",
        "truncation",
        "max_length",
        "tokenizer_kwargs",
        "processor_kwargs",
    }
)


def template_options(
    tokenizer: ModelTokenizer,
    *,
    enable_thinking: bool | None = None,
    effort: str | None = None,
    more: dict[str, Any] | None = None,
    effort_param: str = "reasoning_effort",
    switch_param: str = "enable_thinking",
) -> dict[str, Any]:
    """Raises ApiError 400 for what the model's template does not read."""
    options: dict[str, Any] = {}
    for name, value in (more or {}).items():
        if name in _RESERVED:
            param = f"chat_template_kwargs.{name}"
            raise invalid(f"'{param}' is not an option of the template.", param=param)
        options[name] = value
    if enable_thinking is not None:
        options |= _switch(tokenizer, enable_thinking, switch_param)
    if effort is not None:
        options |= _effort(tokenizer, effort, effort_param)
    return options


def can_switch_thinking(tokenizer: ModelTokenizer) -> bool:
    return any(tokenizer.template_reads.variable(name) for name in _SWITCHES)


def _switch(tokenizer: ModelTokenizer, is_on: bool, param: str) -> dict[str, Any]:
    for name in _SWITCHES:
        if tokenizer.template_reads.variable(name):
            return {name: is_on}
    if is_on == tokenizer.markup.has_reasoning:
        return {}  # it cannot be switched, and is as wanted
    raise _unsupported(param, "this model's chat template cannot switch reasoning")


def _effort(tokenizer: ModelTokenizer, effort: str, param: str) -> dict[str, Any]:
    if effort not in EFFORTS:
        raise invalid(f"Invalid '{param}': one of {', '.join(EFFORTS)}.", param=param)
    if tokenizer.template_reads.variable("reasoning_effort"):
        known = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
        options: dict[str, Any] = {"reasoning_effort": known.get(effort, effort)}
        if effort == "none" and tokenizer.template_reads.variable("enable_thinking"):
            options["enable_thinking"] = False
        return options
    if can_switch_thinking(tokenizer):
        return _switch(tokenizer, effort not in ("none", "minimal"), param)
    if effort == "none" and not tokenizer.markup.has_reasoning:
        return {}
    raise _unsupported(param, "this model's chat template has no such setting")


def _unsupported(param: str, reason: str) -> ApiError:
    return invalid(f"'{param}' is not supported here: {reason}.", param=param, code="unsupported_parameter")


def budget(tokenizer: ModelTokenizer, wanted: int | None, param: str) -> int | None:
    """The limit on reasoning tokens. Raises ApiError 400 for a model whose reasoning cannot be ended."""
    if wanted is None or not tokenizer.markup.has_reasoning:
        return None  # a model that does not reason keeps within any budget
    if not tokenizer.markup.think_end:
        raise _unsupported(
            param, f"reasoning in the form '{tokenizer.markup.family}' has no tag that ends it"
        )
    return wanted
