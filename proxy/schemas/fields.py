"""What happens to each request field: honoured, refused by name, or ignored because it changes no answer.

Nothing is dropped in silence: a field in none of the three lists is refused as unknown, and the lists are
what /v1/capabilities shows and docs/api.md documents.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import pydantic

from mlx_mesh.proxy.errors import ApiError, invalid

Model = TypeVar("Model", bound=pydantic.BaseModel)


@dataclass(frozen=True, slots=True)
class Refused:
    """A field that would change the answer and is not supported. `neutral` values ask for nothing."""

    reason: str
    neutral: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """The field lists of one endpoint. `body` has the honoured ones."""

    body: type[pydantic.BaseModel]
    refused: Mapping[str, Refused]
    ignored: Mapping[str, str]

    @property
    def honoured(self) -> tuple[str, ...]:
        return tuple(self.body.model_fields)


def parse(policy: FieldPolicy, model: type[Model], raw: Mapping[str, Any]) -> Model:
    """The validated body; null is the same as absent. Raises ApiError 400 with `param`."""
    assert model is policy.body
    fields = {name: value for name, value in raw.items() if value is not None and name not in policy.ignored}
    for name, rule in policy.refused.items():
        # bool and int compare equal in Python, but `"n": true` asks for something else than `"n": 1`.
        if name in fields and not any(
            type(fields[name]) is type(value) and fields[name] == value for value in rule.neutral
        ):
            raise invalid(
                f"'{name}' is not supported here: {rule.reason}", param=name, code="unsupported_parameter"
            )
        fields.pop(name, None)
    try:
        return model.model_validate(fields)
    except pydantic.ValidationError as error:
        raise _first(error, fields) from error


def _first(error: pydantic.ValidationError, fields: Mapping[str, Any]) -> ApiError:
    details = error.errors(include_url=False, include_context=False, include_input=False)
    # Of a union's complaints the deepest one that is not about the type is the one meant.
    detail = max(
        details,
        key=lambda one: (
            one["type"] == "extra_forbidden",
            len(_path(one["loc"], fields)),
            not one["type"].endswith("_type"),
        ),
    )
    path = _path(detail["loc"], fields)
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")
    match detail["type"]:
        case "extra_forbidden":
            return invalid(f"Unknown request field '{param}'.", param=param, code="unknown_parameter")
        case "missing":
            return invalid(
                f"Missing required field '{param}'.", param=param, code="missing_required_parameter"
            )
        case _:
            message = detail["msg"].removeprefix("Value error, ")
            return invalid(f"Invalid '{param}': {message}.", param=param or None)


def _path(loc: tuple[int | str, ...], fields: Mapping[str, Any]) -> list[int | str]:
    """The part of pydantic's location that exists in the body: it also names the members of unions."""
    path: list[int | str] = []
    here: Any = fields
    for at, part in enumerate(loc):
        if isinstance(here, dict) and isinstance(part, str) and (part in here or at == len(loc) - 1):
            path.append(part)
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            path.append(part)
            here = here[part]
    return path
