"""`mlx-mesh discover`: what is on the network, interface by interface; and pairing with one host of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from mlx_mesh.launcher.discovered import Look, look
from mlx_mesh.launcher.paired import prove
from mlx_mesh.launcher.pairing import check_code
from mlx_mesh.launcher.pairings import PairedHost, Pairings
from mlx_mesh.launcher.text import harmless, table
from mlx_mesh.mesh.discovery import AgentRoute, FoundHost, InterfaceScan, ScanReport, in_words
from mlx_mesh.mesh.errors import MeshError, NotRunningError, SettingsError
from mlx_mesh.mesh.placement import format_bytes

MAX_CODE_CHARS = 64
WATCH_S = 1.0
"""From one look to the next, at least: when nothing can be asked, a look takes no time."""


def lines(made: ScanReport, paired: Sequence[str]) -> list[str]:
    """For people: interfaces, hosts, advice. `paired`: keys that this launcher trusts."""
    told: list[str] = []
    for interface in made.interfaces:
        told += _interface_lines(interface)
    for address in made.addresses:
        told.append(f"{address.address}: {address.host or f'no answer: {address.error}'}")
    told.append("")
    if made.hosts:
        rows = [_row(host, paired) for host in made.hosts]
        told += table(["HOST", "STATE", "CHIP", "MEMORY", "MLX-MESH", "SEEN ON", "ADDRESSES"], rows)
        told += [
            f"{host.name}: {host.verdict.reason}."
            for host in made.hosts
            if host.verdict.what in ("duplicate", "version", "busy")
        ]
    else:
        told.append("No host was seen.")
    return [*told, *(["", *made.advice] if made.advice else [])]


def _interface_lines(interface: InterfaceScan) -> list[str]:
    what = f"{interface.name} ({interface.link_class}, {interface.evidence})"
    if not interface.is_used:
        return [f"{what}: not used: {interface.why_not}"]
    if interface.error:
        return [f"{what}: asked {_times(interface.num_queries)}, then failed: {interface.error}"]
    seen = ", ".join(interface.hosts) or "nobody"
    told = [
        f"{what} {interface.address}: asked {_times(interface.num_queries)}, {interface.num_answers} "
        f"answers, seen: {seen}"
    ]
    return told + [
        f"  rejected from {each.sender or 'anybody'}: {harmless(each.reason)} ({_times(each.count)})"
        for each in interface.rejected
    ]


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def state_of(host: FoundHost, paired: Sequence[str]) -> str:
    """One word or two."""
    if not host.verdict.is_usable:
        what = host.verdict.what
        return {"self": "this host", "version": "other versions", "busy": "in a mesh"}.get(what, what)
    return "paired" if host.key in paired else "not paired"


def _row(host: FoundHost, paired: Sequence[str]) -> list[str]:
    seen = ", ".join(host.seen_on) or {"address": "its address"}.get(host.source, "")
    if host.source == "cache":
        seen = f"{in_words(host.age_s)} ago"
    return [
        host.name,
        state_of(host, paired),
        host.chip or "-",
        format_bytes(host.memory_bytes) if host.memory_bytes else "-",
        host.versions.mlx_mesh or "-",
        seen,
        ", ".join(f"{each.name} {address}" for each in host.interfaces for address in each.addresses),
    ]


def watch(at: Look, environment: Mapping[str, str]) -> Iterator[str]:
    """Changes as lines, for ever."""
    before: dict[str, str] = {}
    is_first = True
    while True:
        began = time.monotonic()
        made = look(at, environment)
        paired = [host.key for host in Pairings(environment).hosts()]
        now = {
            f"{host.name} ({', '.join(host.addresses[:2])})": state_of(host, paired)
            for host in made.hosts
            if host.verdict.what != "stale"
        }
        for name, state in now.items():
            if before.get(name) != state:
                yield f"+ {name}: {state}"
        for name in before:
            if name not in now:
                yield f"- {name}: does not answer any more"
        if is_first and made.advice:
            yield from made.advice
        before, is_first = now, False
        time.sleep(max(0.0, WATCH_S - (time.monotonic() - began)))


# ---------------------------------------------------------------- pairing


def pair(name: str, at: Look, environment: Mapping[str, str], typed: TextIO, say: TextIO) -> PairedHost:
    """Pair with a host by the code that it shows, which is read from `typed`. Raises MeshError."""
    host = _find_one(name, look(at, environment))
    pairings = Pairings(environment)
    own = pairings.key_of("launcher")
    say.write(f"Code that `mlx-mesh agent --pair` shows on {host.name} ({host.addresses[0]}): ")
    say.flush()
    code = check_code(typed.readline(MAX_CODE_CHARS))
    route = AgentRoute(address=host.addresses[0], port=host.port, key=host.key)
    prove(host.name, route, "code", code, own)
    kept = PairedHost(
        name=host.name, key=host.key, addresses=host.addresses[:4], port=host.port, paired_at=time.time()
    )
    pairings.keep_host(kept)
    return kept


def _find_one(name: str, made: ScanReport) -> FoundHost:
    """The host of this name or address that can be paired with."""
    found = [host for host in made.others if name in (host.name, *host.addresses)]
    found = [host for host in found if host.source != "cache"] or found[:1]
    if not found:
        seen = ", ".join(host.name for host in made.others) or "nobody"
        advice = " ".join(made.advice)
        raise NotRunningError(f"No host {name} was seen; seen: {seen}. {advice}".rstrip())
    if len(found) > 1:
        places = ", ".join(f"{host.name} ({host.addresses[0]})" for host in found)
        raise SettingsError(f"Several hosts are called {name}: {places}. Give the address instead.")
    if not found[0].verdict.is_usable:
        raise MeshError(f"{found[0].name} cannot be paired with: {found[0].verdict.reason}.")
    return found[0]


def forget(name: str, environment: Mapping[str, str]) -> str:
    """A host is trusted no more. Raises SettingsError."""
    pairings = Pairings(environment)
    gone = pairings.forget_host(name)
    if not gone:
        known = ", ".join(host.name for host in pairings.hosts()) or "none"
        raise SettingsError(f"No host {name} is paired; paired: {known}.")
    return (
        f"Forgot {', '.join(host.name for host in gone)}. It may still let this launcher in until "
        "`mlx-mesh agent --forget` is run there."
    )
