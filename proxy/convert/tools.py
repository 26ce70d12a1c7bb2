"""Tools of a request as chat templates read them, and what may be asked of them here."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlx_mesh.proxy.convert.structure import ANY_FORM, AnswerForm, Form
from mlx_mesh.proxy.errors import invalid
from mlx_mesh.proxy.grammars import Calls
from mlx_mesh.proxy.tokenizer import ModelTokenizer
from mlx_mesh.proxy.toolcalls import tool_names

MAX_TOOLS = 512

_NAME = re.compile(r"[\w.:-]{1,256}")


def read_tools(
    tokenizer: ModelTokenizer, tools: Sequence[dict[str, Any]], param: str = "tools"
) -> tuple[dict[str, Any], ...]:
    """OpenAI's tools, each `{"type": "function", "function": {...}}`. Raises ApiError 400 by name."""
    if not tools:
        return ()
    require_tools(tokenizer, param)
    if len(tools) > MAX_TOOLS:
        raise invalid(f"Invalid '{param}': at most {MAX_TOOLS} tools.", param=param)
    return tuple(_tool(tool, f"{param}[{at}]") for at, tool in enumerate(tools))


def require_tools(tokenizer: ModelTokenizer, param: str) -> None:
    """Raises ApiError 400 for a model that was not made for tools."""
    if tokenizer.takes_tools:
        return
    reason = (
        "the form of its calls is not known"
        if tokenizer.template_reads.variable("tools")
        else "its chat template shows none to it"
    )
    raise invalid(
        f"'{param}' is not supported here: this model calls no tools; {reason}.",
        param=param,
        code="unsupported_parameter",
    )


def _tool(tool: dict[str, Any], param: str) -> dict[str, Any]:
    kind = tool.get("type", "function")
    if kind != "function":
        raise invalid(
            f"'{param}.type' is {kind!r}; only tools of type 'function' are supported here.",
            param=f"{param}.type",
            code="unsupported_parameter",
        )
    return function_tool(tool.get("function"), f"{param}.function")


def function_tool(function: Any, param: str) -> dict[str, Any]:
    """One function, checked. Raises ApiError 400."""
    if not isinstance(function, dict):
        raise invalid(f"Invalid '{param}': it must be an object.", param=param)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise invalid(
            f"Invalid '{param}.name': it must have 1 to 256 letters, digits, '_', '-', '.' or ':'.",
            param=f"{param}.name",
        )
    kept: dict[str, Any] = {"name": name, "description": _text(function.get("description"), param)}
    parameters = function.get("parameters")
    if parameters is None:
        parameters = {"type": "object", "properties": {}}
    if not isinstance(parameters, dict):
        raise invalid(f"Invalid '{param}.parameters': it must be a JSON schema.", param=f"{param}.parameters")
    return {"type": "function", "function": {**kept, "parameters": parameters}}


def _text(description: Any, param: str) -> str:
    if description is None or isinstance(description, str):
        return description or ""
    raise invalid(f"Invalid '{param}.description': it must be a string.", param=f"{param}.description")


@dataclass(frozen=True, slots=True)
class Choice:
    """OpenAI's tool_choice. `names` None = any of the tools."""

    may_call: bool = True
    must_call: bool = False
    names: frozenset[str] | None = None

    def calls(self, tools: tuple[dict[str, Any], ...], only_one: bool) -> Calls | None:
        """What a grammar must offer; None when there is nothing to call."""
        chosen = tuple(tool for tool in tools if self.names is None or tool["function"]["name"] in self.names)
        return Calls(chosen, only_one) if chosen and self.may_call else None


def read_choice(choice: Any, tools: tuple[dict[str, Any], ...], param: str = "tool_choice") -> Choice:
    """'none', 'auto', 'required', a function, or allowed tools with a mode. Raises ApiError 400."""
    match choice:
        case None | "auto":
            return Choice()
        case "none":
            return Choice(may_call=False)
        case "required":
            read = Choice(must_call=True)
        case {"type": "function", "function": {"name": str(name)}} | {"type": "function", "name": str(name)}:
            read = Choice(must_call=True, names=frozenset({name}))
        case {"type": "allowed_tools", "allowed_tools": dict(allowed)} | (
            {"type": "allowed_tools"} as allowed
        ):
            read = _allowed(allowed, param)
        case _:
            raise invalid(f"Invalid '{param}': 'none', 'auto', 'required', or a function.", param=param)
    known = tool_names(tools)
    if not tools:
        raise invalid(f"'{param}' asks for a call, but the request has no tools.", param=param)
    if unknown := sorted((read.names or frozenset()) - known):
        raise invalid(
            f"'{param}' names {unknown[0]!r}; the request's tools are {', '.join(sorted(known))}.",
            param=param,
        )
    return read


def _allowed(given: dict[str, Any], param: str) -> Choice:
    names, tools = set(), given.get("tools")
    for at, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise invalid(
                f"Invalid '{param}.tools[{at}]': a function with a name.", param=f"{param}.tools[{at}]"
            )
        names.add(function["name"])
    if given.get("mode") not in ("auto", "required") or not names:
        raise invalid(f"Invalid '{param}': a mode, 'auto' or 'required', and tools.", param=param)
    return Choice(must_call=given["mode"] == "required", names=frozenset(names))


def call_form(
    choice: Choice,
    tools: tuple[dict[str, Any], ...],
    answer: AnswerForm | None = None,
    *,
    only_one: bool,
    choice_param: str = "tool_choice",
) -> Form:
    """What the answer must be: the calls that are asked for, or its own form beside calls that may be."""
    if choice.must_call:
        only_one = only_one or (choice.names is not None and len(choice.names) == 1)
        return Form(None, choice.calls(tools, only_one), choice_param)
    if answer is not None:
        return Form(answer.part, choice.calls(tools, only_one), answer.param)
    if choice.names is not None:  # some of the tools, if any: the others must not be called
        raise invalid(
            f"'{choice_param}' is not supported here: with mode 'auto', leave the other tools out instead.",
            param=choice_param,
            code="unsupported_parameter",
        )
    return ANY_FORM
