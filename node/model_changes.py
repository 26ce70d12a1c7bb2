"""Another model in the same mesh, or none: orders from the front end, and what the main flow does for them.

An order is answered at once and noted; the main flow sees it in `is_asked` and comes to `switch` or `unload`.
"""

from __future__ import annotations

import asyncio

from mlx_mesh.mesh.errors import BringUpError, MeshError, PlacementError, PreflightError
from mlx_mesh.mesh.membership import RestartBudget, Verdict
from mlx_mesh.mesh.messages import (
    EpochEnded,
    MeshConfig,
    MeshDown,
    NodeReply,
    SwitchModel,
    UnloadModel,
)
from mlx_mesh.mesh.types import Phase
from mlx_mesh.node.desk import RETRY_AFTER_S, Desk
from mlx_mesh.node.epochs import SLACK_S, Epochs
from mlx_mesh.node.facts import digest_with_revision, resolve_model
from mlx_mesh.node.front_end import FrontEnd
from mlx_mesh.node.gathering import place_model
from mlx_mesh.node.output import Output
from mlx_mesh.node.roster import Roster
from mlx_mesh.node.served_model import ServedModel
from mlx_mesh.node.switching import Served, Switch, refusal
from mlx_mesh.node.tokenizer_files import tokenizer_problem
from mlx_mesh.node.waits import EpochBroken, Waits

HOW_TO_LOAD = "POST /v1/models/load or `mlx-mesh model load` brings it back."


class ModelChanges:
    """One change at a time."""

    def __init__(
        self,
        mesh: MeshConfig,
        first_model: str,
        model: ServedModel,
        roster: Roster,
        waits: Waits,
        desk: Desk,
        epochs: Epochs,
        front: FrontEnd,
        output: Output,
    ) -> None:
        """`first_model`: the one that the mesh was started with, as it was named."""
        self._mesh = mesh
        self._deadlines = mesh.deadlines
        self._first_model = first_model
        self._model = model
        self._roster = roster
        self._waits = waits
        self._desk = desk
        self._epochs = epochs
        self._front = front
        self._output = output
        self._switch: Switch | None = None
        self._is_switching = False
        self._is_unloaded = self._must_load = False
        self.must_unload = False
        self.told = ""
        """How the last switch ended."""

    @property
    def is_asked(self) -> bool:
        """The main flow has something to do here."""
        return self._switch is not None or self.must_unload

    @property
    def has_begun(self) -> bool:
        """The old model is gone, and the new one did not come up yet."""
        return self._switch is not None and self._switch.has_begun

    # ------------------------------------------------------------ orders

    def order_switch(self, request: SwitchModel) -> None:
        """Answers at once when it is refused, else when the new model is planned."""
        served, epoch = self._model.name, self._roster.epoch.number
        code, words = refusal(request.model, self._first_model, self._mesh.allowed_models, self._is_switching)
        if (not code and not (self._desk.is_ready or self._is_unloaded)) or self.must_unload:
            code, words = "not_ready", f"The mesh is not ready: {self._desk.readiness.reason}."
        if code or request.model == served:
            words = words or f"{served} is served."
            self._front.send(NodeReply(id=request.id, error=code, message=words, epoch=epoch))
            return
        self._is_switching = True
        self._waits.help(self._prepare(request), "switch of models")

    async def _prepare(self, request: SwitchModel) -> None:
        """Plan the new model beside the old one, which serves on."""
        epoch = self._roster.epoch.number
        old = self._model.as_served()
        try:
            new = await self._look_at(request.model, epoch)
        except (MeshError, OSError) as error:
            self._is_switching = False
            known = {PlacementError: "model_does_not_fit", BringUpError: "not_ready"}
            code = known.get(type(error), "model_unusable")
            self._front.send(NodeReply(id=request.id, error=code, message=str(error), epoch=epoch))
            return
        self._switch = Switch(new, old)
        message = f"{request.model} is loaded in place of {old.name}; /ready says when it serves."
        self._front.send(NodeReply(id=request.id, message=message, epoch=epoch, is_changing=True))
        self._waits.changed.set()

    async def _look_at(self, name: str, epoch: int) -> Served:
        """All that is to be known of it before the old one goes. Raises MeshError or OSError."""
        folder = await asyncio.to_thread(resolve_model, name)
        if problem := await asyncio.to_thread(tokenizer_problem, folder):
            raise PreflightError(problem)
        is_first = name == self._first_model
        digest = "" if is_first else await asyncio.to_thread(digest_with_revision, folder)
        footprint = await self._model.sizes_of(folder, is_first=is_first)
        is_there = self._desk.is_ready or (self._is_unloaded and not self._must_load)
        if not is_there or self._roster.epoch.number != epoch:
            raise BringUpError("the mesh began anew meanwhile; ask again when it is ready")
        seats = [seat.index for seat, _ in self._roster.placed()]
        placement = place_model(self._roster, footprint, seats)
        return Served(name, folder, footprint, placement, digest, is_first=is_first)

    def order_unload(self, request: UnloadModel) -> NodeReply:
        """End the engines, and begin none until somebody asks for a model again."""
        epoch, name = self._roster.epoch.number, self._model.id
        error, is_changing = "", False
        if self._is_unloaded or self.must_unload:
            words = f"{name} is not loaded, or will not be for long."
        elif self._is_switching:
            error, words = "switch_in_progress", "Another model is being loaded; ask again when it is there."
        elif not self._epochs.was_ready:
            error, words = "not_ready", f"The mesh is not ready: {self._desk.readiness.reason}."
        else:
            is_changing = self.must_unload = True
            words = f"{name} is unloaded when open requests are done. {HOW_TO_LOAD}"
            self._desk.close("model_unloaded", f"{name} is being unloaded. {HOW_TO_LOAD}")
            self._waits.changed.set()
        return NodeReply(id=request.id, message=words, epoch=epoch, error=error, is_changing=is_changing)

    def order_load(self, request: SwitchModel) -> NodeReply | None:
        """Load the model that was unloaded; None when another one is asked for."""
        epoch, name = self._roster.epoch.number, self._model.id
        if request.model not in ("", "local", "default", name, self._model.name):
            return None
        if self._is_unloaded and not self._must_load:
            self._must_load = True
            self._waits.changed.set()
            words = f"{name} is loaded again; /ready says when it serves."
            return NodeReply(id=request.id, message=words, epoch=epoch, is_changing=True)
        if self.must_unload:
            return NodeReply(
                id=request.id,
                error="switch_in_progress",
                message=f"{name} is being unloaded; ask again when that is done.",
                epoch=epoch,
            )
        if self._is_unloaded or not self._is_switching:
            words = "is being loaded" if self._is_unloaded else "is served"
            return NodeReply(id=request.id, message=f"{name} {words}.", epoch=epoch)
        return None

    # ------------------------------------------------------------ another model

    async def switch(self) -> None:
        """Let open requests finish, then end the epoch of the old model. Raises EpochBroken when that breaks
        meanwhile: then nothing is switched."""
        assert self._switch is not None
        switch = self._switch
        why = f"switching from {switch.old.name} to {switch.new.name}"
        self._output.note(why)
        self._desk.close("switching_model", f"The mesh is {why}. Try again later.")
        await self._let_finish()
        self._desk.fail_all("switching_model", f"The mesh is {why}.", RETRY_AFTER_S)
        switch.has_begun = True
        await self._epochs.leave(why)
        await self._serve_instead(switch.new, why)

    async def wait_for_front(self) -> None:
        """After a switch: a model is served once there is a front end that can put its text into tokens."""
        if not self.has_begun:
            return
        limit_s = self._deadlines.spawn_s + SLACK_S
        late = Verdict(
            None,
            self._roster.host_of(0),
            Phase.READY,
            f"its front end is not there after {limit_s:g} s (spawn_s)",
        )
        await self._waits.wait(lambda: self._front.is_ready, self._waits.timer(limit_s), lambda: late)

    def take_front_failure(self, error: str) -> bool:
        """The front end cannot serve its model. True when that is one that was just switched to: the old one
        comes back, for which another front end is to be started."""
        if not self.has_begun:
            return False
        self._waits.refuse_front(error)
        return True

    async def give_up(self, verdict: Verdict) -> RestartBudget:
        """The new model did not come up: the old one comes back, with a full budget."""
        assert self._switch is not None
        switch = self._switch
        why = f"{switch.new.name} did not come up ({verdict}); {switch.old.name} comes back"
        self._output.event(EpochEnded(epoch=self._roster.epoch.number, cause=why, final=False))
        self._desk.pause(why)
        await self._epochs.stop(why, gently=False)
        self.told, self._switch = why, None
        await self._serve_instead(switch.old, why)
        return RestartBudget(self._mesh.max_restarts, was_ready=True)

    def end(self) -> None:
        """An epoch is ready: of the new model, or of the old one again."""
        switch, self._switch = self._switch, None
        if switch is not None and switch.has_begun:
            self.told = f"{switch.new.name} is served"
        elif switch is not None:  # it was planned for ranks that may be others now
            self.told = f"{switch.new.name} is not loaded: the mesh began anew before; ask again"
        if self.must_unload or self._desk.reopen() or switch is not None:  # closed for that, and stays so
            self._is_switching = False

    async def _serve_instead(self, served: Served, why: str) -> None:
        """From the next epoch on; the proxy that knows this model's text begins at once."""
        self._epochs.cause = why
        self._model.take(served)
        await self._front.replace(self._model.proxy_config(), self._deadlines.stop_s)

    async def _let_finish(self) -> None:
        """Wait for open requests, as long as drain_s. Raises EpochBroken when the epoch breaks meanwhile."""
        over = Verdict(None, "", Phase.READY, "drain_s is over")
        limit = self._waits.timer(self._deadlines.drain_s)
        try:
            await self._waits.wait(lambda: not len(self._desk.journal), limit, lambda: over)
        except EpochBroken as broken:
            if broken.verdict is not over:
                raise

    # ------------------------------------------------------------ no model

    async def unload(self) -> None:
        """Let open requests finish, end the epoch, and wait until a model is wanted. Raises EpochBroken when
        the epoch breaks meanwhile."""
        why = f"{self._model.id} was unloaded by a request"
        if self._epochs.is_ready:
            await self._let_finish()
            self._desk.fail_all("model_unloaded", f"{why}. {HOW_TO_LOAD}")
            await self._epochs.leave(why)
        self._desk.fail_all("model_unloaded", f"{why}. {HOW_TO_LOAD}")
        self._is_unloaded, self.must_unload = True, False
        self._desk.close("model_unloaded", f"{why}. {HOW_TO_LOAD}")
        self._desk.pause(f"{why}. {HOW_TO_LOAD}", "model_unloaded")
        self._output.event(MeshDown(reason=f"without a model: {why}"))
        await self._waits.wait_for_ever(lambda: self._must_load or self._switch is not None)
        self._epochs.cause = "the model was asked for again"
        self._epochs.broke_at = None  # nobody waited for it
        if self._switch is not None:
            self._switch.has_begun = True
            await self._serve_instead(self._switch.new, f"{self._switch.new.name} was asked for")
        self._is_unloaded = self._must_load = False
        self._desk.reopen()
        self._desk.pause("loading the model")
