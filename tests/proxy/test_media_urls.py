"""Pictures by URL: only from allowed hosts of the public internet, checked at every hop, and bounded."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from mlx_mesh.proxy.media import limits
from mlx_mesh.proxy.media.addresses import UrlRefused, read_url, refusal_of
from mlx_mesh.proxy.media.fetch import Fetcher, FetchFailed, FileTooLarge
from mlx_mesh.proxy.media.item import Item

PUBLIC = "93.184.216.34"
HOST = "img.example"


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "itself"),
        ("127.8.9.1", "itself"),
        ("::1", "itself"),
        ("0.0.0.0", "private or reserved"),
        ("::", "leads to an IPv4"),
        ("10.0.0.5", "private"),
        ("172.16.3.4", "private"),
        ("192.168.1.1", "private"),
        ("100.64.0.1", "private"),
        ("100.100.100.200", "metadata"),
        ("169.254.169.254", "metadata"),
        ("169.254.1.1", "link-local"),
        ("fe80::1", "link-local"),
        ("fe80::1%en0", "link-local"),
        ("fd00:ec2::254", "metadata"),
        ("fd12::1", "private"),
        ("fec0::1", "private"),
        ("::ffff:0:7f00:1", "private"),  # IPv4-translated
        ("224.0.0.1", "multicast"),
        ("ff02::1", "multicast"),
        ("255.255.255.255", "reserved"),
        ("240.0.0.1", "reserved"),
        ("192.0.2.1", "reserved"),
        ("198.18.0.1", "reserved"),
        ("::ffff:127.0.0.1", "leads to an IPv4"),
        ("::ffff:93.184.216.34", "leads to an IPv4"),
        ("64:ff9b::7f00:1", "leads to an IPv4"),
        ("2002:7f00:1::", "leads to an IPv4"),
        ("2001:0:53aa:64c::1", "leads to an IPv4"),
        ("2001:db8::1", "reserved"),
        ("nonsense", "no address"),
    ],
)
def test_addresses_that_are_never_asked(address: str, why: str) -> None:
    assert why in refusal_of(address)


@pytest.mark.parametrize("address", [PUBLIC, "8.8.8.8", "2606:2800:220:1:248:1893:25c8:1946"])
def test_addresses_of_the_public_internet_are(address: str) -> None:
    assert refusal_of(address) == ""


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("file:///etc/passwd", "never read"),
        ("file://img.example/etc/passwd", "never read"),
        ("/etc/passwd", "never read"),
        ("~/cat.png", "never read"),
        ("cat.png", "never read"),
        ("C:\\cat.png", "characters"),
        ("ftp://img.example/x", "scheme 'ftp'"),
        ("gopher://img.example/x", "scheme"),
        ("javascript:alert(1)", "scheme"),
        ("http://", "no host"),
        ("http:///x", "no host"),
        ("http://user:pw@img.example/x", "user name"),
        ("http://img.example@10.0.0.1/x", "user name"),
        ("http://10.0.0.1/x", "not on the list"),
        ("http://img.example.evil.test/x", "not on the list"),
        ("http://evil-img.example/x", "not on the list"),
        ("http://sub.img.example/x", "not on the list"),
        ("http://img.example\\@evil.test/x", "characters"),
        ("http://img.example/a b", "characters"),
        ("http://img.example/\r\nX: y", "characters"),
        ("http://img.example:port/x", "no URL"),
        ("http://[::1/x", "no URL"),
        ("http://ⓘmg.example/x", "characters"),
        ("http://img.example/" + "a" * 5000, "5019 characters"),
    ],
)
def test_urls_that_are_never_asked(url: str, why: str) -> None:
    with pytest.raises(UrlRefused, match=why):
        read_url(url, frozenset({HOST}))


@pytest.mark.parametrize("base64", ["/9j/4AAQSkZJRg==", "iVBORw0KGgo=" * 500])
def test_what_is_no_url_is_told_in_which_form_files_come(base64: str) -> None:
    with pytest.raises(UrlRefused, match=r"files come as data URLs \(data:image/png;base64,…\)"):
        read_url(base64, frozenset(), Item("", "").inline)


def test_without_a_list_no_url_is_asked() -> None:
    with pytest.raises(UrlRefused, match="--allowed-media-domains"):
        read_url(f"https://{HOST}/x", frozenset())


def test_what_goes_over_the_wire() -> None:
    target = read_url("HTTPS://IMG.example.:8443/a/b.png?c=d#e", frozenset({HOST}))
    assert (target.scheme, target.host, target.port, target.path) == ("https", HOST, 8443, "/a/b.png?c=d")
    assert target.authority == "img.example:8443"
    assert read_url("http://img.example", frozenset({HOST})).path == "/"


# ---------------------------------------------------------------- fetching

Serve = Callable[[str], bytes]


class Internet:
    """A server on loopback that plays all hosts; what was resolved, connected and asked is noted."""

    def __init__(self, serve: Serve, names: dict[str, list[list[str]]] | None = None) -> None:
        self._serve = serve
        self._names = names or {}
        self._port = 0
        self.resolved: list[str] = []
        self.connected: list[tuple[str, int]] = []
        self.asked: list[str] = []
        self.served = asyncio.Event()

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        answers = self._names.get(host, [[PUBLIC]])
        return answers.pop(0) if len(answers) > 1 else answers[0]

    async def connect(
        self, address: str, port: int, tls: ssl.SSLContext | None, host: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self.connected.append((address, port))
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head)
        writer.write(self._serve(head.split()[1]))
        if "/stalls" in head:
            await reader.read()  # until the other side gives up
        writer.close()
        self.served.set()

    def run(self, ask: Callable[[Fetcher], Awaitable[Any]], deadline_s: float = 10.0) -> Any:
        async def play() -> Any:
            server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
            self._port = server.sockets[0].getsockname()[1]
            fetcher = Fetcher(frozenset({HOST, "other.example"}), self.resolve, self.connect, deadline_s)
            try:
                return await ask(fetcher)
            finally:
                server.close()
                if self.asked:
                    await self.served.wait()

        return asyncio.run(play())

    def fetch(self, url: str, deadline_s: float = 10.0) -> bytes:
        found = self.run(lambda fetcher: fetcher.fetch(url), deadline_s)
        assert isinstance(found, bytes)
        return found


def ok(body: bytes, *headers: str) -> bytes:
    lines = ["HTTP/1.1 200 OK", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def moved(location: str, status: int = 302) -> bytes:
    return f"HTTP/1.1 {status} Moved\r\nlocation: {location}\r\ncontent-length: 0\r\n\r\n".encode()


def test_the_file_comes_from_the_address_that_was_checked() -> None:
    internet = Internet(lambda _: ok(b"picture"))
    assert internet.fetch(f"http://{HOST}/cat.png?s=1") == b"picture"
    assert internet.connected == [(PUBLIC, 80)]
    assert internet.asked[0].startswith("GET /cat.png?s=1 HTTP/1.1\r\n")
    assert f"host: {HOST}\r\n" in internet.asked[0].lower()


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\npic\r\n4\r\nture\r\n0\r\n\r\n",
        b"HTTP/1.0 200 OK\r\n\r\npicture",
    ],
)
def test_bodies_without_a_length(answer: bytes) -> None:
    assert Internet(lambda _: answer).fetch(f"http://{HOST}/x") == b"picture"


@pytest.mark.parametrize(
    "bad", ["127.0.0.1", "10.1.2.3", "169.254.169.254", "::1", "fe80::1", "::ffff:10.0.0.1"]
)
def test_one_bad_address_of_a_name_is_enough_and_nobody_is_asked(bad: str) -> None:
    internet = Internet(lambda _: ok(b"secret"), {HOST: [[PUBLIC, bad]]})
    with pytest.raises(UrlRefused, match="address that is not asked"):
        internet.fetch(f"http://{HOST}/x")
    assert internet.connected == []


def test_a_name_that_changes_after_the_check_changes_nothing() -> None:
    """Resolved once for each request; the second answer would be this machine."""
    internet = Internet(lambda _: ok(b"picture"), {HOST: [[PUBLIC], ["127.0.0.1"]]})
    assert internet.fetch(f"http://{HOST}/x") == b"picture"
    assert internet.resolved == [HOST] and internet.connected == [(PUBLIC, 80)]


@pytest.mark.parametrize(
    ("location", "why"),
    [
        ("http://127.0.0.1/x", "not on the list"),
        ("http://evil.test/x", "not on the list"),
        ("file:///etc/passwd", "never read"),
        ("http://other.example/x", "address that is not asked"),
        ("http://[x", "what is no URL"),
    ],
)
def test_a_redirect_is_checked_as_the_first_url_was(location: str, why: str) -> None:
    internet = Internet(lambda _: moved(location), {"other.example": [["192.168.0.1"]]})
    with pytest.raises(UrlRefused, match=why):
        internet.fetch(f"http://{HOST}/x")
    assert internet.connected == [(PUBLIC, 80)]


def test_redirects_are_followed_three_times_and_no_more() -> None:
    def serve(path: str) -> bytes:
        left = int(path.strip("/"))
        return moved(f"/{left - 1}", 307) if left else ok(b"picture")

    assert Internet(serve).fetch(f"http://{HOST}/3") == b"picture"
    internet = Internet(serve)
    with pytest.raises(FetchFailed, match="redirected more than 3 times"):
        internet.fetch(f"http://{HOST}/4")
    assert len(internet.asked) == 4


@pytest.mark.parametrize(
    ("answer", "error", "why"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", FetchFailed, "status 404"),
        (b"HTTP/1.1 500 No\r\ncontent-length: 0\r\n\r\n", FetchFailed, "status 500"),
        (b"HTTP/1.1 302 Moved\r\ncontent-length: 0\r\n\r\n", FetchFailed, "status 302"),
        (b"not http at all\r\n\r\n", FetchFailed, "could not be read"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nshort", FetchFailed, "could not be read"),
        (b"HTTP/1.1 200 OK\r\nx: " + b"a" * 70_000 + b"\r\n\r\n", FetchFailed, "could not be read"),
        (ok(b"x", "content-encoding: gzip"), FetchFailed, "compressed"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 1001\r\n\r\n", FileTooLarge, "1001 bytes"),
        (b"HTTP/1.0 200 OK\r\n\r\n" + b"a" * 1001, FileTooLarge, "more than 1000 bytes"),
    ],
)
def test_what_is_no_good_answer(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, error: type[Exception], why: str
) -> None:
    monkeypatch.setitem(limits.MAX_FILE_BYTES, "image", 1000)
    with pytest.raises(error, match=why):
        Internet(lambda _: answer).fetch(f"http://{HOST}/x")


def test_a_host_that_stalls_is_given_up() -> None:
    with pytest.raises(FetchFailed, match=r"not read within 0.1 s \(FETCH_DEADLINE_S\)"):
        Internet(lambda _: b"HTTP/1.1 200 OK\r\n").fetch(f"http://{HOST}/stalls", deadline_s=0.1)


def test_the_next_address_is_tried_when_one_cannot_be_reached() -> None:
    internet = Internet(lambda _: ok(b"picture"), {HOST: [["8.8.8.8", PUBLIC]]})
    reach = internet.connect

    async def connect(address: str, port: int, tls: ssl.SSLContext | None, host: str) -> Any:
        if address == "8.8.8.8":
            raise OSError("no route")
        return await reach(address, port, tls, host)

    internet.connect = connect  # type: ignore[method-assign]
    assert internet.fetch(f"http://{HOST}/x") == b"picture"


def test_a_name_without_address() -> None:
    async def resolve(host: str, port: int) -> list[str]:
        raise OSError("unknown")

    internet = Internet(lambda _: b"")
    internet.resolve = resolve  # type: ignore[method-assign]
    with pytest.raises(FetchFailed, match="no address"):
        internet.fetch(f"http://{HOST}/x")
