"""Asking the local network which hosts announce themselves, each interface by itself.

Questions go out by multicast DNS from a port of our own, so every answer comes to the socket of the interface
on which it was asked: it is known what was sent, seen and rejected there. Nothing is joined, and no other
program's port is shared. `python -m mlx_mesh.node.scan` reads a line of JSON (ScanWish) and prints a Scan.
"""

from __future__ import annotations

import ipaddress
import secrets
import select
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence

import msgspec
from zeroconf import (  # type: ignore[attr-defined]  # kept for its users, not in __all__
    DNSIncoming,
    DNSOutgoing,
    DNSPointer,
    DNSQuestion,
    DNSService,
    DNSText,
)
from zeroconf.const import _CLASS_IN, _FLAGS_QR_QUERY, _MDNS_ADDR, _MDNS_PORT, _TYPE_PTR

from mlx_mesh.mesh.discovery import (
    MAX_HOSTS,
    MAX_SCAN_S,
    MIN_SCAN_S,
    SERVICE,
    Announcement,
    InterfaceScan,
    RecordRejected,
    Rejected,
    Scan,
    ScanWish,
    Sighting,
    parse_txt,
    split_txt,
    usable_interfaces,
)
from mlx_mesh.mesh.errors import ExitCode, SettingsError
from mlx_mesh.mesh.interfaces import Interface, LinkClass
from mlx_mesh.node.identity import describe_host
from mlx_mesh.node.input import first_line, wait_for_end
from mlx_mesh.node.interfaces import own_interfaces
from mlx_mesh.node.peers import read_peers, remember
from mlx_mesh.node.run_file import state_root
from mlx_mesh.node.system import is_mac

ASK_AT_S = (0.0, 0.3, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0)
"""When the question is asked: some datagrams are lost."""

MAX_DATAGRAMS = 2000  # of one interface
MAX_REJECTED = 32
_MAX_DATAGRAM_BYTES = 9000


def scan(wish: ScanWish, stop: threading.Event | None = None) -> Scan:
    """Ask on all interfaces for `timeout_s`, or until `stop`. Blocks. Raises SettingsError for a time that
    cannot be."""
    if not MIN_SCAN_S <= wish.timeout_s <= MAX_SCAN_S:
        raise SettingsError(
            f"A scan of {wish.timeout_s:g} s is out of range; it takes {MIN_SCAN_S:g} to {MAX_SCAN_S:g} s."
        )
    all_interfaces = own_interfaces()
    used, unused = usable_interfaces(all_interfaces, wish.interfaces)
    askers = [Asker(interface) for interface in used]
    try:
        _ask_all(askers, wish.timeout_s, stop or threading.Event())
    finally:
        for asker in askers:
            asker.close()
    sightings = [sighting for asker in askers for sighting in asker.sightings()]
    remember(state_root(), [sighting.announcement for sighting in sightings], time.time())
    by_name = {interface.name: interface for interface in all_interfaces}
    return Scan(
        own=describe_host(secrets.token_hex(8), used),
        interfaces=(
            *(asker.told() for asker in askers),
            *(
                InterfaceScan(
                    name=name,
                    link_class=by_name[name].link_class if name in by_name else LinkClass.FOREIGN,
                    evidence=by_name[name].evidence if name in by_name else "not there",
                    is_used=False,
                    why_not=why,
                )
                for name, why in unused.items()
            ),
        ),
        sightings=(*sightings, *read_peers(state_root(), time.time())),
        is_mac=is_mac(),
    )


def _ask_all(askers: Sequence[Asker], timeout_s: float, stop: threading.Event) -> None:
    began = time.monotonic()
    due = [at for at in ASK_AT_S if at < timeout_s]
    while (now := time.monotonic() - began) < timeout_s and not stop.is_set():
        if due and now >= due[0]:
            due.pop(0)
            for asker in askers:
                asker.ask()
        until = min([timeout_s, *due[:1]])
        open_ones = {asker.sock: asker for asker in askers if asker.sock is not None}
        wait_s = min(0.25, max(0.0, until - now))  # `stop` has no descriptor
        if not open_ones:
            stop.wait(wait_s)
            continue
        readable, _, _ = select.select(list(open_ones), [], [], wait_s)
        for sock in readable:
            open_ones[sock].take()


class Asker:
    """The question on one interface, and what comes back."""

    def __init__(self, interface: Interface) -> None:
        self._interface = interface
        self._network = ipaddress.IPv4Interface(interface.addresses[0])
        self.query_ids: set[int] = set()
        self._texts: dict[str, tuple[dict[str, str], str]] = {}  # instance: strings, sender
        self._ports: dict[str, int] = {}
        self._rejected: Counter[tuple[str, str]] = Counter()
        self._num_queries = self._num_answers = 0
        self._hosts: tuple[str, ...] = ()
        self.error = ""
        self.sock: socket.socket | None = None
        try:
            self.sock = self._open()
        except OSError as error:
            self.error = f"{self._network.ip}: {error.strerror or error}"

    def _open(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            here = str(self._network.ip)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(here))
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 255)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_LOOP, 1)
            sock.bind((here, 0))
        except BaseException:
            sock.close()
            raise
        return sock

    def ask(self) -> None:
        if self.sock is None:
            return
        # Each under an id of its own: responders take no notice of the same datagram within a second.
        query_id = secrets.randbelow(0xFFFF) + 1
        self.query_ids.add(query_id)
        query = DNSOutgoing(_FLAGS_QR_QUERY, multicast=False, id_=query_id)
        query.add_question(DNSQuestion(SERVICE, _TYPE_PTR, _CLASS_IN))
        try:
            for packet in query.packets():
                self.sock.sendto(packet, (_MDNS_ADDR, _MDNS_PORT))
        except OSError as error:
            self.error = f"{self._network.ip}: {error.strerror or error}"
        else:
            self._num_queries += 1
            self.error = ""

    def take(self) -> None:
        """All that has come."""
        while self.sock is not None and self._num_answers < MAX_DATAGRAMS:
            try:
                data, (sender, _) = self.sock.recvfrom(_MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError as error:  # such as an answer of ICMP
                self.error = f"{self._network.ip}: {error.strerror or error}"
                return
            self.hear(data, sender)
        if self.sock is not None:
            self._reject("", f"more than {MAX_DATAGRAMS} datagrams")
            self.close()

    def hear(self, data: bytes, sender: str) -> None:
        """One datagram."""
        self._num_answers += 1
        try:
            self._read(data, sender)
        except RecordRejected as problem:
            self._reject(sender, str(problem))

    def _read(self, data: bytes, sender: str) -> None:
        if ipaddress.IPv4Address(sender) not in self._network.network:
            raise RecordRejected(f"{sender} is not on the network of {self._interface.name}")
        packet = DNSIncoming(data, (sender, _MDNS_PORT))
        if not packet.valid or not packet.is_response():
            raise RecordRejected("not an answer of DNS")
        if packet.id not in self.query_ids:
            raise RecordRejected("an answer to another question")
        records = packet.answers()
        names = {
            each.alias for each in records if isinstance(each, DNSPointer) and each.name.lower() == SERVICE
        }
        if not names:
            raise RecordRejected("an answer about another service")
        for name in {each.name for each in records if each.ttl == 0}:
            self._texts.pop(name, None)
        for record in records:
            if record.ttl == 0 or not record.name.endswith(f".{SERVICE}"):
                continue
            if len(self._texts) >= MAX_HOSTS and record.name not in self._texts:
                raise RecordRejected(f"more than {MAX_HOSTS} announcements")
            if isinstance(record, DNSText):
                self._texts[record.name] = split_txt(record.text), sender
            elif isinstance(record, DNSService):
                self._ports[record.name] = record.port

    def _reject(self, sender: str, reason: str) -> None:
        if (sender, reason) in self._rejected or len(self._rejected) < MAX_REJECTED:
            self._rejected[sender, reason] += 1

    def sightings(self) -> list[Sighting]:
        found = []
        for name, (strings, sender) in self._texts.items():
            try:
                said: Announcement = parse_txt(strings, self._ports.get(name, 0))
            except RecordRejected as problem:
                self._reject(sender, str(problem))
                continue
            found.append(
                Sighting(announcement=said, source="multicast", interface=self._interface.name, sender=sender)
            )
        self._hosts = tuple(sorted({each.announcement.host for each in found}))
        return found

    def told(self) -> InterfaceScan:
        """After `sightings`."""
        return InterfaceScan(
            name=self._interface.name,
            link_class=self._interface.link_class,
            evidence=self._interface.evidence,
            address=str(self._network.ip),
            error=self.error,
            num_queries=self._num_queries,
            num_answers=self._num_answers,
            hosts=self._hosts,
            rejected=tuple(
                Rejected(sender=sender, reason=reason, count=count)
                for (sender, reason), count in self._rejected.items()
            ),
        )

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


def main() -> int:
    try:
        wish = msgspec.json.decode(first_line(0), type=ScanWish)
        stop = threading.Event()

        def watch() -> None:
            wait_for_end(0)
            stop.set()

        threading.Thread(target=watch, daemon=True).start()
        found = scan(wish, stop)
    except (SettingsError, msgspec.MsgspecError) as error:
        print(error, file=sys.stderr)
        return ExitCode.USAGE
    print(msgspec.json.encode(found).decode(), flush=True)
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
