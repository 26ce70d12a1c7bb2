"""Text for strangers: what a bug report says without names, paths of people, keys or prompts. Pure.

Three sieves, one after the other: what has the form of a secret, an identity or somebody's text is cut out;
names that are known become `host-1`, `user-1`; and of what remains only numbers and words that a vocabulary
has are kept. The last one is what holds against text that nobody thought of.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

MASK = "…"
MAX_LINE_CHARACTERS = 2000

_FORMS = (
    (re.compile(r"-----BEGIN [^-]+-----.*?(?:-----END [^-]+-----|\Z)", re.DOTALL), "<key>"),
    (re.compile(r"(?i)\b(?:bearer|basic)\s+\S+"), "<key>"),
    (re.compile(r"\b(?:hf_|sk-|ghp_|xox[a-z]-)[\w-]{6,}"), "<key>"),
    (re.compile(r"\bSHA256:[\w+/=]{20,}"), "SHA256:<key>"),
    (re.compile(r"\b(?:AAAA)[\w+/=]{20,}"), "<key>"),
    (re.compile(r"(?<=://)[^/@\s]+@"), ""),
    (re.compile(r"\b[\w.+-]+@[\w-]+\.[\w.-]+\b"), "<address>"),
    (re.compile(r"\b[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}\b"), "<id>"),
    (re.compile(r"\b(?:[0-9A-Fa-f]{1,2}:){5}[0-9A-Fa-f]{1,2}\b"), "<mac>"),
    (re.compile(r"\b[0-9a-fA-F]{24,}\b"), "<hex>"),
    # What people write stands in quotes, or behind one of these words.
    (
        re.compile(r"(?i)(\b(?:content|prompt|messages|instructions|question|answer)\b[\"']?\s*[:=]\s*).+"),
        r"\1" + MASK,
    ),
    (re.compile(r"([\"'])(?=[^\"'\n]*\s[^\"'\n]*\s)[^\"'\n]{12,}\1"), rf"\1{MASK}\1"),
    (re.compile(r"(?:/private)?/(?:Users|home)/[^/\s:;,'\"()]+"), "~"),
    (re.compile(r"/(?:var/)?root(?=/|\b)"), "~"),
    (re.compile(r"/(?:Volumes|mnt|media)/[^/\n:;,\"()]+"), "/disk"),
)
_IPV4 = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b")
_IPV6 = re.compile(r"(?<![\w:])[0-9A-Fa-f]{0,4}(?::[0-9A-Fa-f]{0,4}){2,7}(?:%\w+)?(?![\w:])")
_WORD = re.compile(r"[^\W\d_](?:[^\W_]|(?<=\w)'(?=\w))*|\d+[^\W\d_][^\W_]*")
_LONG_NUMBER = re.compile(r"\d{16,}")


class Redactor:
    """`names`: what to say instead of a name; `secrets`: what must not be said in any form; `vocabulary`:
    words (any case) that may stay."""

    def __init__(self, names: Mapping[str, str], secrets: Iterable[str], vocabulary: Iterable[str]) -> None:
        self._secrets = sorted({each for each in secrets if each}, key=len, reverse=True)
        self._names = {name.lower(): said for name, said in names.items() if name}
        ordered = sorted(self._names, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, ordered))
        self._name = re.compile(rf"(?<![\w])(?:{alternatives})(?![\w])", re.IGNORECASE) if ordered else None
        # A name is none of our words, whatever a source file says.
        self._words = {word.lower() for word in vocabulary} | _parts_of(self._names.values())
        self._words -= {name for name in self._names if name.isalnum()} - _parts_of(self._names.values())

    def text(self, text: str) -> str:
        """Any text, line by line."""
        for secret in self._secrets:
            text = text.replace(secret, "<key>")
        for form, said in _FORMS:
            text = form.sub(said, text)
        return "\n".join(self._line(line[:MAX_LINE_CHARACTERS]) for line in text.split("\n"))

    def value(self, value: Any) -> Any:
        """JSON: strings, and keys of objects, since some are names."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.value(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.value(item) for item in value]
        return value

    def _line(self, line: str) -> str:
        if self._name is not None:
            line = self._name.sub(lambda match: self._names[match[0].lower()], line)
        line = _IPV4.sub(lambda match: _told_address(match[0]), line)
        line = _IPV6.sub(lambda match: _told_address(match[0]), line)
        line = _LONG_NUMBER.sub(MASK, line)
        line = _WORD.sub(lambda match: match[0] if self._may_stay(match[0]) else MASK, line)
        return re.sub(rf"(?:{MASK}[\s_./'-]*)+{MASK}", MASK, line)  # how long it was is nobody's business

    def _may_stay(self, word: str) -> bool:
        return word.isascii() and word.lower() in self._words


def _parts_of(texts: Iterable[str]) -> set[str]:
    fixed = "key address id mac hex ip disk SHA256"
    return {match[0].lower() for text in (fixed, *texts) for match in _WORD.finditer(text)}


def _told_address(text: str) -> str:
    """Addresses of a local network tell nothing of anybody; others do."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    if address.version == 4:
        return text if address.is_private or address.is_loopback or address.is_unspecified else "<ip>"
    return text if address.is_loopback or address.is_unspecified else "<ip>"


def words_of(text: str) -> set[str]:
    """All words of a text, for a vocabulary."""
    return {match[0].lower() for match in _WORD.finditer(text)}
