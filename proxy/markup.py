"""The tags of one model: where its reasoning and its tool calls begin and end, and who reads the calls.

Chosen as mlx-lm chooses, by the chat template and the vocabulary, with mlx-lm's own functions where it has
them. Families it does not know: tags that only the template names, and OpenAI's harmony format.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from mlx_mesh.proxy import upstream
from mlx_mesh.proxy.parsers import harmony

ParseCalls = Callable[[str, Sequence[dict[str, Any]] | None], Any]
"""Text between the tags and the request's tools -> one call or several, each with name and arguments.
Raises anything."""


class Region(StrEnum):
    """What a stretch of generated text is."""

    ANSWER = "normal"
    REASONING = "reasoning"
    CALL = "tool"
    HEADER = "header"  # who speaks on which channel; never shown


Transitions = Mapping[Region, tuple[tuple[str, Region], ...]]

_MORE_THINKING_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<thinking>", "</thinking>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""Used when a template names them; also where they are several tokens."""


@dataclass(frozen=True, slots=True)
class Markup:
    """The tags. Without any, all text is the answer."""

    think_start: str = ""
    think_end: str = ""
    call_start: str = ""
    call_end: str = ""  # '' = calls go on to the end of the text
    parse_calls: ParseCalls | None = None
    family: str = ""  # the parser's name, for people
    initial: Region = Region.ANSWER
    more_transitions: Transitions = field(default_factory=dict)
    visible_ids: Mapping[int, str] = field(default_factory=dict)
    """Special tokens that are part of the tags or of calls: these are text here, not decoration."""

    @property
    def has_reasoning(self) -> bool:
        return bool(self.think_start) or any(
            into is Region.REASONING for edges in self.more_transitions.values() for _, into in edges
        )

    @property
    def has_calls(self) -> bool:
        return self.parse_calls is not None

    def transitions(self, with_calls: bool) -> Transitions:
        """From each region: which tag leads where."""
        edges: dict[Region, list[tuple[str, Region]]] = {
            region: [one for one in more if with_calls or one[1] is not Region.CALL]
            for region, more in self.more_transitions.items()
        }
        calls_start_in_header = any(into is Region.CALL for one in edges.values() for _, into in one)
        if self.think_start:
            edges.setdefault(Region.ANSWER, []).append((self.think_start, Region.REASONING))
            edges.setdefault(Region.REASONING, []).append((self.think_end, Region.ANSWER))
        if with_calls and self.call_start:
            if not calls_start_in_header:
                edges.setdefault(Region.ANSWER, []).append((self.call_start, Region.CALL))
            if self.think_start:
                edges.setdefault(Region.REASONING, []).append((self.call_start, Region.CALL))
            if self.call_end:
                edges.setdefault(Region.CALL, []).append((self.call_end, Region.ANSWER))
        return {region: tuple(one) for region, one in edges.items()}

    def is_opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning: the template wrote the opening tag."""
        return bool(self.think_start) and prompt.rstrip().endswith(self.think_start)


class Vocabulary(Protocol):
    """What is asked of a tokenizer of transformers."""

    chat_template: Any

    def get_vocab(self) -> dict[str, int]: ...


def find_markup(tokenizer: Vocabulary, template: str, special: Mapping[str, int]) -> Markup:
    """`template` is the text in use, `special` the tokens that are hidden in text otherwise.
    Raises SettingsError when the tokenizer's settings name a parser that mlx-lm does not have."""
    if "<|channel|>" in template and "<|message|>" in template and "<|start|>" in template:
        return Markup(
            parse_calls=harmony.parse_tool_call,
            family="harmony",
            initial=Region.HEADER,
            more_transitions=_as_transitions(harmony.TRANSITIONS),
            visible_ids=_named_in(inspect.getsource(harmony), special),
        )
    text_tools = upstream.load("tokenizer_utils")
    seen = _WithTemplate(tokenizer, template)
    think_start, think_end = text_tools._infer_thinking(seen)[:2]
    if think_start is None:
        think_start, think_end = next(
            (pair for pair in _MORE_THINKING_TAGS if all(tag in template for tag in pair)), ("", "")
        )
    more: Transitions = {
        Region.ANSWER: tuple((mark, Region.ANSWER) for mark in text_tools._infer_structural_markers(seen))
    }
    names = think_start + think_end + "".join(mark for mark, _ in more[Region.ANSWER])
    settings = getattr(tokenizer, "init_kwargs", {})
    family = settings.get("tool_parser_type") or text_tools._infer_tool_parser(seen) or ""
    if not family:
        return Markup(
            think_start,
            think_end,
            more_transitions=more if more[Region.ANSWER] else {},
            visible_ids=_named_in(names, special),
        )
    parser = upstream.load(f"tool_parsers.{family}")
    initial = Region.ANSWER
    if family == "muse_spark":
        layout = upstream.load("chat_templates.muse_spark").RESPONSE_FORMAT
        more = _as_transitions(layout["transitions"])
        initial = Region(layout["initial_state"])
        names += str(layout)
    return Markup(
        think_start,
        think_end,
        parser.tool_call_start,
        parser.tool_call_end,
        parser.parse_tool_call,
        family,
        initial,
        more if any(more.values()) else {},
        _named_in(names + inspect.getsource(inspect.getmodule(parser.parse_tool_call) or parser), special),
    )


class _WithTemplate:
    """A tokenizer as mlx-lm's functions see it, with the template that is really in use."""

    def __init__(self, tokenizer: Vocabulary, template: str) -> None:
        self._tokenizer = tokenizer
        self.chat_template = template

    def get_vocab(self) -> dict[str, int]:
        return self._tokenizer.get_vocab()

    def encode(self, text: str, **options: Any) -> list[int]:
        return []  # only the tags' texts are used here


def _as_transitions(given: Mapping[str, Sequence[tuple[str, str]]]) -> Transitions:
    return {
        Region(region): tuple((mark, Region(into)) for mark, into in edges) for region, edges in given.items()
    }


def _named_in(text: str, special: Mapping[str, int]) -> dict[int, str]:
    """The special tokens that a text names, also as a regular expression."""
    plain = re.sub(r"\\(.)", r"\1", text)
    return {token_id: name for name, token_id in special.items() if name in plain or name in text}
