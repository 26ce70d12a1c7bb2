"""Pydantic's complaints about a hostfile in words: what was seen, and the fix. Pure."""

from __future__ import annotations

import difflib
from typing import Any

import pydantic

from mlx_mesh.mesh.yaml_lines import Place

MPI_REASON = (
    "backend mpi is not offered: ranks are started one by one and are no MPI job, so each would find a world "
    "of one rank; use ring (any network), jaccl (RDMA over Thunderbolt) or nccl (CUDA)"
)


def in_words(model: type[pydantic.BaseModel], item: Any, where: Place) -> str:
    """A pydantic fault as: what was seen; the fix."""
    key = next((part for part in reversed(where) if isinstance(part, str)), "the file")
    seen, kind = item["input"], item["type"]
    context = item.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key `{where[-1]}`; {_nearest(model, where)}"
    if kind == "missing":
        return f"`{where[-1]}` is missing; add it"
    if kind == "literal_error":
        if key == "backend" and seen == "mpi":
            return MPI_REASON
        return f"`{key}: {_short(seen)}` is not known; use {str(context['expected']).replace(chr(39), '')}"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        return f"`{key}: {_short(seen)}` is out of range; it must be {bound}"
    if kind in ("too_short", "string_too_short"):
        return (
            f"`{key}` is empty; give at least one" if kind == "too_short" else f"`{key}` is empty; fill it in"
        )
    if kind == "string_type":
        if seen is None:
            return f"`{key}` has no value; fill it in or remove it"
        if isinstance(seen, bool | int | float):
            return f"`{key}: {_short(seen)}` is read as {_kind(seen)}; put it in quotes"
        return f"`{key}` must be text and is {_kind(seen)}; write one value"
    wanted = {
        "int_type": "a whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "bool_type": "true or false",
        "list_type": "a list, like [a, b]",
        "model_type": "a mapping, like {key: value}",
        "model_attributes_type": "a mapping, like {key: value}",
        "dict_type": "a mapping, like {key: value}",
    }.get(kind)
    if wanted is None:
        return f"`{key}: {_short(seen)}` cannot be used ({item['msg']}); correct it"
    return f"`{key}: {_short(seen)}` is {_kind(seen)}; it must be {wanted}"


def _nearest(model: type[pydantic.BaseModel], where: Place) -> str:
    """The fix for an unknown key: the nearest one that is valid at its place, or all of them."""
    current: type[pydantic.BaseModel] = model
    for part in where[:-1]:
        if isinstance(part, str):
            current = _model_of(current, part)
    valid = sorted(current.model_fields)
    close = difflib.get_close_matches(str(where[-1]).lower(), valid, n=1, cutoff=0.5)
    return f"did you mean `{close[0]}`?" if close else f"valid here: {', '.join(valid)}"


def _model_of(model: type[pydantic.BaseModel], key: str) -> type[pydantic.BaseModel]:
    annotation: Any = model.model_fields[key].annotation
    inner = getattr(annotation, "__args__", (annotation,))[0]
    return inner if isinstance(inner, type) and issubclass(inner, pydantic.BaseModel) else model


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    names = {
        bool: "true/false",
        int: "a number",
        float: "a number",
        str: "text",
        list: "a list",
        dict: "a mapping",
    }
    return names.get(type(value), type(value).__name__)


def _short(value: Any) -> str:
    text = "" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
