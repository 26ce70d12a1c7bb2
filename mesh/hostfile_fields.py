"""Single fields of a hostfile: names, SSH targets, IPv4 addresses, memory sizes. Pure checks in words."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_USER = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.$-]*")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9])?"
_DOMAIN = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_MAX_DOMAIN_CHARS = 253
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")
_UNITS = {
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
_MIN_MEMORY_BYTES = 10**6


@dataclass(frozen=True, slots=True)
class SshTarget:
    """`user@host` in its parts; `fault` is why it cannot be used, with the fix."""

    host: str
    user: str = ""
    fault: str = ""


def split_ssh_target(text: str) -> SshTarget:
    """`host` or `user@host`. Everything else about the connection belongs in ~/.ssh/config."""
    user, at, host = text.rpartition("@")
    if text.startswith("ssh://"):
        return SshTarget(
            "", fault=f"`ssh: {text}` is a URL; write HOST or USER@HOST, and a port in ~/.ssh/config"
        )
    if host.count(":") > 1 or host.startswith("["):
        return SshTarget(
            "",
            fault=f"`ssh: {text}` is an IPv6 address, which MLX's ring cannot use; "
            "write a host name, an IPv4 address or a Host of ~/.ssh/config",
        )
    if ":" in host:
        name, _, port = host.partition(":")
        return SshTarget(
            "",
            fault=f"`ssh: {text}` has a port; write `ssh: {name}` and put `Port {port}` "
            f"under `Host {name}` in ~/.ssh/config",
        )
    if not re.fullmatch(r"[A-Za-z0-9_.][A-Za-z0-9_.%-]*", host):
        return SshTarget("", fault=f"`ssh: {text}` is no host name; write HOST or USER@HOST")
    if at and not _USER.fullmatch(user):
        return SshTarget("", fault=f"`ssh: {text}` has no usable user name; write HOST or USER@HOST")
    return SshTarget(host, user)


def check_name(name: str) -> list[str]:
    """Why a mesh's or host's name cannot be used (it becomes a folder and a log prefix); [] when it can."""
    if _NAME.fullmatch(name):
        return []
    return ["must be 1 to 63 letters, digits, dots, dashes or underscores, beginning with a letter or digit"]


def check_address(address: str) -> list[str]:
    """Why an address cannot carry a data link, with the fix; [] when it can."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return [
            f"`{address}` is no IPv4 address; write four numbers like 10.77.0.2 (a name belongs in `ssh:`)",
        ]
    if parsed.version == 6:
        return [f"`{address}` is IPv6, and MLX's ring speaks IPv4 only; write the host's IPv4 address"]
    if "%" in address:
        return [f"`{address}` has an interface name; write the IPv4 address alone"]
    if parsed.is_unspecified or parsed.is_multicast or parsed.is_reserved:
        return [f"`{address}` is not the address of one host; write the host's own IPv4 address"]
    return []


def check_media_domain(host: str) -> list[str]:
    """Why images cannot be allowed from a host that is written like this, with the fix; [] when they can."""
    if _DOMAIN.fullmatch(host) and len(host) <= _MAX_DOMAIN_CHARS:
        return []
    return [
        f"`{host[:80]}` is no host name; write it alone and whole, like images.example.org: without "
        "https://, port, path or wildcard"
    ]


def parse_memory(value: object) -> int | str:
    """Bytes of '100GB' (10^9) or '96GiB' (2^30); text says why it cannot be read, with the fix."""
    match = _MEMORY.fullmatch(str(value))
    unit = match.group(2).upper() if match else ""
    if not match or unit not in _UNITS:
        reason = "has no unit" if match and not unit else "is no memory size"
        return f"`memory_limit: {value}` {reason}; write it like 100GB, 96GiB or 500MB"
    num_bytes = int(float(match.group(1)) * _UNITS[unit])
    if num_bytes < _MIN_MEMORY_BYTES:
        return f"`memory_limit: {value}` is under 1 MB; no layer fits into that"
    return num_bytes
