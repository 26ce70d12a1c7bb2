"""How the prefix cache of a mesh is set, and what it may take on each rank. Pure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from mlx_mesh.mesh.errors import SettingsError
from mlx_mesh.mesh.hostfile_fields import parse_memory
from mlx_mesh.mesh.kv_budget import BLOCK_TOKENS, UNKNOWN_CONTEXT, KvBudget

MAX_PATH_BYTES = 1024

UNKNOWN_LIMIT_BYTES = 1024**3
"""Of a rank whose memory has no known limit."""


class PrefixSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`max_bytes`: of all entries on one rank; 0 = half of what its memory leaves for keys and values.
    `folder`: for files of system prompts on each host, '' = there are none; of prompts of up to
    `max_system_tokens` tokens, 0 = any; `max_disk_bytes` of each rank."""

    is_enabled: bool = True
    max_bytes: int = 0
    folder: str = ""
    max_system_tokens: int = 2048
    max_disk_bytes: int = 2 * 1024**3
    is_per_key: bool = False  # clients with different API keys share none


def add_flags(parser: argparse._ActionsContainer) -> None:
    """The flags of launcher and manual bootstrap, under the names that other servers have for them."""
    parser.add_argument(
        "--enable-prefix-caching",
        nargs="?",
        const="true",
        default="true",
        metavar="true|false",
        help="begin prompts with what earlier ones have in common (default true)",
    )
    parser.add_argument(
        "--no-enable-prefix-caching",
        "--disable-kv-cache",
        dest="enable_prefix_caching",
        action="store_const",
        const="false",
        help="keep nothing of a request when it ends",
    )
    parser.add_argument(
        "--prefix-cache-bytes",
        "--prompt-cache-bytes",
        metavar="SIZE",
        help="the most for that on each rank, like 2GB; 0 = off (default half of what is left for KV)",
    )
    parser.add_argument(
        "--prefix-cache-per-key",
        action="store_true",
        help="clients with different API keys share nothing that is kept of prompts",
    )
    parser.add_argument(
        "--prompt-cache-dir",
        metavar="DIR",
        help="folder on each host for what system prompts compute, which then outlives a restart",
    )
    parser.add_argument(
        "--system-cache-max-tokens",
        type=int,
        default=PrefixSettings().max_system_tokens,
        metavar="N",
        help="longer system prompts are not kept there; 0 = no limit (default %(default)s)",
    )
    parser.add_argument(
        "--system-cache-bytes",
        metavar="SIZE",
        help="the most for each rank there (default 2GiB); the least recently used go first",
    )


def read_flags(flags: argparse.Namespace) -> PrefixSettings:
    """Raises SettingsError."""
    word = str(flags.enable_prefix_caching).lower()
    if word not in ("true", "false"):
        raise SettingsError(f"--enable-prefix-caching {flags.enable_prefix_caching}: give true or false.")
    if flags.system_cache_max_tokens < 0:
        raise SettingsError(
            f"--system-cache-max-tokens {flags.system_cache_max_tokens}: give 0 (no limit) or more."
        )
    is_enabled, max_bytes = word == "true", 0
    if flags.prefix_cache_bytes is not None:
        max_bytes = _size("--prefix-cache-bytes", flags.prefix_cache_bytes)
        is_enabled = is_enabled and max_bytes > 0
    settings = PrefixSettings(
        is_enabled=is_enabled, max_bytes=max_bytes, is_per_key=flags.prefix_cache_per_key
    )
    if flags.prompt_cache_dir is None:
        return settings
    if settings.is_per_key:
        raise SettingsError(
            "--prompt-cache-dir does not go together with --prefix-cache-per-key: files are for all clients. "
            "Leave one of them out."
        )
    return msgspec.structs.replace(
        settings,
        folder=_folder(flags.prompt_cache_dir),
        max_system_tokens=flags.system_cache_max_tokens,
        max_disk_bytes=settings.max_disk_bytes
        if flags.system_cache_bytes is None
        else _size("--system-cache-bytes", flags.system_cache_bytes),
    )


def check_keys(settings: PrefixSettings, api_keys: Sequence[str]) -> PrefixSettings:
    """Raises SettingsError."""
    if settings.is_per_key and not api_keys:
        raise SettingsError(
            "--prefix-cache-per-key tells clients apart by their API keys, and there are none: set "
            "MLX_MESH_API_KEY or --api-key-file, or leave it out."
        )
    return settings


def _size(flag: str, given: str) -> int:
    size = int(given) if given.isascii() and given.isdecimal() else parse_memory(given)
    if isinstance(size, str) or size >= 1 << 63:
        raise SettingsError(f"{flag} {given!r} is no size: a number of bytes, or like 500MB, 2GB or 2GiB.")
    return size


def _folder(given: str) -> str:
    """A relative path is one on this machine; `~` is each host's own home."""
    if not given.strip() or "\0" in given or len(given.encode()) > MAX_PATH_BYTES:
        raise SettingsError(f"--prompt-cache-dir {given[:40]!r} cannot be the path of a folder.")
    return given if given.startswith(("/", "~")) else str(Path(given).resolve())


class PrefixCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank. A follower knows `num_entries` and `num_bytes` only: the others are the leader's."""

    num_entries: int = 0
    num_bytes: int = 0  # as its arrays say
    limit_bytes: int = 0
    num_hits: int = 0  # admissions that began with an entry
    num_misses: int = 0
    num_tokens: int = 0  # that did not have to be computed again
    num_stored: int = 0
    num_evicted: int = 0  # for want of room, or replaced by a longer one


def longest_entry(settings: PrefixSettings, kv: KvBudget) -> int:
    """Tokens of the longest prefix that fits into the limit of every rank, a whole number of blocks: of a
    longer prompt nothing is kept."""
    limits = limits_of(settings, kv)
    fits, too_many = 0, UNKNOWN_CONTEXT // BLOCK_TOKENS
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        sizes = [rank.bytes_of(1, middle * BLOCK_TOKENS) for rank in kv.ranks]
        if all(size <= limit for size, limit in zip(sizes, limits, strict=False)):
            fits = middle
        else:
            too_many = middle
    return fits * BLOCK_TOKENS


def limits_of(settings: PrefixSettings, kv: KvBudget) -> tuple[int, ...]:
    """Bytes by rank; of one rank when nothing is known of the ranks. 0 when nothing is kept."""

    def limit(budget_bytes: int | None) -> int:
        if budget_bytes is None:
            return settings.max_bytes or UNKNOWN_LIMIT_BYTES
        return min(settings.max_bytes or budget_bytes // 2, budget_bytes)

    if not settings.is_enabled:
        return (0,) * (len(kv.ranks) or 1)
    return tuple(limit(rank.budget_bytes) for rank in kv.ranks) or (limit(None),)
