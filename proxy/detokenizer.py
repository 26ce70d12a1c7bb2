"""Tokens to text, one by one: no character is split, and an unfinished one is never shown.

Decoding one token alone is wrong (a character may span tokens, and a decoder may look at the token before),
so a short window of tokens is decoded again at each step and only what is new and complete is given out.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

_MAX_REPLACEMENTS = 8
"""A longer run of replacement characters is invalid for good: an unfinished character makes one, or in
tokenizers with byte tokens one for each byte of the run, and a run resolves at each character's end."""

PROMPT_TAIL_TOKENS = 6


class Decoder(Protocol):
    """What the detokenizer needs of a tokenizer."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens; bytes that are not UTF-8 become replacement characters."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that this token stands for inside a text."""
        ...


class Detokenizer:
    """One sequence. The pieces of `add` and `finish` together are `decode` of all ids, except that a
    character left unfinished at the end is dropped.

    `prompt_tail`: the last tokens of the prompt when the text continues it (completions), so that decoders
    that drop a leading space do not drop this one. `visible`: special tokens that are text here.
    """

    def __init__(
        self, decoder: Decoder, prompt_tail: Sequence[int] = (), visible: Mapping[int, str] | None = None
    ) -> None:
        self._decoder = decoder
        self._visible = visible or {}
        self._ids = list(prompt_tail[-PROMPT_TAIL_TOKENS:])
        self._settled = len(self._ids)  # tokens before this one are given out and end a character
        self._settled_text = self._given = decoder.decode(self._ids) if self._ids else ""

    def add(self, token_id: int) -> str:
        """The text that this token completes."""
        if (shown := self._visible.get(token_id)) is not None:
            return self.finish() + shown
        self._ids.append(token_id)
        text = self._decoder.decode(self._ids)
        complete = text.rstrip(REPLACEMENT)
        if len(complete) == len(text) or len(text) - len(complete) > _MAX_REPLACEMENTS:
            if text == self._given:  # adds nothing (a special token): keep the context without it
                self._ids.pop()
                return ""
            new = _after(self._given, text)
            self._forget()
            return new
        new = _after(self._given, complete)
        if new:
            self._given = complete
        return new

    def finish(self) -> str:
        """No more tokens come: what was held back, without a character that lacks bytes."""
        if self._settled == len(self._ids):
            return ""
        tail = b"".join(self._decoder.token_bytes(token_id) for token_id in self._ids[self._settled :])
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text = utf8.decode(tail)
        lacks_bytes = bool(utf8.getstate()[0])
        text = self._settled_text + text if lacks_bytes else self._decoder.decode(self._ids)
        new = _after(self._given, text)
        self._forget()
        return new

    def _forget(self) -> None:
        """Start the next window at the tokens since the last settled one: they are its context."""
        self._ids = self._ids[self._settled :]
        self._settled = len(self._ids)
        self._settled_text = self._given = self._decoder.decode(self._ids)


def _after(given: str, text: str) -> str:
    """What `text` has beyond what was given out. Invalid bytes can make a decoder take back characters
    that are out already; they stay, and only what is longer than them is new."""
    if text.startswith(given):
        return text[len(given) :]
    return text[len(given) :] if len(text) > len(given) and not text.endswith(REPLACEMENT) else ""
