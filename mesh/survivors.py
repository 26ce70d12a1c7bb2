"""Who serves when not every host is there, or more are there than serve. Values in, decision out.

A host is *wanted* when the mesh should run on it: at first all are. One that stays away for longer than
rejoin_timeout_s, goes away while it is being taken in, or is drained, is not wanted any more; one that is
there and not wanted is a *standby*. With `elastic` a standby is taken in by itself, else by `node add`. The
first host leads: without it there is no mesh, so it is always there. Hosts are told apart by their place in
the hostfile; names are for words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

Fits = Callable[[tuple[int, ...]], str]
"""Whether the model can be placed on these hosts: '' or, in words, why not."""

MAX_SETTLE_FACTOR = 64
"""A host that comes and goes is taken in later and later, up to so many times the first delay."""

HostState = Literal["serving", "gone", "standby", "drained", "failed"]


@dataclass(frozen=True, slots=True)
class HostView:
    """One host of the hostfile as the coordinator sees it now. Ages in seconds of observed time."""

    index: int
    name: str
    is_here: bool
    is_wanted: bool = True
    has_served: bool = True  # since it was taken in
    is_drained: bool = False  # by `node drain`: it comes back by `node add` only
    failure: str = ""  # why the mesh went on without it although it is there; the same holds
    gone_s: float = 0.0  # since its last sign of life
    why_gone: str = ""
    here_s: float = 0.0  # since it joined
    num_lost: int = 0

    @property
    def is_standby(self) -> bool:
        """It could serve and does not."""
        return self.is_here and not (self.is_wanted or self.is_drained or self.failure)


@dataclass(frozen=True, slots=True)
class Serve:
    """The next epoch runs on these hosts."""

    hosts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WaitFor:
    """These may still come back; the first of them is given up in `left_s`."""

    hosts: tuple[int, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class StayDown:
    """The model cannot be placed on who is there, because of `why`. `missing`: whose return would help."""

    missing: tuple[int, ...]
    why: str


Decision = Serve | WaitFor | StayDown


def choose(hosts: Sequence[HostView], fits: Fits, rejoin_timeout_s: float, *, elastic: bool) -> Decision:
    """Who takes part in the next epoch. All wanted hosts if they are there; else they are waited for, and
    then it is who remains, with the standbys when that needs them (or `elastic` would take them anyway). One
    that went away while it was being taken in is not waited for: the others were fine without it."""
    wanted = [host for host in hosts if host.is_wanted]
    missing = tuple(host for host in wanted if not host.is_here)
    waiting = [host for host in missing if host.has_served and host.gone_s < rejoin_timeout_s]
    if waiting:
        left_s = min(rejoin_timeout_s - host.gone_s for host in waiting)
        return WaitFor(tuple(host.index for host in waiting), left_s)
    remaining = tuple(host.index for host in wanted if host.is_here)
    everyone = tuple(host.index for host in hosts if host.is_here and (host.is_wanted or host.is_standby))
    tries = (everyone, remaining) if elastic else (remaining, everyone)
    why = ""
    for tried in dict.fromkeys(tries):
        reason = fits(tried)
        if not reason:
            return Serve(tried)
        if tried == everyone:
            why = reason  # the fewest bytes are missing where most hosts are
    return StayDown(tuple(host.index for host in missing), why)


def growth(hosts: Sequence[HostView], fits: Fits, settle_s: float) -> tuple[int, ...]:
    """Under `elastic`: standbys to take in now, all that are ready or none. A host must have been there for
    `settle_s`, twice as long for each further time that it was lost, so that one that comes and goes does
    not stop everybody each time."""
    fresh = tuple(
        host.index for host in hosts if host.is_standby and host.here_s >= settle_time_s(host, settle_s)
    )
    serving = tuple(host.index for host in hosts if host.is_wanted)
    return fresh if fresh and not fits(tuple(sorted((*serving, *fresh)))) else ()


def settle_time_s(host: HostView, settle_s: float) -> float:
    """How long a host must be there before it is taken in again."""
    return float(settle_s * min(2.0 ** max(0, host.num_lost - 1), MAX_SETTLE_FACTOR))


class Refusal(Exception):
    """Something that was asked for cannot be done, in words; `code` for programs."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def find(hosts: Sequence[HostView], name: str) -> HostView:
    """The host of this name. Raises Refusal."""
    found = [host for host in hosts if host.name == name]
    if len(found) == 1:
        return found[0]
    names = ", ".join(host.name for host in hosts)
    if found:
        raise Refusal("host_ambiguous", f"{len(found)} hosts of this mesh are called {name}.")
    raise Refusal(
        "host_not_found",
        f"{name} is no host of this mesh; it has {names}. A new host is added to the hostfile, for the "
        "next `mlx-mesh up`.",
    )


def check_drain(hosts: Sequence[HostView], name: str, fits: Fits, *, has_leader: bool = True) -> HostView:
    """The host that may be drained. Raises Refusal when the mesh cannot do without it. `has_leader`: the
    first host is the one that serves HTTP, which is so in the first replica only."""
    host = find(hosts, name)
    if host.index == 0 and has_leader:
        raise Refusal(
            "host_leads",
            f"{name} is the leader: it serves HTTP and keeps the open requests, so the mesh cannot go on "
            "without it. End the mesh with `mlx-mesh down` and start it with another host first.",
        )
    if not host.is_wanted:
        return host
    rest = tuple(h.index for h in hosts if h.is_here and h.is_wanted and h is not host)
    if why := fits(rest):
        raise Refusal("does_not_fit", f"Without {name} the model cannot be served. {why}")
    return host


def check_add(hosts: Sequence[HostView], name: str, fits: Fits) -> HostView:
    """The host that may be taken in. Raises Refusal."""
    host = find(hosts, name)
    if not host.is_here:
        gone = f" ({host.why_gone})" if host.why_gone else ""
        raise Refusal(
            "host_not_here",
            f"{name} is not there{gone}. Its agent is started again as soon as the host can be reached; ask "
            "again then.",
        )
    if host.is_wanted:
        return host
    all_of_them = tuple(h.index for h in hosts if h.is_here and (h.is_wanted or h is host))
    if why := fits(all_of_them):
        raise Refusal("does_not_fit", f"With {name} the model cannot be placed. {why}")
    return host


# ---------------------------------------------------------------- words


def state_of(host: HostView) -> HostState:
    if not host.is_here:
        return "gone"
    if host.is_wanted:
        return "serving"
    if host.failure:
        return "failed"
    return "drained" if host.is_drained else "standby"


def detail_of(host: HostView) -> str:
    """Why a host does not serve, for people; '' when it does."""
    match state_of(host):
        case "gone":
            return host.why_gone or "its agent is not there"
        case "standby":
            return f"`mlx-mesh node add {host.name}` takes it in"
        case "failed":
            return f"{host.failure}; `mlx-mesh node add {host.name}` tries it again"
        case "drained":
            return f"drained; `mlx-mesh node add {host.name}` takes it in again"
        case _:
            return ""


_SENTENCE: dict[HostState, str] = {
    "serving": "{} serves",
    "gone": "{} is gone",
    "standby": "{} is a standby",
    "drained": "{} is drained",
    "failed": "{} failed",
}


def describe_lineup(hosts: Sequence[HostView], since: str) -> str:
    """ "serving with 2 of 3 hosts since 2026-11-29 21:43:05 UTC: mac2 is gone (...)"; '' with all of them."""
    serving = [host for host in hosts if host.is_wanted]
    others = [host for host in hosts if not host.is_wanted]
    if not others:
        return ""
    words = ", ".join(
        _SENTENCE[state_of(host)].format(host.name)
        + (f" ({why})" if (why := host.failure if host.is_here else host.why_gone) else "")
        for host in others
    )
    return f"serving with {len(serving)} of {len(hosts)} hosts since {since}: {words}"


def describe_wait(hosts: Sequence[HostView], decision: WaitFor | StayDown, limit_s: float) -> str:
    """Why no epoch can begin now."""
    awaited = decision.hosts if isinstance(decision, WaitFor) else decision.missing
    names = ", ".join(
        host.name + (f" ({host.why_gone})" if host.why_gone else "")
        for host in hosts
        if host.index in awaited
    )
    if isinstance(decision, WaitFor):
        return f"waiting for {names}, up to {limit_s:g} s (rejoin_timeout_s) since the last sign of life"
    back = f" It starts again when one returns of: {names}." if names else ""
    return f"down: the model cannot be served by the hosts that are there. {decision.why}{back}"
