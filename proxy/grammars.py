"""The grammar of a whole generated text, in llguidance's terms: reasoning first, then the answer or calls.

The parts (a schema, an expression, the arguments of a function) are grammars of their own, each with its own
names and `$ref`s; the first one says in which order they come and which tags stand between them. The engine
gets one text and needs to know nothing of tags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher

from mlx_mesh.mesh.errors import MeshError
from mlx_mesh.proxy.markup import Markup, Region

_WHITESPACE = r"( |\n[ \t]{0,40})?"
"""Between the items of JSON: none, a space, or a new line with its indentation. Without a bound a model may
write spaces to the end of its context."""

Part = dict[str, Any]
"""One of llguidance's grammars without a name: {"json_schema": ...} or {"lark_grammar": ...}."""


class NotConstrainable(MeshError):
    """This model's form of answers cannot be put into a grammar; the message says what is missing."""


def json_part(schema: dict[str, Any]) -> Part:
    return {"json_schema": {**schema, "x-guidance": {"whitespace_pattern": _WHITESPACE}}}


def regex_part(pattern: str) -> Part:
    grammar: dict[str, Any] = json.loads(LLMatcher.grammar_from_regex(pattern))
    return {"lark_grammar": grammar["grammars"][0]["lark_grammar"]}


def choice_part(choices: Sequence[str]) -> Part:
    return {"lark_grammar": "start: " + " | ".join(json.dumps(one, ensure_ascii=False) for one in choices)}


def lark_part(grammar: str) -> Part:
    return {"lark_grammar": grammar}


@dataclass(frozen=True, slots=True)
class Calls:
    """Calls that may (or, without an answer beside them, must) be made: OpenAI's tools."""

    tools: tuple[dict[str, Any], ...]
    only_one: bool = False


SpecialId = Callable[[str], int | None]
"""The id of a special token by its text; None when it is ordinary text."""


def whole_grammar(
    markup: Markup, region: Region, special_id: SpecialId, answer: Part | None, calls: Calls | None
) -> str:
    """`region`: where the prompt ends. At least one of `answer` and `calls`; with both the model may choose.
    Raises NotConstrainable."""
    writer = _Writer(special_id)
    alternatives = []
    if answer is not None:
        alternatives.append(writer.part("answer", answer))
    if markup.family == "harmony":
        return writer.finish(_harmony(writer, region, alternatives, calls))
    if markup.initial is not Region.ANSWER:
        raise NotConstrainable(f"answers in the form '{markup.family}' cannot be constrained here")
    if calls is not None:
        alternatives.append(_calls(writer, markup, calls))
    return writer.finish(f"{_reasoning(writer, markup, region)} ({' | '.join(alternatives)})")


class _Writer:
    """Collects rules and parts under names of their own."""

    def __init__(self, special_id: SpecialId) -> None:
        self._special_id = special_id
        self._rules: dict[str, str] = {"WS": r"/[ \n\t]{1,8}/"}
        self._parts: list[dict[str, Any]] = []

    def part(self, name: str, part: Part) -> str:
        """A reference to a grammar of its own."""
        name = f"{name}_{len(self._parts)}"
        self._parts.append({"name": name, **part})
        return f"@{name}"

    def text(self, text: str) -> str:
        """A tag or other fixed text."""
        token_id = self._special_id(text)
        return json.dumps(text, ensure_ascii=False) if token_id is None else f"<[{token_id}]>"

    def free_text(self, name: str, end: str) -> str:
        """A rule for any text up to and with `end`, a tag."""
        token_id = self._special_id(end)
        if token_id is None:
            self._rules[f"{name}[suffix={json.dumps(end, ensure_ascii=False)}]"] = "/(?s:.*)/"
            return name
        self._rules[name] = f"{name.upper()}_TEXT <[{token_id}]>"
        self._rules[f"{name.upper()}_TEXT"] = "/(?s:.*)/"
        return name

    def finish(self, start: str) -> str:
        rules = "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **self._rules}.items())
        return json.dumps({"grammars": [{"lark_grammar": rules}, *self._parts]}, ensure_ascii=False)


def _reasoning(writer: _Writer, markup: Markup, region: Region) -> str:
    """What comes before the answer: the rest of the reasoning, or none, or one if the model wants. There is
    white space only after a tag, where it is no part of the answer: a choice is one to the letter."""
    if not markup.think_start:
        return ""
    thought = writer.free_text("thought", markup.think_end)
    if region is Region.REASONING:
        return f"{thought} WS?"
    return f"({writer.text(markup.think_start)} {thought} WS?)?"


# ---------------------------------------------------------------- calls, by family


def _calls(writer: _Writer, markup: Markup, calls: Calls) -> str:
    write = _FAMILIES.get(markup.family)
    if write is None:
        raise NotConstrainable(f"calls in the form '{markup.family}' cannot be forced here")
    return write(writer, markup, calls)


def _arguments(writer: _Writer, tool: dict[str, Any]) -> str:
    return writer.part("arguments", json_part(tool["function"]["parameters"]))


def _name(tool: dict[str, Any]) -> str:
    return str(tool["function"]["name"])


def _repeated(one: str, calls: Calls, between: str = "WS?") -> str:
    return one if calls.only_one else f"{one} ({between} {one})*"


def _any_of(rules: Sequence[str]) -> str:
    return f"({' | '.join(rules)})"


def _json_in_tags(writer: _Writer, markup: Markup, calls: Calls) -> str:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`"""
    bodies = [
        f"{json.dumps(json.dumps({'name': _name(tool)}, ensure_ascii=False)[:-1], ensure_ascii=False)} "
        f'", \\"arguments\\": " {_arguments(writer, tool)} "}}"'
        for tool in calls.tools
    ]
    start, end = writer.text(markup.call_start), writer.text(markup.call_end)
    return _repeated(f"({start} WS? {_any_of(bodies)} WS? {end})", calls)


def _mistral(writer: _Writer, markup: Markup, calls: Calls) -> str:
    """`[TOOL_CALLS]name[ARGS]{...}`, each call with both marks."""
    start, separator = writer.text(markup.call_start), writer.text("[ARGS]")
    bodies = [f"{json.dumps(_name(tool))} {separator} {_arguments(writer, tool)}" for tool in calls.tools]
    return _repeated(f"({start} {_any_of(bodies)})", calls, between="")


def _kimi_k2(writer: _Writer, markup: Markup, calls: Calls) -> str:
    """A section of `functions.name:0<|tool_call_argument_begin|>{...}`."""
    begin, end = writer.text("<|tool_call_begin|>"), writer.text("<|tool_call_end|>")
    separator = writer.text("<|tool_call_argument_begin|>")
    bodies = [
        f'"functions.{_name(tool)}:" /[0-9]{{1,3}}/ {separator} {_arguments(writer, tool)}'
        for tool in calls.tools
    ]
    one = f"({begin} {_any_of(bodies)} {end})"
    return f"{writer.text(markup.call_start)} {_repeated(one, calls, '')} {writer.text(markup.call_end)}"


def _qwen3_coder(writer: _Writer, markup: Markup, calls: Calls) -> str:
    """`<function=name><parameter=key>value</parameter>...</function>`: text as it is, the rest as JSON."""
    bodies = []
    for tool in calls.tools:
        schema = tool["function"]["parameters"]
        properties, required = schema.get("properties", {}), schema.get("required", [])
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise NotConstrainable(f"the parameters of {_name(tool)} are no JSON schema")
        fields = []
        for key, property_schema in properties.items():
            if not re.fullmatch(r"[^\s<>]+", key):
                raise NotConstrainable(f"a parameter cannot be named {key!r} in calls of this model")
            definitions = {k: v for k, v in schema.items() if k in ("$defs", "definitions")}
            value = _qwen_value(writer, property_schema, definitions)
            field = f'({json.dumps(f"<parameter={key}>", ensure_ascii=False)} "\\n" {value} "\\n")'
            fields.append(field if key in required else f"{field}?")
        bodies.append(f'{json.dumps(f"<function={_name(tool)}>")} "\\n" {" ".join(fields)} "</function>"')
    start, end = writer.text(markup.call_start), writer.text(markup.call_end)
    return _repeated(f'({start} "\\n" {_any_of(bodies)} "\\n" {end})', calls)


def _qwen_value(writer: _Writer, schema: Any, definitions: dict[str, Any]) -> str:
    schema = schema if isinstance(schema, dict) else {}
    if schema.get("type") == "string" and isinstance(schema.get("enum"), list):
        return f'{writer.part("value", choice_part([str(one) for one in schema["enum"]]))} "\\n</parameter>"'
    if schema.get("type") in (None, "string") and "anyOf" not in schema and "$ref" not in schema:
        return writer.free_text("text_value", "\n</parameter>")
    return f'{writer.part("value", json_part({**definitions, **schema}))} "\\n</parameter>"'


_FAMILIES: dict[str, Callable[[_Writer, Markup, Calls], str]] = {
    "json_tools": _json_in_tags,
    "kimi_k2": _kimi_k2,
    "mistral": _mistral,
    "qwen3_coder": _qwen3_coder,
}
"""By the name of mlx-lm's parser. The other families' calls have forms that no parser reads back safely
when every value is allowed."""

CAN_FORCE_CALLS = frozenset({*_FAMILIES, "harmony"})


def _harmony(writer: _Writer, region: Region, answers: Sequence[str], calls: Calls | None) -> str:
    """Messages with channels: analysis if the model wants, then the final one, or one call."""
    if region is not Region.HEADER:
        raise NotConstrainable("a harmony answer that goes on inside a message cannot be constrained here")
    channel, message = writer.text("<|channel|>"), writer.text("<|message|>")
    thought = writer.free_text("thought", "<|end|>")
    alternatives = [f'{channel} "final" {message} {answer}' for answer in answers]
    if calls is not None:
        alternatives += [
            f'{channel} "commentary to=functions.{_name(tool)} " {writer.text("<|constrain|>")} "json" '
            f"{message} {_arguments(writer, tool)}"
            for tool in calls.tools
        ]
    analysis = f'({channel} "analysis" {message} {thought} {writer.text("<|start|>")} "assistant")?'
    return f"{analysis} {_any_of(alternatives)}"
