"""What a request says about kept prefixes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class _Fields(Protocol):
    @property
    def cache_salt(self) -> str | None: ...
    @property
    def skip_prefix_cache(self) -> bool | None: ...


@dataclass(frozen=True, slots=True)
class PrefixChoice:
    """`salt`: only requests with the same one share prefixes; `is_skipped`: it uses none and leaves none;
    `is_reset`: it uses none."""

    salt: str = ""
    is_skipped: bool = False
    is_reset: bool = False

    @classmethod
    def of(cls, body: _Fields) -> PrefixChoice:
        return cls(body.cache_salt or "", bool(body.skip_prefix_cache))
