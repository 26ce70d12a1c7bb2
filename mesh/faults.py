"""Faults to order, as words: `kill:1@decode+5`. Pure; only `up --sim N --fault` and the engines that it
starts know this module.

    KIND:RANK@MOMENT[+COUNT][=VALUE][#EPOCH]
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from mlx_mesh.mesh.errors import SettingsError


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL
    FREEZE = "freeze"  # SIGSTOP
    DELAY = "delay"  # does nothing for VALUE seconds (default 2), alive
    DROP = "drop"  # its next message is lost: a step plan, or a report of bring-up
    CORRUPT = "corrupt"  # wrong numbers: the checked collective, a weight report, a sampled id
    MEMORY = "memory"  # may allocate only VALUE more bytes (default 16MB)


class Moment(StrEnum):
    CONNECT = "connect"
    LOAD = "load"  # +COUNT: layers loaded before
    WARM_UP = "warm-up"
    PREFILL = "prefill"  # +COUNT: steps that read prompts before
    DECODE = "decode"  # +COUNT: steps that only generate before
    PICTURES = "pictures"  # +COUNT: prompts whose files were read before; rank 0
    TOWER = "tower"  # +COUNT: passes of a vision tower before; rank 0
    FEATURES = "features"  # +COUNT: plans with what pictures became that were sent, or came, before
    IDLE = "idle"  # +COUNT: seconds of idleness before


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of one rank."""

    kind: FaultKind
    rank: int
    moment: Moment
    count: int = 0
    value: float = 0.0
    epoch: int = 1  # 0 = in every epoch


_PATTERN = re.compile(
    r"(?P<kind>[a-z]+):(?P<rank>\d+)@(?P<moment>[a-z-]+)"
    r"(?:\+(?P<count>\d+))?(?:=(?P<value>\d+(?:\.\d+)?)(?P<unit>s|MB|GB)?)?(?:#(?P<epoch>\d+|\*))?"
)
_UNITS = {None: 1.0, "s": 1.0, "MB": 1e6, "GB": 1e9}
_DEFAULTS = {FaultKind.DELAY: 2.0, FaultKind.MEMORY: 16e6}
FORM = "KIND:RANK@MOMENT[+COUNT][=VALUE][#EPOCH], like kill:1@decode+5 or delay:0@prefill=3s#*"


def parse_fault(text: str) -> Fault:
    """Raises SettingsError that says what is wrong and what would be right."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise SettingsError(f"--fault {text} is not of the form {FORM}.")
    try:
        kind = FaultKind(match["kind"])
    except ValueError:
        raise SettingsError(f"--fault {text}: {match['kind']} is none of {', '.join(FaultKind)}.") from None
    try:
        moment = Moment(match["moment"])
    except ValueError:
        raise SettingsError(f"--fault {text}: {match['moment']} is none of {', '.join(Moment)}.") from None
    value = float(match["value"]) * _UNITS[match["unit"]] if match["value"] else _DEFAULTS.get(kind, 0.0)
    epoch = {"*": 0, None: 1}.get(match["epoch"])
    return Fault(
        kind=kind,
        rank=int(match["rank"]),
        moment=moment,
        count=int(match["count"] or 0),
        value=value,
        epoch=int(match["epoch"]) if epoch is None else epoch,
    )


def check_faults(texts: Sequence[str], num_ranks: int) -> tuple[str, ...]:
    """The same texts, all of them good for a mesh of so many ranks. Raises SettingsError."""
    for text in texts:
        fault = parse_fault(text)
        if fault.rank >= num_ranks:
            raise SettingsError(f"--fault {text}: there is no rank {fault.rank} among {num_ranks}.")
    return tuple(texts)


def faults_of(texts: Sequence[str], rank: int, epoch: int) -> tuple[Fault, ...]:
    """What this rank has to do in this epoch."""
    faults = (parse_fault(text) for text in texts)
    return tuple(fault for fault in faults if fault.rank == rank and fault.epoch in (0, epoch))
