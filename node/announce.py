"""Announcing this host on the local network by DNS-SD over multicast DNS, until told to stop.

`python -m mlx_mesh.node.announce` does it for `mlx-mesh agent`: a line of JSON (Wish) on stdin begins it, the
end of stdin ends it with a goodbye, and each announcement is printed as a line of JSON (Announced).
"""

from __future__ import annotations

import contextlib
import ipaddress
import secrets
import signal
import sys
import threading
from collections.abc import Callable, Sequence

import ifaddr
import msgspec
from zeroconf import Error, IPVersion, ServiceInfo, Zeroconf

from mlx_mesh.mesh.discovery import SERVICE, Announcement, Role, format_txt, usable_interfaces
from mlx_mesh.mesh.errors import ExitCode, SettingsError
from mlx_mesh.node.identity import describe_host
from mlx_mesh.node.input import first_line, wait_for_end
from mlx_mesh.node.interfaces import own_interfaces

POLL_S = 5.0
"""How soon a changed interface is announced."""

GOODBYE_S = 3.0
RETRY_S = 15.0
"""After an announcement that could not be made."""


class Wish(msgspec.Struct, frozen=True, kw_only=True):
    """What to announce beside what is known of this host anyway."""

    role: Role = "node"
    port: int = 0
    key: str = ""
    mesh: str = ""
    interfaces: tuple[str, ...] = ()  # rules, see `usable_interfaces`
    is_silent: bool = False  # say what would be announced, and send nothing


class Announced(msgspec.Struct, frozen=True, kw_only=True):
    """What was announced, on which interfaces of this host; `error`: it was not, and why."""

    strings: dict[str, str] = {}
    on: tuple[str, ...] = ()
    error: str = ""


class Announcer:
    """Announces from a thread of its own. `start`, then `stop`."""

    def __init__(self, wish: Wish, on_change: Callable[[Announced], None]) -> None:
        """`on_change` hears each announcement, in the announcer's thread."""
        self._wish = wish
        self._on_change = on_change
        self._run = secrets.token_hex(8)
        self._zeroconf: Zeroconf | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="announcer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Say goodbye, which takes half a second; a system that is asked for its interfaces just now may be
        slower, and is not waited for longer than GOODBYE_S."""
        self._stop.set()
        self._thread.join(timeout=GOODBYE_S)

    def _work(self) -> None:
        seen: object = None
        last: Announced | None = None
        try:
            while not self._stop.is_set():
                if (now := _snapshot()) != seen:
                    self._take_back()
                    told = self._announce()
                    if told != last:
                        self._on_change(told)
                    last, seen = told, None if told.error else now
                self._stop.wait(RETRY_S if seen is None else POLL_S)
        finally:
            self._take_back()

    def _announce(self) -> Announced:
        """On the interfaces that there are now."""
        used, _ = usable_interfaces(own_interfaces(), self._wish.interfaces)
        if not used:
            return Announced(error="no interface leads to other hosts")
        announcement = self._describe(describe_host(self._run, used))
        strings = format_txt(announcement)
        if self._wish.is_silent:
            return Announced(strings=strings)
        try:
            self._zeroconf = Zeroconf(
                interfaces=[each.addresses[0].partition("/")[0] for each in used],
                ip_version=IPVersion.V4Only,
                use_asyncio=False,
            )
            # Names of our own: records for NAME.local would make the system's responder rename the host.
            name = f"{announcement.host[:40]}-{self._run[:8]}"
            info = ServiceInfo(
                SERVICE,
                f"{name}.{SERVICE}",
                port=announcement.port,
                properties=dict(strings),
                server=f"mlx-mesh-{self._run}.local.",
                parsed_addresses=list(announcement.addresses),
            )
            # Nobody else has this name, so there is nothing to probe for.
            self._zeroconf.register_service(info, cooperating_responders=True)
        except (OSError, Error, RuntimeError) as error:
            self._take_back()
            return Announced(strings=strings, error=f"{type(error).__name__}: {error}")
        return Announced(strings=strings, on=tuple(each.name for each in used))

    def _take_back(self) -> None:
        """With a goodbye, unless the network is gone."""
        if self._zeroconf is not None:
            with contextlib.suppress(OSError, Error, RuntimeError, TimeoutError):
                self._zeroconf.close()
            self._zeroconf = None

    def _describe(self, host: Announcement) -> Announcement:
        wish = self._wish
        return msgspec.structs.replace(host, role=wish.role, port=wish.port, key=wish.key, mesh=wish.mesh)


def _snapshot() -> Sequence[tuple[str, str]]:
    """Interfaces and IPv4 addresses: cheap enough to look at all the time."""
    return sorted(
        (adapter.name, f"{ipaddress.IPv4Address(ip.ip)}/{ip.network_prefix}")
        for adapter in ifaddr.get_adapters()
        for ip in adapter.ips
        if ip.is_IPv4 and isinstance(ip.ip, str)
    )


def main() -> int:
    for number in (signal.SIGINT, signal.SIGHUP):  # whose end is the end of stdin
        signal.signal(number, signal.SIG_IGN)
    try:
        wish = msgspec.json.decode(first_line(0), type=Wish)
    except (SettingsError, msgspec.MsgspecError) as error:
        print(f"the wish cannot be read: {error}", file=sys.stderr)
        return ExitCode.USAGE
    announcer = Announcer(wish, lambda told: print(msgspec.json.encode(told).decode(), flush=True))
    announcer.start()
    wait_for_end(0)
    announcer.stop()
    return ExitCode.OK


if __name__ == "__main__":
    sys.exit(main())
