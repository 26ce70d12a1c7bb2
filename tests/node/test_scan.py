"""Looking at the network: what comes back on an interface, and a real look on loopback."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import queue
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from zeroconf import (  # type: ignore[attr-defined]
    DNSOutgoing,
    DNSPointer,
    DNSService,
    DNSText,
)
from zeroconf.const import _CLASS_IN, _FLAGS_QR_QUERY, _FLAGS_QR_RESPONSE, _TYPE_PTR, _TYPE_SRV, _TYPE_TXT

from mlx_mesh.mesh.discovery import (
    CACHE_KEPT_S,
    MAX_HOSTS,
    SERVICE,
    Announcement,
    HostInterface,
    Rejected,
    Scan,
    ScanWish,
    format_txt,
)
from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.mesh.types import Versions
from mlx_mesh.node.announce import Announced, Announcer, Wish
from mlx_mesh.node.identity import ssh_fingerprint
from mlx_mesh.node.peers import peers_file, read_peers, remember
from mlx_mesh.node.scan import Asker

VERSIONS = Versions(mlx_mesh="1", mlx="1", mlx_lm="1", python="3", protocol=1)
KEY = "SHA256:" + "k" * 43
QUERY_ID = 4711


def said(number: int = 2) -> Announcement:
    en0 = HostInterface(name="en0", link_class=LinkClass.ETHERNET, addresses=(f"127.0.0.{number}/8",))
    return Announcement(
        host=f"mac{number}",
        run=f"{number:016x}",
        role="agent",
        key=KEY,
        port=17864,
        versions=VERSIONS,
        interfaces=(en0,),
    )


def text_of(strings: dict[str, str]) -> bytes:
    texts = [f"{key}={value}".encode() for key, value in strings.items()]
    return b"".join(bytes([len(text)]) + text for text in texts)


def packet(
    query_id: int,
    *,
    name: str = "mac2",
    strings: dict[str, str] | None = None,
    service: str = SERVICE,
    ttl: int = 10,
    flags: int = _FLAGS_QR_RESPONSE,
) -> bytes:
    answer = DNSOutgoing(flags, multicast=False, id_=query_id)
    full = f"{name}.{service}"
    text = text_of(format_txt(said()) if strings is None else strings)
    answer.add_answer_at_time(DNSPointer(service, _TYPE_PTR, _CLASS_IN, ttl, full), 0)
    answer.add_answer_at_time(DNSService(full, _TYPE_SRV, _CLASS_IN, ttl, 0, 0, 17864, "x.local."), 0)
    answer.add_answer_at_time(DNSText(full, _TYPE_TXT, _CLASS_IN, ttl, text), 0)
    return bytes(answer.packets()[0])


@pytest.fixture
def asker() -> Asker:
    made = Asker(
        Interface(name="lo", link_class=LinkClass.LOOPBACK, evidence="x", addresses=("127.0.0.1/8",))
    )
    made.query_ids = {QUERY_ID}
    made.close()  # what comes is handed to it
    return made


def test_an_answer_is_a_sighting(asker: Asker) -> None:
    asker.hear(packet(QUERY_ID), "127.0.0.2")
    asker.hear(packet(QUERY_ID), "127.0.0.2")
    (sighting,) = asker.sightings()
    assert sighting.announcement == said()
    assert (sighting.source, sighting.interface, sighting.sender) == ("multicast", "lo", "127.0.0.2")
    assert (asker.told().num_answers, asker.told().hosts, asker.told().rejected) == (2, ("mac2",), ())


@pytest.mark.parametrize(
    ("change", "sender", "reason"),
    [
        ({}, "10.0.0.1", "10.0.0.1 is not on the network of lo"),
        ({"service": "_http._tcp.local."}, "127.0.0.2", "an answer about another service"),
        ({"flags": _FLAGS_QR_QUERY}, "127.0.0.2", "not an answer of DNS"),
        ({"strings": {"v": "9"}}, "127.0.0.2", "a record of version '9'"),
        ({"strings": format_txt(said()) | {"host": "a b"}}, "127.0.0.2", "host='a b'"),
    ],
)
def test_what_is_not_used_is_told_with_its_sender_and_why(
    asker: Asker, change: dict[str, object], sender: str, reason: str
) -> None:
    for _ in range(2):
        asker.hear(packet(QUERY_ID, **change), sender)  # type: ignore[arg-type]
    assert asker.sightings() == []
    (rejected,) = asker.told().rejected
    assert rejected.reason.startswith(reason) and rejected.sender == sender


def test_an_answer_to_another_question_is_none(asker: Asker) -> None:
    asker.hear(packet(QUERY_ID + 1), "127.0.0.2")
    assert asker.told().rejected == (Rejected(sender="127.0.0.2", reason="an answer to another question"),)


def test_who_says_goodbye_is_not_there(asker: Asker) -> None:
    asker.hear(packet(QUERY_ID), "127.0.0.2")
    asker.hear(packet(QUERY_ID, ttl=0), "127.0.0.2")
    assert asker.sightings() == []


@pytest.mark.parametrize("noise", [b"", b"\0", b"\xff" * 100, packet(1)[:40]])
def test_noise_is_rejected(asker: Asker, noise: bytes) -> None:
    asker.hear(noise, "127.0.0.2")
    assert asker.sightings() == [] and len(asker.told().rejected) == 1


def test_there_is_an_end_to_what_one_scan_takes(asker: Asker) -> None:
    for number in range(MAX_HOSTS + 5):
        strings = format_txt(said()) | {"run": f"{number:016x}"}
        asker.hear(packet(QUERY_ID, name=f"mac{number}", strings=strings), "127.0.0.2")
    assert len(asker.sightings()) == MAX_HOSTS
    assert asker.told().rejected == (
        Rejected(sender="127.0.0.2", reason=f"more than {MAX_HOSTS} announcements", count=5),
    )
    for number in range(100):
        asker.hear(b"x", f"127.0.1.{number}")
    assert len(asker.told().rejected) == 32


# ---------------------------------------------------------------- peers


def test_agents_are_remembered_for_a_while_and_no_others(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert read_peers(state, 0.0) == []
    node = msgspec.structs.replace(said(3), role="node", key="", port=0)
    remember(state, [said(2), node], 1000.0)
    remember(state, [msgspec.structs.replace(said(4), key="SHA256:" + "4" * 43)], 2000.0)
    assert [(each.announcement.host, each.source, each.age_s) for each in read_peers(state, 2060.0)] == [
        ("mac4", "cache", 60.0),
        ("mac2", "cache", 1060.0),
    ]
    assert stat.S_IMODE(peers_file(state).stat().st_mode) == 0o600
    assert [each.announcement.host for each in read_peers(state, 1500.0 + CACHE_KEPT_S)] == ["mac4"]


def test_a_file_of_peers_that_cannot_be_read_remembers_nobody(tmp_path: Path) -> None:
    for text in ("", "{", '[{"announcement": 1}]', "[" * 10**5):
        peers_file(tmp_path).write_text(text)
        assert read_peers(tmp_path, 0.0) == []
    remember(tmp_path, [said()], 0.0)
    assert len(read_peers(tmp_path, 0.0)) == 1


def test_there_is_an_end_to_peers(tmp_path: Path) -> None:
    many = [msgspec.structs.replace(said(), host=f"m{number}") for number in range(MAX_HOSTS + 9)]
    remember(tmp_path, many, 0.0)
    assert len(read_peers(tmp_path, 0.0)) == MAX_HOSTS


# ---------------------------------------------------------------- identity


def test_the_ssh_host_key_is_told_as_ssh_tells_it(tmp_path: Path) -> None:
    assert ssh_fingerprint(tmp_path) == ""
    (tmp_path / "ssh_host_rsa_key.pub").write_text("ssh-rsa AAAA root@x\n")
    (tmp_path / "ssh_host_ed25519_key.pub").write_text("nonsense")
    expected = base64.b64encode(hashlib.sha256(b"\0\0\0").digest()).decode().rstrip("=")
    assert ssh_fingerprint(tmp_path) == f"SHA256:{expected}"


# ---------------------------------------------------------------- really


def test_a_host_that_announces_itself_is_seen_and_one_that_left_is_not(tmp_path: Path) -> None:
    told: queue.Queue[Announced] = queue.Queue()
    loopback = "lo" if sys.platform == "linux" else "lo0"
    announcer = Announcer(Wish(role="agent", port=17999, key=KEY, interfaces=(loopback,)), on_change=told.put)
    announcer.start()
    try:
        first = told.get(timeout=30.0)
        if first.error:
            pytest.skip(f"no multicast on loopback here: {first.error}")
        seen = look(tmp_path, loopback)
        # Other test runs on this machine may announce themselves there, too.
        ours = [each for each in seen.sightings if each.announcement.run == first.strings["run"]]
        sighting = next(each for each in ours if each.source == "multicast")
        assert format_txt(sighting.announcement) == first.strings
        assert (sighting.announcement.port, sighting.interface, sighting.sender) == (
            17999,
            loopback,
            "127.0.0.1",
        )
        assert seen.interfaces[0].num_queries >= 1 and seen.interfaces[0].num_answers >= 1
        assert all(not each.is_used for each in seen.interfaces[1:])
    finally:
        announcer.stop()
    gone = look(tmp_path, loopback)
    left = [each for each in gone.sightings if each.announcement.run == first.strings["run"]]
    assert [each.source for each in left] == ["cache"]


def look(state: Path, loopback: str) -> Scan:
    with subprocess.Popen(
        [sys.executable, "-I", "-m", "mlx_mesh.node.scan"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"XDG_STATE_HOME": str(state), "PATH": "/usr/bin:/bin:/usr/sbin:/sbin"},
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(msgspec.json.encode(ScanWish(timeout_s=1.0, interfaces=(loopback,))) + b"\n")
        child.stdin.flush()
        found = msgspec.json.decode(child.stdout.readline(), type=Scan)
        with contextlib.suppress(OSError):
            child.stdin.close()
        return found
