"""How a prompt with media begins: with one begin-of-text token, as prompts of text alone do.

Chat templates write that token, and most tokenizers put one in front of whatever they get. Processors call
their tokenizer without asking which of both it was; a few write a third one by themselves.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def nothing_added(processor: Any, text: str) -> Iterator[None]:
    """Meanwhile the processor's tokenizer adds no token to a text that begins with its begin-of-text token:
    the template has written what belongs there."""
    tokenizer = _tokenizer(processor)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    begins = getattr(tokenizer, "bos_token", None)
    if backend is None or not begins or not text.startswith(begins):
        yield
        return
    added, backend.post_processor = backend.post_processor, None
    try:
        yield
    finally:
        backend.post_processor = added


def without_what_is_added(processor: Any, text: str, ids: Sequence[int]) -> str:
    """The text to read instead, when the processor itself wrote a begin-of-text token beside another one; or
    the same. `ids`: what it made of the text."""
    tokenizer = _tokenizer(processor)
    begins, number = getattr(tokenizer, "bos_token", None), getattr(tokenizer, "bos_token_id", None)
    if not begins or number is None:
        return text
    if text.startswith(begins):
        return text[len(begins) :] if list(ids).count(number) > text.count(begins) else text
    return begins + text if list(ids[:2]) == [number] * 2 else text


def _tokenizer(processor: Any) -> Any:
    return getattr(processor, "tokenizer", processor)
