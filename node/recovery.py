"""After a verdict: the engines of the broken epoch are ended, and it is decided how the mesh goes on."""

from __future__ import annotations

from mlx_mesh.mesh.membership import RestartBudget, Verdict, VerdictKind
from mlx_mesh.mesh.messages import EpochEnded, MeshConfig, MeshDown
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.desk import Desk
from mlx_mesh.node.epochs import Epochs
from mlx_mesh.node.front_end import FrontEnd
from mlx_mesh.node.last_words import final_error, stacks_of
from mlx_mesh.node.lineup import Lineup
from mlx_mesh.node.model_changes import ModelChanges
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.waits import Waits

REST_S = 60.0
"""A replica that failed too often is tried again after so long, while others serve."""


class Recovery:
    """Keeps the restart budget, and counts the restarts."""

    def __init__(
        self,
        mesh: MeshConfig,
        roster: Roster,
        waits: Waits,
        desk: Desk,
        epochs: Epochs,
        changes: ModelChanges,
        lineup: Lineup,
        front: FrontEnd,
        output: Output,
    ) -> None:
        self._max_restarts = mesh.max_restarts
        self._roster = roster
        self._waits = waits
        self._desk = desk
        self._epochs = epochs
        self._changes = changes
        self._lineup = lineup
        self._front = front
        self._output = output
        self._budget = RestartBudget(mesh.max_restarts)
        self.num_restarts = 0

    async def recover(self, verdict: Verdict) -> None:
        """End the broken epoch on all hosts; returns when the next one may begin. Raises MeshError when there
        is none."""
        epoch, was_ready = self._roster.epoch, self._epochs.was_ready
        ready_s = self._epochs.note_broken()
        self._count(verdict)
        num_convicted = self._desk.epoch_ended(by_itself=verdict.by_itself, was_killed=verdict.was_killed)
        self._epochs.counters.num_convicted += num_convicted
        # An epoch that a request is to blame for says nothing about the mesh, nor does a host that went away
        # from one that was ready: the others can go on without it.
        is_elsewhere = num_convicted > 0 or (verdict.rank is None and ready_s > 0)
        self._budget = self._budget.epoch_ended(
            str(verdict), completed_step=epoch.has_completed_step or is_elsewhere, ready_s=ready_s
        )
        if self._changes.has_begun and not ready_s:
            self._budget = await self._changes.give_up(verdict)
            return
        is_final = not verdict.retryable or self._budget.is_exhausted
        if is_final and was_ready and self._give_up_one_of(verdict):
            is_final, self._budget = False, self._full_budget()
        must_rest = is_final and was_ready and self._front.others_serve()
        is_final = is_final and not must_rest
        self._output.event(EpochEnded(epoch=epoch.number, cause=str(verdict), final=is_final))
        self._desk.pause(f"recovering: {verdict}" if was_ready else str(verdict))
        self._front.rescue()
        await self._epochs.stop(str(verdict), gently=False, dump=verdict.wants_stacks)
        if must_rest:
            await self._rest(verdict)
        elif is_final:
            raise final_error(self._roster, verdict, self._budget)
        else:
            await self._try_again(verdict)

    async def _try_again(self, verdict: Verdict) -> None:
        if verdict.phase == Phase.CONNECTING:
            self._output.note(
                "a listener left over by another program, or a stray client, may have taken part; trying "
                "again with new engines on new ports"
            )
        self.num_restarts += 1
        self._epochs.cause = str(verdict) + stacks_of(self._roster)
        await self._waits.settle(lambda: self._waits.stop_reason is not None, self._budget.delay_s)

    async def _rest(self, verdict: Verdict) -> None:
        """This replica cannot go on now, and others serve: the mesh does not end. It is tried again later."""
        words = f"down: {verdict}. It is tried again every {REST_S:g} s while other replicas serve."
        self._output.event(MeshDown(reason=words))
        self._desk.go_down(words)
        self._epochs.cause = f"tried again after: {verdict}"
        await self._waits.settle(
            lambda: self._waits.stop_reason is not None or not self._front.others_serve(), REST_S
        )
        self._budget = self._full_budget()

    def _full_budget(self) -> RestartBudget:
        return RestartBudget(self._max_restarts, was_ready=True)

    def _give_up_one_of(self, verdict: Verdict) -> bool:
        """Go on without the likeliest suspect that the mesh can do without; False when there is none."""
        return any(self._lineup.give_up(host, str(verdict)) for host in verdict.suspects)

    def _count(self, verdict: Verdict) -> None:
        who = f"host {verdict.host}" if verdict.rank is None else f"rank {verdict.rank}"
        counters = self._epochs.counters
        counters.verdicts[verdict.kind, str(verdict.phase), who] += 1
        counters.silent_s += verdict.silent_s
        counters.num_divergences += verdict.kind is VerdictKind.DIVERGED
