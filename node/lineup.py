"""Which hosts the mesh runs on: `mesh.survivors`' rules applied to the coordinator's books."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Literal

from mlx_mesh.mesh.errors import PlacementError
from mlx_mesh.mesh.memory import in_one_line
from mlx_mesh.mesh.messages import ChangeNode, Deadlines, HostStatus, NodeReply
from mlx_mesh.mesh.survivors import (
    Decision,
    HostView,
    Refusal,
    Serve,
    StayDown,
    WaitFor,
    check_add,
    check_drain,
    choose,
    describe_lineup,
    describe_wait,
    detail_of,
    growth,
    settle_time_s,
    state_of,
)
from mlx_mesh.mesh.types import Placement
from mlx_mesh.node.roster import Roster

SETTLE_BEATS = 3
"""A host that came back must have been there for so many heartbeats before the mesh stops for it."""

Change = Literal["lost", "returned", "drained", "added", "failed"]


class Lineup:
    """Decides between epochs who takes part, and while one runs whether another would be better."""

    def __init__(
        self,
        roster: Roster,
        deadlines: Deadlines,
        *,
        place: Callable[[tuple[int, ...]], Placement],
        now: Callable[[], float],
    ) -> None:
        """`place` plans the model on some hosts, all of which are there; raises PlacementError."""
        self._roster = roster
        self._deadlines = deadlines
        self._place = place
        self._now = now
        self._tried: dict[tuple[tuple[int, bytes], ...], str] = {}
        self._asked: list[tuple[Change, int]] = []  # by `node drain` and `node add`, to be done
        self._since = ""
        self.changes: Counter[Change] = Counter()
        """Re-plans so far, by what was the reason."""

    # ------------------------------------------------------------ deciding

    def decide(self) -> Decision:
        """Between epochs: who takes part in the next one."""
        return choose(
            self._views(),
            self._fits,
            self._deadlines.rejoin_timeout_s,
            elastic=self._roster.mesh.elastic,
        )

    def settle(self, decision: Serve) -> str:
        """These hosts serve from now on. Returns what changed, in words; '' when nothing did."""
        words = []
        asked = {index: change for change, index in self._asked}
        for seat in self._roster.seats:
            serves = seat.index in decision.hosts
            if seat.index in asked and bool(seat.ranks) != serves:
                self.changes[asked[seat.index]] += 1
                words.append(f"{seat.host} {'was added' if serves else 'was drained'}")
            elif serves and not seat.ranks:
                self.changes["returned"] += 1
                words.append(f"{seat.host} is back")
            elif seat.ranks and not serves and seat.failure:
                self.changes["failed"] += 1
                words.append(f"{seat.host} failed too often")
            elif seat.ranks and not serves:
                self.changes["lost"] += 1
                words.append(f"{seat.host} did not come back ({self._why_gone(seat.index)})")
            seat.is_wanted = serves
            seat.has_served = seat.has_served and serves
        self._asked.clear()
        if words:
            self._since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        return ", ".join(words)

    def note_ready(self) -> None:
        """The mesh is ready with all who have ranks."""
        for seat in self._roster.seats:
            seat.has_served = bool(seat.ranks)

    def wants(self) -> str:
        """While an epoch runs: why the mesh should stop for a moment and go on with other hosts; '' = it
        should not."""
        if self._asked:
            seats = self._roster.seats
            return ", ".join(f"{seats[index].host} is {change}" for change, index in self._asked)
        if not self._roster.mesh.elastic or all(seat.is_wanted for seat in self._roster.seats):
            return ""
        settle_s = SETTLE_BEATS * self._deadlines.heartbeat_interval_s
        back = growth(self._views(), self._fits, settle_s)
        for index in back:
            self._roster.seats[index].is_wanted = True
        names = ", ".join(self._roster.seats[index].host for index in back)
        return f"{names} came back" if names else ""

    def change(self, request: ChangeNode) -> NodeReply:
        """Drain or add a host, from the next moment on when an epoch can be left."""
        views = self._views()
        epoch = self._roster.epoch.number
        try:
            if request.action == "drain":
                host = check_drain(views, request.host, self._fits, has_leader=self._has_leader)
            else:
                host = check_add(views, request.host, self._fits)
        except Refusal as refusal:
            return NodeReply(id=request.id, error=refusal.code, message=str(refusal), epoch=epoch)
        seat, is_drain = self._roster.seats[host.index], request.action == "drain"
        seat.is_drained, seat.failure = is_drain, ""
        if seat.is_wanted == is_drain:
            seat.is_wanted = not is_drain
            self._asked.append(("drained" if is_drain else "added", host.index))
        elif bool(seat.ranks) != is_drain:  # else it was asked for already, and is still to be done
            words = "does not serve anyway; it stays out until it is added" if is_drain else "serves already"
            return NodeReply(id=request.id, message=f"{host.name} {words}.", epoch=epoch)
        words = "without" if is_drain else "with"
        return NodeReply(
            id=request.id,
            message=f"The mesh goes on {words} {host.name}; open requests go on with the same text.",
            epoch=epoch,
            is_changing=True,
        )

    def give_up(self, host: str, failure: str) -> bool:
        """Go on without a host that is to blame again and again; False when the mesh cannot."""
        try:
            view = check_drain(self._views(), host, self._fits, has_leader=self._has_leader)
        except Refusal:
            return False
        seat = self._roster.seats[view.index]
        seat.is_wanted, seat.failure = False, failure
        return True

    @property
    def _has_leader(self) -> bool:
        return self._roster.mesh.replica == 0

    def _fits(self, chosen: tuple[int, ...]) -> str:
        """'' or in one line why not; each set of agents is tried once."""
        if not chosen:
            return "None of its hosts is there."
        seats = self._roster.seats
        key = tuple((i, member.peer) for i in chosen if (member := seats[i].member) is not None)
        if key not in self._tried:
            try:
                self._place(chosen)
                self._tried[key] = ""
            except PlacementError as error:
                self._tried[key] = in_one_line(error)
        return self._tried[key]

    def _views(self) -> list[HostView]:
        now = self._now()
        return [
            HostView(
                index=seat.index,
                name=seat.host,
                is_here=seat.is_taken,
                is_wanted=seat.is_wanted,
                has_served=seat.has_served,
                is_drained=seat.is_drained,
                failure=seat.failure,
                gone_s=max(0.0, now - seat.member.beat_at) if seat.member is not None else 0.0,
                why_gone=self._why_gone(seat.index),
                here_s=max(0.0, now - seat.member.joined_at) if seat.member is not None else 0.0,
                num_lost=seat.num_lost,
            )
            for seat in self._roster.seats
        ]

    def _why_gone(self, index: int) -> str:
        member = self._roster.seats[index].member
        return member.lost if member is not None else ""

    # ------------------------------------------------------------ words

    def describe(self) -> str:
        """How the mesh falls short of its hostfile while it serves; '' when it does not."""
        return describe_lineup(self._views(), self._since)

    def describe_wait(self, decision: WaitFor | StayDown) -> str:
        """Why no epoch can begin now."""
        return describe_wait(self._views(), decision, self._deadlines.rejoin_timeout_s)

    def rows(self) -> tuple[HostStatus, ...]:
        """A row per host of the hostfile."""
        settle_s = SETTLE_BEATS * self._deadlines.heartbeat_interval_s
        rows, mesh = [], self._roster.mesh
        for view in self._views():
            detail = detail_of(view)
            if mesh.elastic and state_of(view) == "standby":
                detail = f"taken in {settle_time_s(view, settle_s):g} s after it came, if the model fits then"
            ranks = tuple(mesh.first_rank + rank for rank in self._roster.seats[view.index].ranks)
            member = self._roster.seats[view.index].member
            is_here = member is not None and not member.lost
            rows.append(
                HostStatus(
                    host=view.name,
                    state=state_of(view),
                    ranks=ranks,
                    detail=detail,
                    pressure=member.pressure if member is not None and is_here else "",
                    awake=member.awake if member is not None and is_here else "",
                    events=member.events if member is not None else (),
                    model_part=member.join.facts.model_part if member is not None else "",
                    replica=mesh.replica + 1,
                )
            )
        return tuple(rows)
