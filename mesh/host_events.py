"""What happened to a host while a mesh runs, in words: links that went and came, and sleep. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mlx_mesh.mesh.interfaces import Interface, LinkClass

SLEPT_S = 2.0
"""Less than this is two clocks that were not read at one moment."""

_WATCHED = (LinkClass.THUNDERBOLT, LinkClass.ETHERNET, LinkClass.WIFI)


def link_events(before: Sequence[Interface], after: Sequence[Interface]) -> list[str]:
    """What changed between two looks at a host's interfaces; tunnels and the like are left out."""
    old, new = _by_name(before), _by_name(after)
    return [
        event
        for name in dict.fromkeys([*old, *new])
        for event in _changes(name, old.get(name), new.get(name))
    ]


def _by_name(interfaces: Sequence[Interface]) -> Mapping[str, Interface]:
    return {i.name: i for i in interfaces if i.link_class in _WATCHED}


def _changes(name: str, old: Interface | None, new: Interface | None) -> list[str]:
    if new is None:
        return [f"{old.what if old else name} is gone"]
    if old is None:
        return [f"{new.what} is there now"] if new.is_active else []
    if old.is_active and not new.is_active:
        return [f"{new.what} lost its link"]
    events = [f"{new.what} has its link back"] if new.is_active and not old.is_active else []
    lost = [address for address in old.addresses if address not in new.addresses]
    got = [address for address in new.addresses if address not in old.addresses]
    if lost or got:
        events.append(f"{new.what} has {', '.join(new.addresses) or 'no address'}, before {_or_none(old)}")
    if old.mbits and new.mbits and old.mbits != new.mbits:
        events.append(f"{new.what} runs at {_rate(new.mbits)}, before {_rate(old.mbits)}")
    return events


def _or_none(interface: Interface) -> str:
    return ", ".join(interface.addresses) or "none"


def _rate(mbits: int) -> str:
    return f"{mbits / 1000:g} Gb/s" if mbits >= 1000 else f"{mbits} Mb/s"


def sleep_event(awake_s: float, total_s: float) -> str:
    """Of the time between two looks by a clock that stands while a machine sleeps and by one that goes on; ''
    when it did not sleep."""
    slept_s = total_s - awake_s
    return f"the machine slept for {slept_s:.0f} s" if slept_s > SLEPT_S else ""
