"""Which hosts a file's URL may lead to. Pure."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from urllib.parse import urlsplit

from mlx_mesh.proxy.media.limits import MAX_URL_CHARS

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_EMBEDDING = tuple(
    ipaddress.ip_network(net)
    for net in (
        "::/96",  # IPv4-compatible
        "::ffff:0:0/96",  # IPv4-mapped
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",
        "2001::/32",  # Teredo
        "2002::/16",  # 6to4
    )
)
"""IPv6 networks whose addresses lead to an IPv4 host, whatever that is."""

_PUBLIC = ipaddress.ip_network("2000::/3")
"""All that is given out of IPv6; beyond it lie old site-local addresses (fec0::/10), which Python takes for
global."""

_METADATA = frozenset(map(ipaddress.ip_address, ("169.254.169.254", "fd00:ec2::254", "100.100.100.200")))
"""Of clouds; all are refused by their networks, too."""

_PORTS = {"http": 80, "https": 443}


class UrlRefused(ValueError):
    """The message says why, and names no more than scheme and host."""


@dataclass(frozen=True, slots=True)
class Target:
    """What to ask: `host` in lower case, `path` with its query, as they go over the wire."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def authority(self) -> str:
        """For the Host header."""
        return self.host if self.port == _PORTS[self.scheme] else f"{self.host}:{self.port}"


def read_url(url: str, allowed: frozenset[str], inline: str = "data URLs") -> Target:
    """A URL whose host is on the list. `inline`: as what files are sent without one. Raises UrlRefused."""
    if len(url) > MAX_URL_CHARS:
        raise UrlRefused(
            f"has {len(url)} characters; a URL may have {MAX_URL_CHARS}, and files come as {inline}"
        )
    if not url.isascii() or any(char <= " " or char in "\\\x7f" for char in url):
        raise UrlRefused("has characters that stand in no URL; encode them with %")
    try:
        parts = urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port
    except ValueError as error:
        raise UrlRefused(f"is no URL ({error})") from error
    if parts.scheme not in _PORTS:
        scheme = f"the scheme {parts.scheme[:20]!r}" if parts.scheme else "no scheme"
        raise UrlRefused(
            f"has {scheme}; files come as {inline}, and from http and https where that is allowed. "
            "Files and paths of the server are never read"
        )
    if parts.username is not None or parts.password is not None:
        raise UrlRefused("has a user name or password; URLs with those are not asked")
    if not host:
        raise UrlRefused("names no host")
    if not allowed:
        raise UrlRefused(
            f"is not fetched: this server takes files as {inline} only. Its operator can allow hosts with "
            "--allowed-media-domains"
        )
    if host not in allowed:
        raise UrlRefused(
            f"leads to {host[:80]}, which is not on the list of hosts to ask (--allowed-media-domains)"
        )
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host, port or _PORTS[parts.scheme], path)


def refusal_of(text: str) -> str:
    """'' or why this address is not asked: it is not of the public internet."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return "no address"
    if address in _METADATA:
        return "a cloud's metadata service"
    if address.is_loopback:
        return "this machine itself"
    if any(address in network for network in _EMBEDDING):
        return "an IPv6 address that leads to an IPv4 one"
    if address.is_link_local:
        return "link-local"
    if address.is_multicast:
        return "multicast"
    if isinstance(address, ipaddress.IPv6Address) and address not in _PUBLIC:
        return "private or reserved"
    if address.is_private or address.is_reserved or address.is_unspecified or not address.is_global:
        return "private or reserved"
    return ""
