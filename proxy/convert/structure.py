"""What a request demands of the form of its answer, as one part of a grammar (see `proxy.grammars`).

OpenAI's response_format, vLLM's guided_* and structured_outputs, Ollama's and Anthropic's format all come to
the same four: a JSON schema, a regular expression, a list of choices, a grammar in Lark.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.grammars import (
    Calls,
    NotConstrainable,
    Part,
    choice_part,
    json_part,
    lark_part,
    regex_part,
    whole_grammar,
)
from mlx_mesh.proxy.markup import Markup, Region
from mlx_mesh.proxy.schemas.common import SamplingFields
from mlx_mesh.proxy.services import Services

ANY_OBJECT: dict[str, Any] = {"type": "object"}

MAX_CHOICES = 1024


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What an answer must match, and the field that says so."""

    param: str
    part: Part


@dataclass(frozen=True, slots=True)
class Form:
    """`answer`: what the text must match; `calls`: what it may be instead, or must be without an `answer`.
    `param`: the field that errors name."""

    answer: Part | None = None
    calls: Calls | None = None
    param: str = ""


ANY_FORM = Form()


def form_of(answer: AnswerForm | None) -> Form:
    """Without tools."""
    return ANY_FORM if answer is None else Form(answer.part, param=answer.param)


async def grammar_of(services: Services, form: Form, markup: Markup, region: Region) -> str:
    """The grammar of the whole text, '' for any. Raises ApiError 400 for one that cannot be used, and 503
    when many are being looked at."""
    if form == ANY_FORM:
        return ""
    tokenizer = services.tokenizer
    if not tokenizer.can_constrain:
        raise _unsupported(form.param, "this model has no tokenizer.json, which a grammar needs")
    try:
        grammar = whole_grammar(markup, region, tokenizer.special_token_id, form.answer, form.calls)
    except NotConstrainable as error:
        raise _unsupported(form.param, str(error)) from error
    except RecursionError:
        raise _bad(form, "it is nested too deeply; make it simpler.") from None
    if problem := await services.grammars.problem_of(grammar):
        raise _bad(form, problem)
    return grammar


def _bad(form: Form, problem: str) -> ApiError:
    beside = (
        f" (together with the request's {len(form.calls.tools)} tools)" if form.calls and form.answer else ""
    )
    return invalid(f"Invalid '{form.param}'{beside}: {problem}", param=form.param, code="invalid_grammar")


# ---------------------------------------------------------------- what requests say


def wanted_form(body: SamplingFields) -> AnswerForm | None:
    """Of the OpenAI endpoints, with vLLM's additions. Raises ApiError 400."""
    given = [form for form in (response_format(body.response_format), *_guided(body)) if form is not None]
    if len(given) > 1:
        raise invalid(
            f"'{given[0].param}' and '{given[1].param}' cannot be combined: one answer has one form.",
            param=given[1].param,
        )
    return given[0] if given else None


def response_format(given: Any, param: str = "response_format") -> AnswerForm | None:
    """OpenAI's form. None for plain text. Raises ApiError 400."""
    if given is None:
        return None
    match given.get("type") if isinstance(given, dict) else None:
        case "text":
            return None
        case "json_object":
            return AnswerForm(param, json_part(ANY_OBJECT))
        case "json_schema":
            # /v1/responses has the schema beside the type instead of one level down.
            inner = given.get("json_schema", given)
            beside = "json_schema" not in given and (param != "response_format" or "schema" in given)
            path = f"{param}.schema" if beside else f"{param}.json_schema.schema"
            return schema_form(inner.get("schema") if isinstance(inner, dict) else None, path)
        case _:
            raise invalid(
                f"Invalid '{param}': its type must be 'text', 'json_object' or 'json_schema'.",
                param=f"{param}.type",
            )


def json_format(given: Any, param: str = "format") -> AnswerForm | None:
    """Ollama's form: '' or 'json' or a schema. Raises ApiError 400."""
    if given in (None, ""):
        return None
    return schema_form(ANY_OBJECT if given == "json" else given, param)


def schema_form(schema: Any, param: str) -> AnswerForm:
    """Raises ApiError 400 unless it is an object; what is in it is looked at when the grammar is complete."""
    if not isinstance(schema, dict):
        raise invalid(f"Invalid '{param}': it must be a JSON schema, an object.", param=param)
    return AnswerForm(param, json_part(schema))


def _guided(body: SamplingFields) -> list[AnswerForm]:
    fields = {f"guided_{kind}": (kind, getattr(body, f"guided_{kind}")) for kind in _READERS}
    outputs = body.structured_outputs or {}
    for kind, value in outputs.items():
        if kind not in _READERS:
            param = f"structured_outputs.{kind}"
            raise invalid(
                f"'{param}' is not supported here; {', '.join(_READERS)} are.",
                param=param,
                code="unsupported_parameter",
            )
        fields[f"structured_outputs.{kind}"] = (kind, value)
    return [
        AnswerForm(param, _READERS[kind](value, param))
        for param, (kind, value) in fields.items()
        if value is not None
    ]


def _guided_json(value: Any, param: str) -> Part:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise invalid(f"Invalid '{param}': the text is no JSON: {error}.", param=param) from error
    return schema_form(value, param).part


def _guided_regex(value: Any, param: str) -> Part:
    return regex_part(_text(value, param))


def _guided_choice(value: Any, param: str) -> Part:
    is_list = isinstance(value, list) and 0 < len(value) <= MAX_CHOICES
    if not is_list or not all(isinstance(one, str) and one for one in value):
        raise invalid(
            f"Invalid '{param}': it must be a list of 1 to {MAX_CHOICES} texts, none of them empty.",
            param=param,
        )
    return choice_part(value)


def _guided_grammar(value: Any, param: str) -> Part:
    return lark_part(_text(value, param))


_READERS = {
    "json": _guided_json,
    "regex": _guided_regex,
    "choice": _guided_choice,
    "grammar": _guided_grammar,
}


def _text(value: Any, param: str) -> str:
    if not isinstance(value, str) or not value:
        raise invalid(f"Invalid '{param}': it must be a text that is not empty.", param=param)
    return value


def _unsupported(param: str, reason: str) -> ApiError:
    return invalid(f"'{param}' is not supported here: {reason}.", param=param, code="unsupported_parameter")
