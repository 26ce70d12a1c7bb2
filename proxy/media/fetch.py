"""A file by URL, from hosts that the operator allowed and from the public internet only.

Every address of a name is checked, and the connection goes to an address that was checked, so a name that
resolves differently a moment later changes nothing. A redirect is a new URL: checked from the start.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from urllib.parse import urljoin

import h11

from mlx_mesh.proxy.media.addresses import Target, UrlRefused, read_url, refusal_of
from mlx_mesh.proxy.media.limits import FETCH_DEADLINE_S, MAX_FILE_BYTES, MAX_REDIRECTS

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host; raises OSError."""

Connect = Callable[
    [str, int, ssl.SSLContext | None, str], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
]
"""To an address and port, by TLS for this host name when there is a context; raises OSError."""

_MAX_HEAD_BYTES = 16 * 1024
_READ_BYTES = 64 * 1024
_MAX_ADDRESSES = 4  # of a host, tried one after the other
_REDIRECTS = (301, 302, 303, 307, 308)


class FetchFailed(Exception):
    """The message says what was seen, after the name of the part."""


class FileTooLarge(FetchFailed):
    """The host sent, or announced, more than such a file may have."""


async def resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


async def connect(
    address: str, port: int, tls: ssl.SSLContext | None, host: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=host if tls else None)


@dataclass(frozen=True, slots=True)
class Fetcher:
    """`allowed`: host names, in lower case; () = no URL is asked."""

    allowed: frozenset[str] = frozenset()
    resolve: Resolve = resolve
    connect: Connect = connect
    deadline_s: float = FETCH_DEADLINE_S

    async def fetch(self, url: str, kind: str = "image", inline: str = "data URLs") -> bytes:
        """The file, of which `kind` it should be. `inline`: as what it could be sent, for errors. Raises
        UrlRefused, without asking anyone, and FetchFailed."""
        try:
            async with asyncio.timeout(self.deadline_s):
                for _ in range(MAX_REDIRECTS + 1):
                    target = read_url(url, self.allowed, inline)
                    answer = await self._ask(target, kind)
                    if isinstance(answer, bytes):
                        return answer
                    url = _joined(url, answer.location)
        except TimeoutError as error:
            raise FetchFailed(
                f"was not read within {self.deadline_s:g} s (FETCH_DEADLINE_S); it can also be sent "
                f"with the request: files are taken as {inline}"
            ) from error
        raise FetchFailed(f"was redirected more than {MAX_REDIRECTS} times")

    async def _ask(self, target: Target, kind: str) -> bytes | _Redirect:
        reader, writer = await self._connected(target, await self._checked_addresses(target))
        try:
            return await _exchange(reader, writer, target, kind)
        except (OSError, h11.RemoteProtocolError) as error:
            raise FetchFailed(f"could not be read from {target.host}: {error}") from error
        finally:
            writer.transport.abort()

    async def _connected(
        self, target: Target, addresses: list[str]
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        tls = ssl.create_default_context() if target.scheme == "https" else None
        errors = []
        for address in addresses[:_MAX_ADDRESSES]:
            try:
                return await self.connect(address, target.port, tls, target.host)
            except OSError as error:
                errors.append(f"{address}: {error}")
        raise FetchFailed(f"cannot be read from {target.host} ({'; '.join(errors)})")

    async def _checked_addresses(self, target: Target) -> list[str]:
        try:
            addresses = await self.resolve(target.host, target.port)
        except (OSError, UnicodeError) as error:
            raise FetchFailed(f"names the host {target.host}, which has no address ({error})") from error
        if not addresses:
            raise FetchFailed(f"names the host {target.host}, which has no address")
        for address in addresses:
            if why := refusal_of(address):
                raise UrlRefused(f"leads to {target.host}, which has an address that is not asked ({why})")
        return addresses


@dataclass(frozen=True, slots=True)
class _Redirect:
    location: str


def _joined(url: str, location: str) -> str:
    try:
        return urljoin(url, location)
    except ValueError as error:
        raise UrlRefused(f"was redirected to what is no URL ({error})") from error


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: Target, kind: str
) -> bytes | _Redirect:
    http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)
    headers = [
        ("host", target.authority),
        ("accept", f"{kind}/*"),
        ("accept-encoding", "identity"),
        ("user-agent", "mlx-mesh"),
        ("connection", "close"),
    ]
    asked = http.send(h11.Request(method="GET", target=target.path, headers=headers)) or b""
    writer.write(asked + (http.send(h11.EndOfMessage()) or b""))
    await writer.drain()
    most = MAX_FILE_BYTES[kind]
    data = bytearray()
    while True:
        match event := http.next_event():
            case h11.NEED_DATA:
                http.receive_data(await reader.read(_READ_BYTES))
            case h11.Response():
                if (redirect := _judge(event, target, most)) is not None:
                    return redirect
            case h11.Data():
                data += event.data
                if len(data) > most:
                    raise FileTooLarge(f"gives more than {most} bytes")
            case h11.EndOfMessage():
                return bytes(data)
            case h11.ConnectionClosed() | h11.PAUSED:
                raise FetchFailed(f"could not be read from {target.host}: the connection ended early")


def _judge(response: h11.Response, target: Target, most: int) -> _Redirect | None:
    """None: the file follows."""
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in response.headers}
    if response.status_code in _REDIRECTS and "location" in headers:
        return _Redirect(headers["location"])
    if response.status_code != 200:
        raise FetchFailed(f"is answered by {target.host} with status {response.status_code}")
    if headers.get("content-encoding", "identity") != "identity":
        raise FetchFailed(f"is given by {target.host} compressed, which was not asked for")
    length = headers.get("content-length", "")
    if length.isdecimal() and int(length) > most:
        raise FileTooLarge(f"has {length[:20]} bytes; at most {most} are taken")
    return None
