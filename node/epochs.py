"""The beginning and the end of an epoch, on all hosts. Why it ends is decided elsewhere."""

from __future__ import annotations

from mlx_mesh.mesh.messages import Deadlines, EpochEnded, StopEpoch
from mlx_mesh.node.counters import MeshCounters
from mlx_mesh.node.desk import Desk
from mlx_mesh.node.front_end import FrontEnd
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.switchboard import Switchboard
from mlx_mesh.node.waits import Waits

SLACK_S = 3.0
"""What others get beyond a limit that they keep by themselves."""


class Epochs:
    """One after the other, never two at a time."""

    def __init__(
        self,
        roster: Roster,
        waits: Waits,
        desk: Desk,
        switchboard: Switchboard,
        output: Output,
        deadlines: Deadlines,
        front: FrontEnd,
    ) -> None:
        self._roster = roster
        self._waits = waits
        self._desk = desk
        self._switchboard = switchboard
        self._output = output
        self._deadlines = deadlines
        self._front = front
        self.cause = "start"
        """Of the next one; '' = what changes until then will be."""
        self.was_ready = False
        """Some epoch of this mesh."""
        self.broke_at: float | None = None
        """When the last one that was ready ended; None = nobody waits for the next one."""
        self.counters = MeshCounters()

    @property
    def is_ready(self) -> bool:
        return self._roster.epoch.ready_at is not None

    def add_cause(self, words: str) -> None:
        self.cause = "; ".join(filter(None, (self.cause, words)))

    def begin(self) -> None:
        self._roster.begin_epoch(self.cause or "planned anew", self._waits.now())
        self.counters.num_epochs += 1
        self._desk.pause("loading the model")

    def note_ready(self) -> None:
        """All ranks are."""
        epoch, age = self._roster.epoch, self._waits.age
        epoch.ready_at = self._waits.now()
        self.was_ready = True
        self.counters.note_ready(age(epoch.began_at), None if self.broke_at is None else age(self.broke_at))

    def note_broken(self) -> float:
        """No step is done any more. Returns for how long it was ready."""
        epoch = self._roster.epoch
        ready_s = self._waits.age(epoch.ready_at) if epoch.ready_at is not None else 0.0
        epoch.ready_at = None
        self.broke_at = self._waits.now()
        return ready_s

    async def leave(self, why: str) -> None:
        """End an epoch with which nothing is wrong. Open requests go on in the next one."""
        self.note_broken()
        self._desk.epoch_left()
        self._output.event(EpochEnded(epoch=self._roster.epoch.number, cause=why, final=False))
        self._desk.pause(f"planning anew: {why}")
        self._front.rescue()
        await self.stop(why, gently=False)
        self.cause = ""

    async def stop(self, reason: str, *, gently: bool, dump: bool = False) -> None:
        """End the engines on all hosts; those that do not answer are no members any more."""
        number = self._roster.epoch.number
        self._roster.epoch.is_open = False
        self._switchboard.expire_members()
        stopping = list(self._roster.placed())
        for _, member in stopping:
            self._switchboard.send(member, StopEpoch(epoch=number, gently=gently, reason=reason, dump=dump))
        limit_s = self._deadlines.stop_s + SLACK_S
        await self._waits.settle(
            lambda: all(m.lost or seat.member is not m or m.stopped_epoch >= number for seat, m in stopping),
            limit_s,
        )
        for seat, member in stopping:
            if not member.lost and seat.member is member and member.stopped_epoch < number:
                member.lost = f"its agent did not end its engines within {limit_s:g} s"
