"""known_hosts as OpenSSH reads it: markers, patterns, hashed names, ports. Pure: text in, verdict out."""

from __future__ import annotations

import base64
import binascii
import fnmatch
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha1, sha256


class Trust(Enum):
    KNOWN = "known"
    UNKNOWN = "unknown"
    CHANGED = "changed"
    REVOKED = "revoked"


@dataclass(frozen=True, slots=True)
class KnownKey:
    """One line of a known_hosts file."""

    marker: str  # '', '@revoked' or '@cert-authority'
    names: str  # comma-separated patterns, or one hashed name
    key_type: str
    key: str  # base64
    file: str
    line: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What known_hosts says of a key. `entry` is the line that decided, or one worth mentioning."""

    trust: Trust
    name: str  # the name looked up
    entry: KnownKey | None = None


def parse_known_hosts(text: str, file: str) -> list[KnownKey]:
    """The usable lines; comments and lines that OpenSSH would not understand either are left out."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        fields = line.split()
        marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
        if len(fields) >= 3 and not fields[0].startswith("#"):
            found.append(KnownKey(marker, fields[0], fields[1], fields[2], file, number))
    return found


def judge(entries: Iterable[KnownKey], known_as: Sequence[str], key_type: str, key: str) -> Verdict:
    """Whether `key` (base64) may be trusted as the key of a host. `known_as`: the names to look up, best
    first; a later one (without the port) can make a key known but not changed."""
    entries = list(entries)
    for name in known_as:
        for entry in entries:
            if entry.marker == "@revoked" and entry.key == key and name_matches(entry.names, name):
                return Verdict(Trust.REVOKED, name, entry)
    hint: KnownKey | None = None
    for index, name in enumerate(known_as):
        of_host = [
            entry for entry in entries if entry.marker != "@revoked" and name_matches(entry.names, name)
        ]
        plain = [entry for entry in of_host if not entry.marker]
        for entry in plain:
            if (entry.key_type, entry.key) == (key_type, key):
                return Verdict(Trust.KNOWN, name, entry)
        if index == 0:
            for entry in plain:
                if entry.key_type == key_type:
                    return Verdict(Trust.CHANGED, name, entry)
            hint = next(iter(of_host), None)
    return Verdict(Trust.UNKNOWN, known_as[0], hint)


def known_key_types(entries: Iterable[KnownKey], known_as: Sequence[str]) -> list[str]:
    """Types of the plain keys of a host: to be asked for first, or the server shows one that is not known."""
    return list(
        dict.fromkeys(
            entry.key_type
            for entry in entries
            if not entry.marker and any(name_matches(entry.names, name) for name in known_as)
        )
    )


def name_matches(names: str, name: str) -> bool:
    """Whether a names field covers `name` (lower case). A negated pattern that matches excludes it."""
    if names.startswith("|1|"):
        return _hashed_matches(names, name)
    found = False
    for pattern in names.lower().split(","):
        negated = pattern.startswith("!")
        # In known_hosts brackets are part of a name with a port, not a set of characters.
        if fnmatch.fnmatchcase(name, pattern.removeprefix("!").replace("[", "[[]")):
            if negated:
                return False
            found = True
    return found


def _hashed_matches(names: str, name: str) -> bool:
    try:
        _, _, salt, digest = names.split("|")
        wanted = base64.b64decode(digest, validate=True)
        seen = hmac.new(base64.b64decode(salt, validate=True), name.encode(), sha1).digest()
    except (ValueError, binascii.Error):
        return False
    return hmac.compare_digest(wanted, seen)


def fingerprint(key: str) -> str:
    """SHA256:... of a base64 key, as `ssh-keygen -l` prints it."""
    digest = sha256(base64.b64decode(key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def key_line(name: str, key_type: str, key: str, salt: bytes = b"") -> str:
    """A line for known_hosts. With a salt (20 bytes) the name is written as a hash of it."""
    if salt:
        digest = hmac.new(salt, name.encode(), sha1).digest()
        name = f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"
    return f"{name} {key_type} {key}\n"
