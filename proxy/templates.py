"""What a chat template reads: its variables, and the fields of messages that it shows."""

from __future__ import annotations

import re
from collections.abc import Iterable

from jinja2 import TemplateError, meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

_GENERATION_TAG = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""An extension of transformers that marks the assistant's text for training; it reads nothing."""

_ASKED_FOR = re.compile(r"\b(\w+)\s+is\s+(?:not\s+)?defined\b")


class TemplateReads:
    """One template. Names that only stand in its text or in comments do not count as variables.
    `more`: variables that are known otherwise."""

    def __init__(self, template: str, more: Iterable[str] = ()) -> None:
        self._template = template
        self._variables = _variables(template) | frozenset(more)

    def variable(self, name: str) -> bool:
        """Whether a value given under this name can change the prompt."""
        return name in self._variables

    def field(self, name: str) -> bool:
        """Whether a message's field of this name is looked at."""
        quoted = re.escape(name)
        return re.search(rf"""\.{quoted}\b|['"]{quoted}['"]""", self._template) is not None


def _variables(template: str) -> frozenset[str]:
    environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
    try:
        undeclared = meta.find_undeclared_variables(environment.parse(_GENERATION_TAG.sub("", template)))
    except TemplateError:
        # It cannot be rendered either, or has other extensions: take every word for a variable.
        return frozenset(re.findall(r"\w+", template))
    # A variable with a default inside the template is both set and read there.
    return frozenset(undeclared) | frozenset(_ASKED_FOR.findall(template))
