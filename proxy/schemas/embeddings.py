"""The bodies of /v1/embeddings and of Ollama's /api/embed and /api/embeddings."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from mlx_mesh.proxy.errors import ApiError, invalid
from mlx_mesh.proxy.schemas.common import Strict
from mlx_mesh.proxy.schemas.fields import FieldPolicy

MAX_INPUTS = 2048
MAX_INPUT_CHARS = 1_000_000

Input = str | tuple[int, ...]


class EmbeddingsRequest(Strict):
    input: Any  # checked by `inputs_of`: a union over many token ids costs as many error records
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)


class OllamaEmbedRequest(Strict):
    model: str = Field(min_length=1)
    input: Any
    truncate: bool = True
    dimensions: int | None = Field(default=None, ge=1)


class OllamaEmbeddingsRequest(Strict):
    """The older form, of one text."""

    model: str = Field(min_length=1)
    prompt: str = ""


def inputs_of(given: Any) -> tuple[Input, ...]:
    """A text, a list of texts, token ids, or a list of such lists. Raises ApiError 400."""
    if isinstance(given, str):
        return (_text(given, "input"),)
    if not isinstance(given, list) or not given:
        raise _bad("input")
    if all(type(part) is int for part in given):
        return (_ids(given, "input"),)
    if len(given) > MAX_INPUTS:
        raise invalid(f"Invalid 'input': at most {MAX_INPUTS} inputs in one request.", param="input")
    is_text = isinstance(given[0], str)
    return tuple(
        _text(part, f"input[{at}]") if is_text else _ids(part, f"input[{at}]")
        for at, part in enumerate(given)
    )


def _text(part: Any, param: str) -> str:
    if not isinstance(part, str):
        raise _bad(param)
    if not part:
        raise invalid(f"Invalid '{param}': an empty text has no embedding.", param=param)
    if len(part) > MAX_INPUT_CHARS:
        raise invalid(
            f"Invalid '{param}': it has {len(part)} characters; at most {MAX_INPUT_CHARS}.", param=param
        )
    return part


def _ids(part: Any, param: str) -> tuple[int, ...]:
    if not isinstance(part, list) or not part or not all(type(i) is int and 0 <= i < 2**31 for i in part):
        raise _bad(param)
    return tuple(part)


def _bad(param: str) -> ApiError:
    message = (
        f"Invalid '{param}': an input is a text, a list of texts, a list of token ids, or a list of such "
        "lists; not a mixture, and none of them empty lists."
    )
    return invalid(message, param=param)


_HOST = "how the model is run is decided when the mesh starts"
_IGNORED = {"keep_alive": "the model stays loaded as long as the mesh runs", "options": _HOST}

EMBEDDING_FIELDS = FieldPolicy(
    body=EmbeddingsRequest,
    refused={},
    ignored={"user": "there are no per-user accounts or limits"},
)
OLLAMA_EMBED_FIELDS = FieldPolicy(body=OllamaEmbedRequest, refused={}, ignored=_IGNORED)
OLLAMA_EMBEDDINGS_FIELDS = FieldPolicy(body=OllamaEmbeddingsRequest, refused={}, ignored=_IGNORED)
